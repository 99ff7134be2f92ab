"""A run on its devices: plan and verdict agree; memory against measured peaks; closed forms."""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.memory import peak_during
from brx.cli.main import main
from brx.config.loading import load_config
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.model.stage import make_stage, partition
from brx.planning.flops import rank_flops
from brx.planning.margin import MARGIN
from brx.planning.plan import plan_memory
from brx.planning.planned_run import (
    ASSUMED_LINE,
    MEASURED_UTILIZATION,
    PlannedRun,
    parse_devices,
    time_lines,
)
from brx.planning.schedules import SYNCHRONOUS
from brx.planning.verdict import Option, Question, answer
from tests.planning.measurements import MEASURED, experiment
from tests.planning.test_plan import ASYNCHRONOUS_SETTINGS, small


def memory_by_schedule(config, num_stages, num_micro_batches):
    """Bytes of the busiest device, by schedule, each with so many micro-batches."""
    run = PlannedRun(config).split(num_stages, num_micro_batches)
    cuts = [run.asynchronous({}, None), *run.synchronous({}, None)]
    return {cut.schedule: cut.memory for cut in cuts if cut.num_micro_batches == num_micro_batches}


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize("settings", ASYNCHRONOUS_SETTINGS, ids=" ".join)
def test_synchronous_memory_ignores_settings_for_delays(settings):
    plain = memory_by_schedule(small("model.blocks=8"), 4, 4)
    memory = memory_by_schedule(small("model.blocks=8", *settings), 4, 4)
    assert memory | {"asynchronous": 0} == plain | {"asynchronous": 0}


# Mostly activations, or mostly weights. A quick test in tests/planning/test_plan.py has bf16, too.
@pytest.mark.parametrize(
    ("name", "precision", "width", "batch"),
    [
        ("1F1B", "fp32", 64, 8),
        pytest.param("1F1B", "bf16", 128, 2, marks=pytest.mark.slow),
    ],
)
def test_synchronous_memory_is_a_naive_pipelines(name, precision, width, batch):
    settings = [f"model.width={width}", "model.blocks=8", f"runtime.precision={precision}"]
    settings += ["runtime.device=cpu", "logging.update_norms=false"]
    planned = memory_by_schedule(small(*settings, f"training.batch_size={8 * batch}"), 4, 8)[name]
    config = small(*settings, f"training.batch_size={batch}")
    peaks = [
        peak_during(lambda rank=rank: train_naively(config, rank, name), torch.device("cpu"))
        for rank in range(4)
    ]
    assert planned == pytest.approx(max(peaks), rel=0.1)


def train_naively(config, rank, name):
    """Two updates of 8 micro-batches on one of 4 ranks, with only the stage and the order of passes
    from brx."""
    own = partition(config.model.blocks, 4)[rank]
    stage = make_stage(config.model, config.data.vocabulary_size, own, seed=0)
    weights = list(stage.parameters())
    optimizer = torch.optim.AdamW(weights)
    tokens = torch.zeros(
        config.training.batch_size, config.model.sequence_length, dtype=torch.int64
    )
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    outputs, gradients = {}, None
    with torch.autocast("cpu", torch.bfloat16, enabled=config.runtime.precision == "bf16"):
        for action in SYNCHRONOUS[name].actions(rank, 4, 8, 2):
            if action.kind == "F":
                received = torch.zeros(
                    *tokens.shape, config.model.width, dtype=dtype, requires_grad=True
                )
                output = stage(tokens if rank == 0 else received, tokens if rank == 3 else None)
                outputs[action.number] = output.loss if rank == 3 else output.stream
                del received, output
            elif action.kind == "B":
                output = outputs.pop(action.number)
                own = torch.autograd.grad(output, weights, torch.zeros_like(output))
                if gradients is None:
                    gradients = own
                else:
                    torch._foreach_add_(gradients, own)
                del output, own
            else:
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient
                gradients = None
                optimizer.step()
                optimizer.zero_grad()
                torch.clear_autocast_cache()


METHODS = {
    name: {"optimizer": {"method": name.partition(" ")[0], **options}, "pipeline": pipeline}
    for name, options, pipeline in (
        ("pipedream weight prediction", {}, {"stash": "predict"}),
        ("basis-rotation 1st/unilateral", {"source": "1st", "geometry": "unilateral"}, {}),
        ("muon", {}, {}),
    )
}


def always_measured(methods, delay):
    """Every method needs 100 iterations without delay, and 150 under this one."""
    experiments = [
        experiment(method, at, [90 * factor, 100 * factor, 110 * factor], settings=settings)
        for method, settings in methods.items()
        for at, factor in ((0, 1), (delay, 1.5))
    ]
    return MEASURED.model_copy(update={"experiments": experiments})


