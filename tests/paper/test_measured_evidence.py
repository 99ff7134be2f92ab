"""What measurements at checkpoints, the toy problems' files and the formulas say; a changed one
changes the verdict."""

import json
from dataclasses import replace

import numpy as np
import pytest

from brx.config.loading import preset_with
from brx.curvature.norm_result import NormResult, NormSettings
from brx.curvature.oscillation import Oscillation, Track
from brx.errors import UserError
from brx.paper import measured_evidence
from brx.paper.printed import STAGE_COUNTS
from brx.paper.scales import VARIANTS, Experiments
from brx.sweep.spec import identity
from tests.paper.helpers import LAPTOP, write_experiment


def write_oscillation(
    folder, method, seed, iteration, variance, eigenvalue=5.0, stages=8, val_loss=None, **settings
):
    """A run of the preset `quick` with projections of this variance along the dominant
    eigenvector."""
    settings = {"pipeline.stages": stages, **VARIANTS[method], **settings}
    write_experiment(folder, "quick", settings, seeds=(seed,), val_loss=val_loss)
    run = folder / identity(preset_with("quick", {**settings, "training.seed": seed}))
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


def test_oscillation_is_judged_over_seeds_and_checkpoints(tmp_path, measured):
    with pytest.raises(UserError, match="no run with losses"):
        measured_evidence.oscillates_less(measured, delayed=True)
    for seed in (0, 1, 2):
        for iteration in (500, 1000):
            write_oscillation(
                tmp_path,
                "pipedream",
                seed,
                iteration,
                4e-4 * (1 + seed),
                -3.0 if seed == 0 else 5.0,
            )
            write_oscillation(tmp_path, "basis-rotation", seed, iteration, 1e-4)
    write_oscillation(tmp_path, "pipedream", 0, 750, 1e-9)  # without a partner
    judged = measured_evidence.oscillates_less(measured, delayed=True)
    assert (judged.holds, judged.num_seeds) == (True, 3)
    assert (
        "(3 seeds, 6 checkpoints); at 2 of them PipeDream's dominant eigenvalue is negative"
        in judged.text
    )
    # The best of several rates counts.
    write_oscillation(
        tmp_path, "basis-rotation", 0, 500, 1.0, val_loss=9.0, **{"optimizer.lr": 3e-3}
    )
    assert measured_evidence.oscillates_less(measured, delayed=True) == judged
    with pytest.raises(UserError, match="at P = 1 yet"):
        measured_evidence.oscillates_less(measured, delayed=False)
    for method, variance in (("pipedream", 1e-4), ("basis-rotation", 2e-4)):
        write_oscillation(tmp_path, method, 0, 500, variance, stages=1)
    judged = measured_evidence.oscillates_less(measured, delayed=False)
    assert (judged.holds, judged.num_seeds) == (False, 1)
    for iteration in (500, 1000):  # one seed far on the other side: the interval holds 1
        write_oscillation(tmp_path, "basis-rotation", 2, iteration, 1e-2)
    assert not measured_evidence.oscillates_less(measured, delayed=True).holds


def test_other_directions_are_those_in_which_both_methods_move_less(tmp_path, measured):
    write_oscillation(tmp_path, "pipedream", 0, 500, 1e-4, stages=1)
    with pytest.raises(UserError, match="not measured under delay"):
        measured_evidence.oscillates_less(measured, delayed=True)
    write_oscillation(tmp_path, "nesterov", 0, 500, 1e-7)  # of neither method
    with pytest.raises(UserError, match="not measured with both methods"):
        measured_evidence.stable_elsewhere(measured)
    write_oscillation(tmp_path, "basis-rotation", 0, 500, 1e-5)
    assert measured_evidence.stable_elsewhere(measured).holds  # along the other, 1e-6
    write_oscillation(tmp_path, "basis-rotation", 0, 500, 1e-7)
    assert not measured_evidence.stable_elsewhere(measured).holds


