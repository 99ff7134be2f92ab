"""Evidence from measurements at checkpoints, the toy problems' files and formulas: a changed number
changes the verdict."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from brx.config.loading import preset_with
from brx.curvature.norm_result import NormResult, NormSettings
from brx.curvature.oscillation import Oscillation, Track
from brx.errors import UserError
from brx.files import write_json
from brx.paper import measured_evidence
from brx.paper.printed import STAGE_COUNTS
from brx.paper.scales import VARIANTS, Experiments
from brx.readers import read_json
from brx.sweep.cell import trajectory_id
from tests.paper.helpers import LAPTOP, write_experiment


def write_oscillation(
    folder, method, seed, iteration, variance, eigenvalue=5.0, stages=8, val_loss=None, **settings
):
    """A run of the preset `quick` with projections of this variance along the dominant
    eigenvector."""
    settings = {"pipeline.stages": stages, **VARIANTS[method], **settings}
    write_experiment(folder, "quick", settings, seeds=(seed,), val_loss=val_loss)
    run = folder / trajectory_id(preset_with("quick", {**settings, "training.seed": seed}))
    dominant, random = (Track.of([x, -x, x, -x], total=1.0) for x in (variance**0.5, 1e-3))
    Oscillation(
        run=str(run),
        method=method,
        num_stages=stages,
        iteration=iteration,
        eigenvalue=eigenvalue,
        residual=0.01,
        num_power_iterations=20,
        dominant=dominant,
        random=random,
    ).write(run)


@pytest.fixture
def measured(complete, tmp_path):
    """The complete runs, with runs in tmp_path as those whose curvature was measured."""
    return Experiments.load(replace(LAPTOP, curvature=tmp_path), complete)


SEEDS = (0, 1, 2)
CHECKPOINTS = (500, 1000)


@pytest.fixture
def oscillations(tmp_path):
    """PipeDream varies more than basis rotation at every seed and checkpoint; at one seed its
    dominant eigenvalue is negative. One of its checkpoints has no partner."""
    for seed, iteration in product(SEEDS, CHECKPOINTS):
        eigenvalue = -3.0 if seed == 0 else 5.0
        write_oscillation(tmp_path, "pipedream", seed, iteration, 4e-4 * (1 + seed), eigenvalue)
        write_oscillation(tmp_path, "basis-rotation", seed, iteration, 1e-4)
    write_oscillation(tmp_path, "pipedream", 0, 750, 1e-9)


def judge_delayed(measured):
    return measured_evidence.oscillates_less(measured, delayed=True)


def test_oscillation_needs_runs(measured):
    with pytest.raises(UserError, match="no run with losses"):
        judge_delayed(measured)


def test_oscillation_needs_runs_with_delay(tmp_path, measured):
    write_oscillation(tmp_path, "pipedream", 0, 500, 1e-4, stages=1)
    with pytest.raises(UserError, match="not measured under delay"):
        judge_delayed(measured)


@pytest.mark.usefixtures("oscillations")
def test_oscillation_needs_runs_without_delay(measured):
    with pytest.raises(UserError, match="at P = 1 yet"):
        measured_evidence.oscillates_less(measured, delayed=False)


@pytest.mark.usefixtures("oscillations")
def test_oscillation_is_judged_over_seeds(measured):
    judged = judge_delayed(measured)
    assert (judged.holds, judged.num_seeds) == (True, 3)


@pytest.mark.usefixtures("oscillations")
def test_oscillation_counts_checkpoints_with_a_partner(measured):
    assert "(3 seeds, 6 checkpoints)" in judge_delayed(measured).text


@pytest.mark.usefixtures("oscillations")
def test_oscillation_tells_negative_eigenvalues(measured):
    told = "at 2 of them PipeDream's dominant eigenvalue is negative"
    assert told in judge_delayed(measured).text


@pytest.mark.usefixtures("oscillations")
def test_oscillation_is_at_the_best_rate(tmp_path, measured):
    judged = judge_delayed(measured)
    worse = {"val_loss": 9.0, "optimizer.lr": 3e-3}
    write_oscillation(tmp_path, "basis-rotation", 0, 500, 1.0, **worse)
    assert judge_delayed(measured) == judged


@pytest.mark.usefixtures("oscillations")
def test_runs_of_another_version_are_not_mixed_in(tmp_path, measured):
    judged = judge_delayed(measured)
    older = tmp_path / "older"
    for seed, iteration in product(SEEDS, CHECKPOINTS):
        write_oscillation(older, "basis-rotation", seed, iteration, 1.0)
    for run in list(older.iterdir()):
        summary = read_json(run / "summary.json") | {"trajectory_version": 0}
        write_json(run / "summary.json", summary)
        run.rename(tmp_path / f"older-{run.name}")
    older.rmdir()
    again = Experiments.load(measured.scale, measured.folder)
    assert judge_delayed(again) == judged


@pytest.mark.usefixtures("oscillations")
def test_one_seed_on_the_other_side_is_chance(tmp_path, measured):
    for iteration in CHECKPOINTS:
        write_oscillation(tmp_path, "basis-rotation", 2, iteration, 1e-2)
    assert not judge_delayed(measured).holds


def test_larger_variance_does_not_hold(tmp_path, measured):
    write_oscillation(tmp_path, "pipedream", 0, 500, 1e-4, stages=1)
    write_oscillation(tmp_path, "basis-rotation", 0, 500, 2e-4, stages=1)
    judged = measured_evidence.oscillates_less(measured, delayed=False)
    assert (judged.holds, judged.num_seeds) == (False, 1)


def test_stability_needs_both_methods(tmp_path, measured):
    write_oscillation(tmp_path, "pipedream", 0, 500, 1e-4)
    write_oscillation(tmp_path, "nesterov", 0, 500, 1e-7)
    with pytest.raises(UserError, match="not measured with both methods"):
        measured_evidence.stable_elsewhere(measured)


@pytest.mark.parametrize(("variance", "holds"), [(1e-5, True), (1e-7, False)])
def test_stability_compares_with_a_random_direction(tmp_path, measured, variance, holds):
    write_oscillation(tmp_path, "pipedream", 0, 500, 1e-4)
    write_oscillation(tmp_path, "basis-rotation", 0, 500, variance)  # 1e-6 along the random one
    assert measured_evidence.stable_elsewhere(measured).holds == holds


def write_rates(folder, by_rate):
    """Oscillation of PipeDream on three seeds, by learning rate: variance and validation loss."""
    for rate, (variance, val_loss) in by_rate.items():
        for seed in range(3):
            own = variance * (1 + 0.01 * seed)
            settings = {"optimizer.lr": rate}
            write_oscillation(folder, "pipedream", seed, 500, own, val_loss=val_loss, **settings)


@pytest.fixture
def at_own_rates(tmp_path):
    """Basis rotation and PipeDream at different rates. PipeDream varies more, but less than in
    proportion to the rate's square."""
    for seed in SEEDS:
        write_oscillation(tmp_path, "basis-rotation", seed, 500, 1e-4, **{"optimizer.lr": 1e-3})
    write_rates(tmp_path, {3e-3: (4e-4, 1.0)})