@dataclass(frozen=True)
class Row:
    """A row of a verdict, its synchronous rival, and what `brx plan` says about that run."""

    num_stages: int
    run: PlannedRun
    option: Option
    rival: Option
    planned: RunConfig
    plan: str


@pytest.fixture(scope="module", params=[*product(((16, 1), (24, 4)), METHODS)], ids=str)
def row(request):
    (num_stages, num_micro_batches), method = request.param
    config = load_config("paper-95m")
    run = PlannedRun(config, throughput=1e14, bandwidth=5e9).split(num_stages, num_micro_batches)
    asked = Question(3.0, num_stages, num_micro_batches, run)
    verdict = answer(always_measured(METHODS, asked.delay), asked)
    (option,) = (one for one in verdict.asynchronous if one.method == method)
    rival = next(one for one in verdict.synchronous if one.method == method)
    overrides = run.overrides(config, METHODS[method])
    devices = ["--throughput", "100T", "--bandwidth", "5GB", "--device-memory", "80GB"]
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", "paper-95m", "--set", *overrides, *devices]) == 0
    return Row(num_stages, run, option, rival, load_config("paper-95m", overrides), out.getvalue())


def test_planned_run_has_the_rows_stages(row):
    assert row.planned.pipeline.stages == row.num_stages


def test_planned_run_has_the_rows_method(row):
    assert row.planned.optimizer.method in row.option.method


def test_row_has_the_planned_memory(row):
    assert row.option.cut.memory == max(rank.peak for rank in plan_memory(row.planned, "cuda"))


def test_row_has_the_planned_time(row):
    assert f"{row.run.seconds(row.option.cut):.3g} s per iteration" in row.plan


RIVAL = r"examples, (.+) with (\d+) micro-batches, takes ([\d.]+) times"


def test_plan_names_the_rows_rival(row):
    schedule, num_micro_batches, _ = re.search(RIVAL, row.plan).groups()
    rival = row.rival.cut
    assert (schedule, int(num_micro_batches)) == (rival.schedule, rival.num_micro_batches)


def test_plan_has_the_rivals_time(row):
    *_, times = re.search(RIVAL, row.plan).groups()
    assert float(times) == pytest.approx(row.rival.cut.time / row.option.cut.time, abs=0.006)


def test_plan_has_the_rivals_memory(row):
    assert f", and {row.rival.cut.memory / 1e9:.1f} GB. Its devices wait" in row.plan


def test_transfers_are_those_of_the_cut():
    config = load_config("paper-95m")
    times = {}
    for bandwidth in (None, 1e9, 0.5e9):
        run = PlannedRun(config, throughput=1e14, bandwidth=bandwidth).split(32, 8)
        (cut,) = [
            cut
            for cut in run.synchronous({}, None)
            if (cut.schedule, cut.num_micro_batches) == ("1F1B", 1)
        ]
        times[bandwidth] = cut.time * run.unit / 1e14  # in seconds
    # One micro-batch goes down and up through 32 devices. From each device to the next, it takes
    # the activations of 8 examples of 512 positions, of width 384, in bf16.
    transfers = 2 * 31 * 8 * 512 * 384 * 2 / 1e9
    assert times[1e9] - times[None] == pytest.approx(transfers)
    assert times[0.5e9] - times[None] == pytest.approx(2 * transfers)


@pytest.fixture(scope="module")
def six_devices():
    settings = ["pipeline.devices=6", "training.batch_size=64", "optimizer.method=basis-rotation"]
    return PlannedRun(load_config("paper-1b", settings), throughput=1e14)


@pytest.fixture(scope="module")
def synchronous_cuts(six_devices):
    return list(six_devices.synchronous({}, None))


def test_asynchronous_time_is_the_busiest_ranks(six_devices):
    busiest = max(rank_flops(six_devices.config, own) for own in partition(24, 6))
    seconds = six_devices.seconds(six_devices.asynchronous({}, None))
    assert seconds == pytest.approx(busiest / 1e14)


def test_synchronous_cuts_come_fastest_first(synchronous_cuts):
    times = [cut.time for cut in synchronous_cuts]
    assert times == pytest.approx(sorted(times))


def test_synchronous_cuts_try_every_split(synchronous_cuts):
    counts = {cut.num_micro_batches for cut in synchronous_cuts}
    assert counts == {1, 2, 4, 8, 16, 32, 64}