def write_rates(folder, by_rate):
    """Oscillation of PipeDream on three seeds, by learning rate: variance and validation loss."""
    for rate, (variance, val_loss) in by_rate.items():
        for seed in range(3):
            own = variance * (1 + 0.01 * seed)
            settings = {"optimizer.lr": rate}
            write_oscillation(folder, "pipedream", seed, 500, own, val_loss=val_loss, **settings)


def test_variances_at_a_common_rate_decide(tmp_path, measured):
    for seed in range(3):
        write_oscillation(tmp_path, "basis-rotation", seed, 500, 1e-4, **{"optimizer.lr": 1e-3})
    # At its own rate PipeDream varies more, but less than in proportion to the rate's square.
    write_rates(tmp_path, {3e-3: (4e-4, 1.0)})
    assert measured_evidence.oscillates_less(measured, delayed=True).strict == "no"
    write_rates(tmp_path, {1e-3: (3e-4, 2.0)})
    judged = measured_evidence.oscillates_less(measured, delayed=True)
    assert judged.strict == "yes"
    assert "at the common rate 0.001, basis rotation 0.33 of PipeDream's" in judged.text


@pytest.fixture
def norms(tmp_path):
    """Writes a made-up measurement beside one of three runs of `quick`, which differ in the
    seed."""
    settings = {"pipeline.stages": 8}
    write_experiment(tmp_path, "quick", settings, seeds=range(3))
    runs = [
        tmp_path / identity(preset_with("quick", {**settings, "training.seed": seed}))
        for seed in range(3)
    ]
    kept = next(LAPTOP.curvature.glob("*/analysis/hessian-norm-original-*.json"))
    source = NormResult.read(kept).model_copy(update={"method": "pipedream", "iteration": 1500})

    def write(
        space, norm, spread=0.1, seed=0, **changes
    ):  # exported files name the run where it was made
        run = runs[seed]
        changes |= {
            "run": f"runs/elsewhere/{run.name}",
            "space": space,
            "norm": norm,
            "standard_error": spread * norm,
        }
        result = source.model_copy(update=changes)
        result.write(run)
        return result

    return write


@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_the_theorems_order_holds_where_no_intervals_overlap(source, norms, measured):
    with pytest.raises(UserError, match="norms by strategy have not been measured"):
        measured_evidence.theorem_order(measured, source)
    sizes = {
        "original": 20.0,
        "1st-unilateral": 9.0,
        "1st-bilateral": 3.0,
        "2nd-unilateral": 5.0,
        "2nd-bilateral": 2.0,
    }
    results = {space: norms(space, norm) for space, norm in sizes.items()}
    judged = measured_evidence.theorem_order(measured, source)
    assert (judged.holds, judged.num_seeds) == (True, 1)
    in_order = [
        results[space].normalized
        for space in ("original", f"{source}-unilateral", f"{source}-bilateral")
    ]
    assert judged.text.endswith(", ".join(f"{norm:.3g}" for norm in in_order))
    norms(f"{source}-bilateral", sizes[f"{source}-bilateral"], spread=0.5)
    assert not measured_evidence.theorem_order(measured, source).holds