@pytest.mark.usefixtures("at_own_rates")
def test_variances_per_square_of_the_rate_decide(measured):
    assert judge_delayed(measured).strict == "no"


@pytest.mark.usefixtures("at_own_rates")
def test_variances_at_a_common_rate_decide(tmp_path, measured):
    write_rates(tmp_path, {1e-3: (3e-4, 2.0)})
    judged = judge_delayed(measured)
    assert judged.strict == "yes"
    assert "at the common rate 0.001, basis rotation 0.33 of PipeDream's" in judged.text


@pytest.mark.usefixtures("at_own_rates")
def test_measured_runs_for_tuning_decide_nothing(tmp_path, measured):
    """Only runs for tuning share a rate, so the variances over the square of the rate decide."""
    tried = [("basis-rotation", 1e-3, 1e-4, 2.0), ("pipedream", 1e-3, 3e-4, 2.0)]
    tried.append(("pipedream", 3e-3, 4e-4, 1.0))  # the best rate, as in the reported runs
    for method, rate, variance, val_loss in tried:
        settings = {"optimizer.lr": rate, "training.for_tuning": True}
        for seed in (100, 101, 102):
            write_oscillation(tmp_path, method, seed, 500, variance, val_loss=val_loss, **settings)
    assert judge_delayed(measured).strict == "no"


