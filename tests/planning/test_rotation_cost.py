"""From which M on the step of basis rotation is cheap, against arithmetic by hand."""

import math
from pathlib import Path

import pytest

from brx.accelerators import MeasuredRates
from brx.config.loading import load_config
from brx.planning.rotation_cost import (
    configured_rates,
    least_micro_batches,
    rates_in_tf32,
    rotation_lines,
    step_ratio,
)

ROUND = MeasuredRates("a round one", bf16=800, tf32=400, fp32=50)
ROOT = Path(__file__).parents[2]
WIDTH, BLOCKS, TOKENS = 1728, 24, 4096


# All products in fp32. Without these settings, the plan is for CUDA, where TF32 is the default.
IN_FP32 = ("optimizer.rotation_precision=highest", "optimizer.covariance_precision=highest")


def paper_1b(*overrides):
    return load_config("paper-1b", ["optimizer={method: basis-rotation}", *IN_FP32, *overrides])


def seconds_by_hand(rotations, covariances, refreshes):
    """Of an update, and of a micro-batch's passes, from the shapes of the model."""
    matrices = BLOCKS * ([(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH)] * 2)
    update = 0.0
    for m, n in matrices:
        product = 2 * m * n * (m + n)
        # A product, five passes of CholeskyQR, and two products with triangles.
        refresh = 2 * product + 17 * (m**3 + n**3)
        update += 2 * product / rotations + product / covariances + refresh / 10 / refreshes
    weights = sum(m * n for m, n in matrices) + 50257 * WIDTH
    attention = BLOCKS * 4 * 512 * WIDTH * TOKENS  # Q K^T, and its product with V
    passes = 3 * (2 * weights * TOKENS + attention) / 800e12
    return update, passes


@pytest.mark.parametrize(
    ("precision", "rotations"), [("highest", 50e12), ("tf32", 400e12), ("bf16", 800e12 / 3)]
)
def test_least_micro_batches_are_those_by_hand(precision, rotations):
    config = paper_1b(f"optimizer.rotation_precision={precision}")
    update, passes = seconds_by_hand(rotations, 50e12, 50e12)
    least = least_micro_batches(config, configured_rates(config, ROUND))
    assert least == math.ceil(update / (0.25 * passes))


def test_covariances_count_in_their_own_precision():
    config = paper_1b("optimizer.covariance_precision=tf32")
    update, passes = seconds_by_hand(50e12, 400e12, 50e12)
    least = least_micro_batches(config, configured_rates(config, ROUND))
    assert least == math.ceil(update / (0.25 * passes))


def test_the_default_is_tf32_without_the_refreshes():
    config = load_config("paper-1b", ["optimizer={method: basis-rotation}"])
    update, passes = seconds_by_hand(400e12, 400e12, 50e12)
    least = least_micro_batches(config, configured_rates(config, ROUND))
    assert least == math.ceil(update / (0.25 * passes))


def test_tf32_throughout_needs_fewer():
    config = paper_1b()
    update, passes = seconds_by_hand(400e12, 400e12, 400e12)
    least = least_micro_batches(config, rates_in_tf32(config, ROUND))
    assert least == math.ceil(update / (0.25 * passes))


def test_ratio_is_that_by_hand():
    config = paper_1b("pipeline.accumulation=3", "training.batch_size=8")
    update, passes = seconds_by_hand(50e12, 50e12, 50e12)
    ratio = step_ratio(config, configured_rates(config, ROUND))
    assert ratio == pytest.approx(1 + update / (3 * passes), rel=1e-6)


@pytest.mark.parametrize("settings", [[], ["pipeline.devices=6"]], ids=["one device", "six"])
def test_from_the_least_on_the_step_is_cheap(settings):
    config = paper_1b(*settings)
    rates = configured_rates(config)
    least = least_micro_batches(config, rates)
    enough, too_few = (
        paper_1b(*settings, f"pipeline.accumulation={count}") for count in (least, least - 1)
    )
    assert step_ratio(enough, rates) <= 1.25 < step_ratio(too_few, rates)


def test_other_methods_have_no_such_line():
    assert rotation_lines(load_config("paper-1b")) == []


def test_plan_prints_the_least(printed):
    text = printed("plan", "paper-1b", "--set", "optimizer.method=basis-rotation")
    config = load_config("paper-1b", ["optimizer={method: basis-rotation}"])
    least = least_micro_batches(config, configured_rates(config))
    expected = f"at most 1.25 times from M = {least} ({least * 4096:,} tokens per update) on"
    assert expected in " ".join(text.split())


@pytest.mark.parametrize("preset", ["paper-95m", "paper-1b", "paper-3b"])
def test_page_has_the_counted_tokens(preset):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{preset}` | "))
    printed = [int(cell.replace(",", "")) for cell in row.split("|")[2:6]]
    fp32 = load_config(preset, ["optimizer.method=basis-rotation", *IN_FP32])
    config = load_config(preset, ["optimizer.method=basis-rotation"])
    never = load_config(preset, ["optimizer={method: basis-rotation, frequency: 1000000}"])
    expected = [
        least_micro_batches(fp32, configured_rates(fp32)),
        least_micro_batches(config, configured_rates(config)),
        least_micro_batches(config, rates_in_tf32(config)),
        least_micro_batches(never, rates_in_tf32(never)),
    ]
    assert printed == [round(4096 * count, -3) for count in expected]