def test_with_three_seeds_the_spread_between_them_decides(norms, measured):
    sizes = {
        "original": 20.0,
        "1st-unilateral": 9.0,
        "1st-bilateral": 3.0,
        "2nd-unilateral": 5.0,
        "2nd-bilateral": 4.0,
    }
    for seed in range(
        3
    ):  # the norms differ more between seeds than between coordinates, and their ratio does not
        for space, norm in sizes.items():
            norms(space, norm * 3**seed, spread=0.5, seed=seed)
    judged = measured_evidence.theorem_order(measured, "2nd")
    assert (judged.holds, judged.num_seeds) == (True, 3)
    norms("2nd-bilateral", 6.0, seed=0)  # above the unilateral one
    judged = measured_evidence.theorem_order(measured, "2nd")
    assert not judged.holds
    assert judged.text.endswith("(2nd-bilateral: not by more than chance)")
    assert measured_evidence.theorem_order(measured, "1st").holds
    for seed in range(
        3
    ):  # noise raises the unilateral norms alone: extrapolated they lie below the bilateral ones
        for space, of_half in (("2nd-unilateral", 7.0), ("2nd-bilateral", 4.0)):
            norms(space, sizes[space] * 3**seed, seed=seed, norm_of_half=of_half * 3**seed)
    assert measured_evidence.theorem_order(measured, "2nd").text.endswith(
        " (2nd-bilateral: not by more than chance)"
    )
    for space in sizes:  # which leaves two seeds here: their intervals decide, and are wide
        norms(space, sizes[space], seed=0, num_stages=1)
    judged = measured_evidence.theorem_order(measured, "1st")
    assert (judged.holds, judged.num_seeds) == (False, 1)


def test_norms_ratio_over_seeds(norms, measured):
    for seed, ratio in enumerate((0.2, 0.4, 0.8)):
        norms("original", 10.0 * 2**seed, seed=seed, method="basis-rotation")
        norms("rotated", 10.0 * 2**seed * ratio, seed=seed, method="basis-rotation")
    judged = measured_evidence.norm_ratio(measured)
    assert (judged.value, judged.num_seeds) == (pytest.approx(0.4), 3)
    half = 4.303 * np.log(2) / 3**0.5  # Student's t of two degrees of freedom, 95 %
    assert (judged.low, judged.high) == pytest.approx(
        (0.4 * np.exp(-half), 0.4 * np.exp(half)), rel=1e-3
    )
    assert "to an unknown extent" in judged.text
    for seed, ratio in enumerate((0.2, 0.4, 0.8)):  # noise that raises the rotated norms alone
        for space, norm, of_half in (
            ("original", 10.0, 10.0),
            ("rotated", 10.0 * ratio, 12.0 * ratio),
        ):
            norms(space, norm, seed=seed, method="basis-rotation", norm_of_half=of_half)
    judged = measured_evidence.norm_ratio(measured)
    limit = 0.4 * (1 - 0.2 / (2**0.5 - 1))
    assert judged.text.endswith(f"0.48 from half the sample, {limit:.3g} extrapolated")
    assert (judged.low, judged.high) == pytest.approx(
        (limit * np.exp(-half), 0.4 * np.exp(half)), rel=1e-3
    )


@pytest.fixture
def two_samples(norms):
    """The ratio is 0.6 from the usual sample, extrapolated to 0.4, and 0.45 from a larger one."""
    of_half = 0.6 + 0.2 * (2**0.5 - 1)
    large = NormSettings(batches_per_vector=1600)
    for changes, rotated, half in (({}, 6.0, 10 * of_half), ({"settings": large}, 4.5, 4.6)):
        norms("original", 10.0, method="basis-rotation", norm_of_half=10.0, **changes)
        norms("rotated", rotated, method="basis-rotation", norm_of_half=half, **changes)


@pytest.mark.usefixtures("two_samples")
def test_largest_sample_decides_the_norms_ratio(measured):
    assert measured_evidence.norm_ratio(measured).value == pytest.approx(0.45)


@pytest.mark.usefixtures("two_samples")
def test_text_has_what_the_smaller_sample_promised(measured):
    text = measured_evidence.norm_ratio(measured).text
    assert text.endswith(" tokens 0.6, which was extrapolated to 0.4")