@pytest.fixture
def norms(tmp_path):
    """Writes a made-up measurement into the folder of one of three runs of `quick`, which differ in
    their seeds."""
    settings = {"pipeline.stages": 8}
    write_experiment(tmp_path, "quick", settings, seeds=SEEDS)
    runs = []
    for seed in SEEDS:
        config = preset_with("quick", {**settings, "training.seed": seed})
        runs.append(tmp_path / trajectory_id(config))
    kept = next(LAPTOP.curvature.glob("*/analysis/hessian-norm-original-*.json"))
    source = NormResult.read(kept).model_copy(update={"method": "pipedream", "iteration": 1500})

    def write(space, norm, spread=0.1, seed=0, **changes):
        run = runs[seed]
        changes |= {
            "run": f"runs/elsewhere/{run.name}",  # exported files name the run where it was made
            "space": space,
            "norm": norm,
            "standard_error": spread * norm,
        }
        result = source.model_copy(update=changes)
        result.write(run)
        return result

    return write


SIZES = {
    "original": 20.0,
    "1st-unilateral": 9.0,
    "1st-bilateral": 3.0,
    "2nd-unilateral": 5.0,
    "2nd-bilateral": 2.0,
}
"""Norms in the order of the theorems, for both sources."""
SOURCES = pytest.mark.parametrize("source", ["1st", "2nd"])


@pytest.fixture
def one_seed(norms):
    """Results of one seed, by space."""
    return {space: norms(space, norm) for space, norm in SIZES.items()}


@SOURCES
def test_theorem_needs_norms_by_strategy(source, norms, measured):
    with pytest.raises(UserError, match="norms by strategy have not been measured"):
        measured_evidence.theorem_order(measured, source)


@SOURCES
def test_theorem_holds_without_overlapping_intervals(source, one_seed, measured):
    judged = measured_evidence.theorem_order(measured, source)
    assert (judged.holds, judged.num_seeds) == (True, 1)


@SOURCES
def test_theorem_is_open_with_overlapping_intervals(source, one_seed, norms, measured):
    space = f"{source}-bilateral"
    norms(space, SIZES[space], spread=0.5)
    assert not measured_evidence.theorem_order(measured, source).holds


@SOURCES
def test_text_has_the_norms_in_order(source, one_seed, measured):
    spaces = ("original", f"{source}-unilateral", f"{source}-bilateral")
    in_order = ", ".join(f"{one_seed[space].normalized:.3g}" for space in spaces)
    assert measured_evidence.theorem_order(measured, source).text.endswith(in_order)


CLOSE_SIZES = SIZES | {"2nd-bilateral": 4.0}
BY_CHANCE = "(2nd-bilateral: not by more than chance)"


@pytest.fixture
def three_seeds(norms):
    """Norms that differ more between seeds than between coordinates; their ratios are the same on
    each seed."""
    for seed in SEEDS:
        for space, norm in CLOSE_SIZES.items():
            norms(space, norm * 3**seed, spread=0.5, seed=seed)


@pytest.mark.usefixtures("three_seeds")
def test_ratios_decide_from_three_seeds_on(measured):
    judged = measured_evidence.theorem_order(measured, "2nd")
    assert (judged.holds, judged.num_seeds) == (True, 3)