def test_printed_rival_is_the_fastest_cut(six_devices, synchronous_cuts):
    text = " ".join(time_lines(six_devices))
    hours, synchronous = (float(hours) for hours in re.findall(r"([\d.e+]+) h", text))
    ratio = synchronous_cuts[0].time / six_devices.asynchronous({}, None).time
    assert synchronous == pytest.approx(hours * ratio, rel=0.01)


def test_less_memory_leaves_another_cut(six_devices, synchronous_cuts):
    least = min(synchronous_cuts, key=lambda cut: cut.memory)
    few = replace(six_devices, memory=(1 + 1e-9) * least.memory / (1 - MARGIN))
    assert least.schedule in " ".join(time_lines(few))


def test_too_little_memory_leaves_no_cut(six_devices):
    assert "No synchronous cut" in time_lines(replace(six_devices, memory=1e6))[-1]


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["devices=6"], []),
        (
            ["devices=16"],
            ["The cut is uneven: 1 or 2 blocks per device; 12 or 24 devices would be even."],
        ),
        # Devices hold whole stages: five of 4, 5, 5, 5, 5 blocks are even nowhere but on one
        # device.
        (
            ["stages=5", "devices=5"],
            ["The cut is uneven: 4 or 5 blocks per device; 1 device would be even."],
        ),
    ],
)
def test_uneven_cuts_are_named(settings, lines):
    config = load_config("paper-1b", [f"pipeline.{setting}" for setting in settings])
    assert PlannedRun(config).cut_lines == lines


BY_TIME = ["pipeline.balance=time", "pipeline.devices=6"]


def test_cut_by_time_is_named():
    (line,) = PlannedRun(load_config("paper-1b", BY_TIME)).cut_lines
    assert line == (
        "Blocks per device, by the operations of their passes: 2, 5, 5, 5, 5, 2. The run itself "
        "measures its stages (pipeline.balance: time)."
    )


def test_cut_by_time_unburdens_the_busiest_rank():
    def share(*settings):
        run = PlannedRun(load_config("paper-1b", ["pipeline.devices=6", *settings]))
        return int(re.search(r"busiest rank does (\d+)%", " ".join(time_lines(run)))[1])

    assert (share(), share("pipeline.balance=time")) == (24, 19)


@pytest.fixture(scope="module")
def on_six_devices():
    """With 8 micro-batches, cut by number of blocks, or by time."""
    return [PlannedRun(load_config("paper-1b", settings)).split(6, 8) for settings in ([], BY_TIME)]


def test_cut_by_time_is_faster_with_delay(on_six_devices):
    even, balanced = (run.asynchronous({}, None).time for run in on_six_devices)
    assert balanced < even


@pytest.mark.parametrize("schedule", ["1F1B", "interleaved 1F1B"])
def test_cut_by_time_is_faster_without_delay(schedule, on_six_devices):
    even, balanced = (
        next(cut.time for cut in run.synchronous({}, None) if cut.schedule == schedule)
        for run in on_six_devices
    )
    assert balanced < even


def test_cut_by_time_has_its_devices_delays():
    run = PlannedRun(load_config("paper-1b", BY_TIME)).split(6, 8)
    delays = run.config.pipeline.delay
    assert len(delays) == run.config.pipeline.stages == 24
    assert sorted(set(delays), reverse=True) == [5, 4, 3, 2, 1, 0]


def test_verdict_by_time_agrees_with_plan(printed):
    config = load_config("paper-1b", ["pipeline.balance=time"])
    run = PlannedRun(config, throughput=1e14).split(6, 8)
    changed = ["pipeline.balance=time", *run.overrides(config, {})]
    plan = printed("plan", "paper-1b", "--set", *changed, "--throughput", "100T")
    seconds = run.seconds(run.asynchronous({}, None))
    assert f"{seconds:.3g} s per iteration" in plan


@pytest.mark.parametrize(("throughput", "is_assumed"), [("H100", True), ("23T", False)])
def test_plan_says_that_a_rate_is_assumed(throughput, is_assumed):
    run = parse_devices(load_config("paper-95m", []), None, throughput, None)
    assert (ASSUMED_LINE in time_lines(run)) == is_assumed


def test_named_utilization_is_the_measured_one():
    summary = json.loads(Path("results/gpu/paper-95m/pipedream-p1/summary.json").read_text())
    assert round(summary["mfu"], 2) == MEASURED_UTILIZATION


def test_blocks_fewer_than_devices_are_refused():
    run = PlannedRun(load_config("paper-1b", ["pipeline.balance=time"]))
    with pytest.raises(UserError, match="--stages 25: the model has only 24 blocks"):
        run.split(25, 1)