def test_norms_ratio_is_of_one_checkpoint_with_both_coordinates(norms, measured):
    norms("original", 10.0)  # of PipeDream
    norms("original", 10.0, method="basis-rotation")
    norms("rotated", 5.0, method="basis-rotation", iteration=1000)
    with pytest.raises(UserError):
        measured_evidence.norm_ratio(measured)
    norms("rotated", 4.0, method="basis-rotation")
    judged = measured_evidence.norm_ratio(measured)
    assert judged.value == pytest.approx(0.4)
    assert judged.low < 0.4 < judged.high


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a toy problem's file."""
    monkeypatch.setattr(measured_evidence, "TOYS", tmp_path)
    return lambda name, **content: (tmp_path / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("aligned", "misaligned", "holds"),
    [(1.0, 1.0, False), (1.0, 3.0, True), (2.0, 3.0, False), (1.0, None, True)],
)
def test_toy_quadratic(aligned, misaligned, holds, write):
    with pytest.raises(UserError, match=r"quadratic\.json is not there yet"):
        measured_evidence.delay_hurts_where_misaligned(None)
    cases = [
        ("AdaSGD", True, 9.0),
        ("AdaSGD", False, 9.0),
        ("Adam", True, aligned),
        ("Adam", False, misaligned),
    ]
    write(
        "quadratic",
        slowdowns=[
            dict(zip(("optimizer", "aligned", "slowdown"), case, strict=True)) for case in cases
        ],
    )
    judged = measured_evidence.delay_hurts_where_misaligned(None)
    assert judged.holds == holds
    assert judged.text.endswith("misaligned inf") == (
        misaligned is None
    )  # never arrives: infinitely slow


def test_toy_spiral(write):
    write("spiral-small-steps", arrived=True, spearman=0.5, p_value=0.0)
    rows = (
        (True, 0.5, 1e-9),
        (False, 0.9, 0.0),
        (True, -0.5, 1e-9),
        (True, 0.1, 0.3),
        (True, None, None),
    )
    for arrived, spearman, p_value in rows:
        write("spiral", arrived=arrived, spearman=spearman, p_value=p_value)
        judged = measured_evidence.misalignment_slows_on_the_spiral(None)
        assert judged.holds == (arrived and spearman == 0.5)
        assert ("stops on the way" in judged.text) != arrived


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"slowdowns": [{"optimizer": "Adam"}]}', '{"spearman": "x"}']
)
def test_a_damaged_file_of_a_toy_is_one_line(content, write, tmp_path):
    for name, judge in (
        ("quadratic", measured_evidence.delay_hurts_where_misaligned),
        ("spiral", measured_evidence.misalignment_slows_on_the_spiral),
    ):
        (tmp_path / f"{name}.json").write_text(content)
        with pytest.raises(
            UserError, match=rf"{name}\.json: not readable: .*; brx toy writes it anew$"
        ):
            judge(None)


def test_formulas_give_what_is_printed_and_every_number_counts(monkeypatch):
    assert measured_evidence.memory_share(None).value == pytest.approx(4096 / (4 * 14336))
    assert "1st/bilateral 0.13 and 0.83" in measured_evidence.memory_of_strategies(None).text
    assert (
        measured_evidence.parameter_counts(None).text
        == "paper-95m 95.6 M, paper-1b 1,035.0 M, paper-3b 3,047.0 M"
    )
    judges = measured_evidence.memory_of_strategies, measured_evidence.parameter_counts
    assert [judge(None).holds for judge in judges] == [True, True]
    monkeypatch.setattr(
        measured_evidence, "MEMORY_GIB", [*measured_evidence.MEMORY_GIB[:-1], ["0.06", "0.07"]]
    )
    monkeypatch.setitem(measured_evidence.PARAMETERS, "paper-1b", 1.2e9)
    assert [judge(None).holds for judge in judges] == [False, False]
    judged = measured_evidence.stage_counts(None)
    assert not judged.holds  # the paper prints >= 512 where its own rule, P >= 2 L, gives 252
    assert judged.text.startswith("6 of 7 models as printed; not Llama 3.1 405B")
    monkeypatch.setitem(STAGE_COUNTS, "Llama 3.1 405B", [">= 252"] * 4 + ["126"])
    assert measured_evidence.stage_counts(None).holds