@pytest.mark.usefixtures("three_seeds")
def test_one_seed_out_of_order_is_chance(norms, measured):
    norms("2nd-bilateral", 6.0, seed=0)  # above the unilateral one
    judged = measured_evidence.theorem_order(measured, "2nd")
    assert not judged.holds
    assert judged.text.endswith(BY_CHANCE)


@pytest.mark.usefixtures("three_seeds")
def test_sources_are_judged_apart(norms, measured):
    norms("2nd-bilateral", 6.0, seed=0)
    assert measured_evidence.theorem_order(measured, "1st").holds


@pytest.mark.usefixtures("three_seeds")
def test_extrapolated_norms_must_be_in_order(norms, measured):
    # Noise raises the unilateral norms alone: extrapolated they lie below the bilateral ones.
    for seed in SEEDS:
        for space, of_half in (("2nd-unilateral", 7.0), ("2nd-bilateral", 4.0)):
            scale = 3**seed
            size = CLOSE_SIZES[space] * scale
            norms(space, size, seed=seed, norm_of_half=of_half * scale)
    assert measured_evidence.theorem_order(measured, "2nd").text.endswith(f" {BY_CHANCE}")


@pytest.mark.usefixtures("three_seeds")
def test_intervals_decide_between_two_seeds(norms, measured):
    # The third seed is at another depth; the intervals of the others are wide.
    for space, norm in CLOSE_SIZES.items():
        norms(space, norm, seed=0, num_stages=1)
    judged = measured_evidence.theorem_order(measured, "1st")
    assert (judged.holds, judged.num_seeds) == (False, 1)


@pytest.mark.parametrize(
    ("in_order", "verdict"),
    [((20.0, 5.0, 4.0), "yes"), ((4.0, 5.0, 20.0), "no"), ((20.0, 4.0, 5.0), "open")],
)
def test_strict_verdict_on_the_theorem_is_over_seeds(in_order, verdict, norms, measured):
    for seed in SEEDS:
        for space, norm in zip(
            ("original", "2nd-unilateral", "2nd-bilateral"), in_order, strict=True
        ):
            norms(space, norm * 3**seed, seed=seed)
        norms("1st-unilateral", 1.0, seed=seed)
        norms("1st-bilateral", 1.0, seed=seed)
    assert measured_evidence.theorem_order(measured, "2nd").strict == verdict


@pytest.mark.usefixtures("one_seed")
def test_theorem_of_one_seed_is_strictly_open(measured):
    assert measured_evidence.theorem_order(measured, "2nd").strict == "open"


HALF_WIDTH = 4.303 * np.log(2) / 3**0.5  # of log ratio; 4.303: Student's t, 2 degrees of freedom


@pytest.fixture
def ratios(norms):
    """Rotated over original norms of 0.2, 0.4 and 0.8."""
    for seed, ratio in enumerate((0.2, 0.4, 0.8)):
        norms("original", 10.0 * 2**seed, seed=seed, method="basis-rotation")
        norms("rotated", 10.0 * 2**seed * ratio, seed=seed, method="basis-rotation")


@pytest.mark.usefixtures("ratios")
def test_norms_ratio_is_a_geometric_mean(measured):
    judged = measured_evidence.norm_ratio(measured)
    assert (judged.value, judged.num_seeds) == (pytest.approx(0.4), 3)


@pytest.mark.usefixtures("ratios")
def test_norms_ratio_has_students_interval(measured):
    judged = measured_evidence.norm_ratio(measured)
    expected = 0.4 * np.exp(-HALF_WIDTH), 0.4 * np.exp(HALF_WIDTH)
    assert (judged.low, judged.high) == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("ratios")
def test_text_tells_unknown_noise(measured):
    assert "to an unknown extent" in measured_evidence.norm_ratio(measured).text


LIMIT = 0.4 * (1 - 0.2 / (2**0.5 - 1))  # extrapolated from 0.4, and 0.48 from half the sample


@pytest.fixture
def ratios_with_noise(norms):
    """The same ratios; noise raises the rotated norms alone."""
    for seed, ratio in enumerate((0.2, 0.4, 0.8)):
        common = {"seed": seed, "method": "basis-rotation"}
        norms("original", 10.0, norm_of_half=10.0, **common)
        norms("rotated", 10.0 * ratio, norm_of_half=12.0 * ratio, **common)


@pytest.mark.usefixtures("ratios_with_noise")
def test_text_has_the_extrapolated_ratio(measured):
    text = measured_evidence.norm_ratio(measured).text
    assert text.endswith(f"0.48 from half the sample, {LIMIT:.3g} extrapolated")


@pytest.mark.usefixtures("ratios_with_noise")
def test_interval_contains_the_extrapolated_ratio(measured):
    judged = measured_evidence.norm_ratio(measured)
    expected = LIMIT * np.exp(-HALF_WIDTH), 0.4 * np.exp(HALF_WIDTH)
    assert (judged.low, judged.high) == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def two_samples(norms):
    """The ratio is 0.6 from the usual sample, extrapolated to 0.4, and 0.45 from a larger one."""
    of_half = 10 * (0.6 + 0.2 * (2**0.5 - 1))
    usual = {"method": "basis-rotation"}
    norms("original", 10.0, norm_of_half=10.0, **usual)
    norms("rotated", 6.0, norm_of_half=of_half, **usual)
    larger = {**usual, "settings": NormSettings(batches_per_vector=1600)}
    norms("original", 10.0, norm_of_half=10.0, **larger)
    norms("rotated", 4.5, norm_of_half=4.6, **larger)


@pytest.mark.usefixtures("two_samples")
def test_largest_sample_decides_the_norms_ratio(measured):
    assert measured_evidence.norm_ratio(measured).value == pytest.approx(0.45)


@pytest.mark.usefixtures("two_samples")
def test_text_has_the_smaller_samples_extrapolation(measured):
    text = measured_evidence.norm_ratio(measured).text
    assert text.endswith(" tokens 0.6, which was extrapolated to 0.4")


def test_norms_ratio_needs_one_checkpoint(norms, measured):
    norms("original", 10.0)  # PipeDream's
    norms("original", 10.0, method="basis-rotation")
    norms("rotated", 5.0, method="basis-rotation", iteration=1000)
    with pytest.raises(UserError, match="not measured in both coordinates"):
        measured_evidence.norm_ratio(measured)


def test_norms_ratio_of_one_seed_has_an_interval(norms, measured):
    norms("original", 10.0, method="basis-rotation")
    norms("rotated", 4.0, method="basis-rotation")
    judged = measured_evidence.norm_ratio(measured)
    assert judged.value == pytest.approx(0.4)
    assert judged.low < 0.4 < judged.high


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a toy problem's file."""
    monkeypatch.setattr(measured_evidence, "TOYS", tmp_path)
    return lambda name, **content: (tmp_path / f"{name}.json").write_text(json.dumps(content))


def write_quadratic(write, aligned, misaligned):
    """Adam's slowdowns; AdaSGD's are large and do not count."""
    slowdowns = [
        {"optimizer": "AdaSGD", "aligned": True, "slowdown": 9.0},
        {"optimizer": "AdaSGD", "aligned": False, "slowdown": 9.0},
        {"optimizer": "Adam", "aligned": True, "slowdown": aligned},
        {"optimizer": "Adam", "aligned": False, "slowdown": misaligned},
    ]
    write("quadratic", slowdowns=slowdowns)


@pytest.mark.parametrize(
    ("aligned", "misaligned", "holds"),
    [(1.0, 1.0, False), (1.0, 3.0, True), (2.0, 3.0, False), (1.0, None, True)],
)
def test_quadratic_compares_adams_slowdowns(aligned, misaligned, holds, write):
    write_quadratic(write, aligned, misaligned)
    assert measured_evidence.delay_hurts_where_misaligned(None).holds == holds


def test_quadratic_that_never_arrives_is_infinite(write):
    write_quadratic(write, 1.0, None)
    assert measured_evidence.delay_hurts_where_misaligned(None).text.endswith("misaligned inf")


@pytest.mark.usefixtures("write")
def test_missing_file_of_a_toy_is_named():
    with pytest.raises(UserError, match=r"quadratic\.json is not there yet"):
        measured_evidence.delay_hurts_where_misaligned(None)


@pytest.fixture
def judge_spiral(write):
    """The evidence from numbers of the spiral with the paper's settings."""
    write("spiral-small-steps", arrived=True, spearman=0.5, p_value=0.0)

    def judge(arrived, spearman, p_value):
        write("spiral", arrived=arrived, spearman=spearman, p_value=p_value)
        return measured_evidence.misalignment_slows_on_the_spiral(None)

    return judge


@pytest.mark.parametrize(
    ("arrived", "spearman", "p_value", "holds"),
    [
        (True, 0.5, 1e-9, True),
        (False, 0.9, 0.0, False),
        (True, -0.5, 1e-9, False),
        (True, 0.1, 0.3, False),  # by chance
        (True, None, None, False),  # a constant
    ],
)
def test_spiral_needs_a_correlation(judge_spiral, arrived, spearman, p_value, holds):
    assert judge_spiral(arrived, spearman, p_value).holds == holds


@pytest.mark.parametrize("arrived", [True, False])
def test_text_tells_that_adam_stops(judge_spiral, arrived):
    assert ("stops on the way" in judge_spiral(arrived, 0.5, 1e-9).text) != arrived


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"slowdowns": [{"optimizer": "Adam"}]}', '{"spearman": "x"}']
)
@pytest.mark.parametrize(
    ("name", "judge"),
    [
        ("quadratic", measured_evidence.delay_hurts_where_misaligned),
        ("spiral", measured_evidence.misalignment_slows_on_the_spiral),
    ],
)
@pytest.mark.usefixtures("write")
def test_damaged_file_of_a_toy_is_named(name, judge, content, tmp_path):
    (tmp_path / f"{name}.json").write_text(content)
    told = rf"{name}\.json: not readable: .*; brx toy writes it again$"
    with pytest.raises(UserError, match=told):
        judge(None)


# Formulas.


def test_memory_share_is_of_both_moments():
    assert measured_evidence.memory_share(None).value == pytest.approx(4096 / (4 * 14336))


def test_memory_of_each_strategy_is_told():
    assert "1st/bilateral 0.13 and 0.83" in measured_evidence.memory_of_strategies(None).text


def test_parameters_of_each_model_are_told():
    text = measured_evidence.parameter_counts(None).text
    assert text == "paper-95m 95.6 M, paper-1b 1,035.0 M, paper-3b 3,047.0 M"


@pytest.mark.parametrize(
    "judge", [measured_evidence.memory_of_strategies, measured_evidence.parameter_counts]
)
def test_formulas_are_as_printed(judge):
    assert judge(None).holds


def test_every_printed_memory_counts(monkeypatch):
    *others, _ = measured_evidence.MEMORY_GIB
    monkeypatch.setattr(measured_evidence, "MEMORY_GIB", [*others, ["0.06", "0.07"]])
    assert not measured_evidence.memory_of_strategies(None).holds


def test_every_printed_parameter_count_counts(monkeypatch):
    monkeypatch.setitem(measured_evidence.PARAMETERS, "paper-1b", 1.2e9)
    assert not measured_evidence.parameter_counts(None).holds


def test_one_printed_stage_count_differs():
    # The paper prints >= 512 where its own rule, P >= 2 L, gives 252.
    judged = measured_evidence.stage_counts(None)
    assert not judged.holds
    assert judged.text.startswith("6 of 7 models as printed; not Llama 3.1 405B")


def test_all_other_stage_counts_are_as_printed(monkeypatch):
    monkeypatch.setitem(STAGE_COUNTS, "Llama 3.1 405B", [">= 252"] * 4 + ["126"])
    assert measured_evidence.stage_counts(None).holds
