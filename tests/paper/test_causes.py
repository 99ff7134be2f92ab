"""The study of causes, from made-up final losses: costs, verdicts on predictions, and panels."""

import json
import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from brx.cli.main import main
from brx.config.loading import preset_with
from brx.errors import UserError
from brx.paper import causes
from brx.paper.causes import ADAMW, ARMS, BASES, EIGENBASIS, LION, MUON, RANDOM, ROTATED_LION, Study
from brx.plot.style import new_figure
from brx.sweep.spec import identity
from tests.paper.helpers import write_compact

LENGTH = 40  # iterations
DELAYS = {
    causes.NONE: {"pipeline.stages": 1},
    causes.ONE_UPDATE: {"pipeline.stages": 8, "pipeline.delay": "2bw"},
    causes.EIGHT: {"pipeline.stages": 8},
    causes.DEEPEST: {"pipeline.stages": 8, "pipeline.delay.like": 32},
}
NOISE = (0.0, 0.004, -0.003)  # nats, of the three seeds with delay


def write_arm(folder, arm, costs, noise=NOISE, without=1.3, *, slowness=None):
    """Runs of an arm without delay, and with delays that cost so many nats.

    With delay the loss also falls more slowly, by a factor of 1 + slowness (by default 1 + the
    cost)."""
    for seed in range(len(noise)):
        write_arm_run(folder, arm, causes.NONE, seed, without + 0.01 * seed, slow=1)
    for delay, cost in costs.items():
        slow = 1 + (cost if slowness is None else slowness)
        for seed, shift in enumerate(noise):
            final = without + cost + 0.01 * seed + shift
            write_arm_run(folder, arm, delay, seed, final, slow)


def write_arm_run(folder, arm, delay, seed, final, slow):
    """A run whose training loss falls as 3 / (1 + t / (5 slow)), with a final validation loss."""
    settings = {
        **ARMS[arm],
        **DELAYS[delay],
        "training.seed": seed,
        "training.iterations": LENGTH,
        "training.warmup_fraction": 0.1,
    }
    config = preset_with("similar", settings)
    losses = 3.0 / (1 + np.arange(1, LENGTH + 1) / (5 * slow))
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(folder / identity(config), config, losses, {LENGTH: final}, 10.0, summary)


def finding(folder, name):
    (prediction,) = [each for each in causes.PREDICTIONS if each.name == name]
    return prediction.judge(Study.load(folder))


def write_bases(folder, costs, adamw=0.3):
    for arm, cost in zip(BASES, costs, strict=True):
        write_arm(folder, arm, {causes.DEEPEST: cost})
    write_arm(folder, ADAMW, {causes.DEEPEST: adamw})


def test_arms_of_all_sweeps_are_known():
    configs = [preset_with("similar", settings) for settings in ARMS.values()]
    assert [causes.arm_of(config) for config in configs] == list(ARMS)


@pytest.mark.parametrize("delay", DELAYS)
def test_delays_are_told_apart(delay):
    assert causes.delay_of(preset_with("similar", DELAYS[delay]).pipeline) == delay


def test_runs_of_basis_rotation_serve_for_no_turn(tmp_path):
    write_arm(tmp_path, causes.SAME[1], {causes.DEEPEST: 0.2})
    cost = Study.load(tmp_path).cost(EIGENBASIS, causes.DEEPEST)
    assert cost.tolist() == pytest.approx([0.2 + shift for shift in NOISE])


def test_runs_of_no_turn_stay_their_own(tmp_path):
    write_arm(tmp_path, causes.SAME[1], {causes.DEEPEST: 0.2})
    write_arm(tmp_path, EIGENBASIS, {causes.DEEPEST: 0.1})
    cost = Study.load(tmp_path).cost(EIGENBASIS, causes.DEEPEST)
    assert cost.tolist() == pytest.approx([0.1 + shift for shift in NOISE])


def test_cost_is_a_difference_by_seed(tmp_path):
    write_arm(tmp_path, LION, {causes.DEEPEST: 0.2})
    cost = Study.load(tmp_path).cost(LION, causes.DEEPEST)
    assert cost.tolist() == pytest.approx([0.2 + shift for shift in NOISE])


def test_rising_costs_hold_for_the_first(tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    assert finding(tmp_path, "1").outcome == "holds"


def test_flat_costs_refute_the_first(tmp_path):
    write_bases(tmp_path, (0.1, 0.1, 0.1, 0.1, 0.1))
    assert finding(tmp_path, "1").outcome == "refuted"


def test_two_seeds_leave_the_first_open(tmp_path):
    for arm, cost in zip(BASES, (0.05, 0.1, 0.15, 0.2, 0.25), strict=True):
        write_arm(tmp_path, arm, {causes.DEEPEST: cost}, noise=NOISE[:2])
    assert finding(tmp_path, "1").outcome == "open"


def test_slowdowns_must_rise_as_well(tmp_path):
    for arm, cost in zip(BASES, (0.05, 0.1, 0.15, 0.2, 0.25), strict=True):
        write_arm(tmp_path, arm, {causes.DEEPEST: cost}, slowness=1.0)
    assert finding(tmp_path, "1").outcome == "refuted"


def test_random_basis_within_chance_of_none_holds(tmp_path):
    write_arm(tmp_path, RANDOM, {causes.DEEPEST: 0.3})
    write_arm(tmp_path, ADAMW, {causes.DEEPEST: 0.301}, noise=(0.002, 0.0, -0.001))
    assert finding(tmp_path, "2").outcome == "holds"


def test_better_random_basis_refutes_the_second(tmp_path):
    write_bases(tmp_path, (0.1,) * 5, adamw=0.3)
    assert finding(tmp_path, "2").outcome == "refuted"


def test_text_has_the_interval_of_the_difference(tmp_path):
    write_arm(tmp_path, RANDOM, {causes.DEEPEST: 0.1})
    write_arm(tmp_path, ADAMW, {causes.DEEPEST: 0.3}, noise=(0.0, 0.01, 0.02))
    differences = np.subtract((0.3, 0.31, 0.32), np.add(0.1, NOISE))
    interval = ttest_1samp(differences, 0.0).confidence_interval(0.95)
    expected = f"{differences.mean():+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
    assert finding(tmp_path, "2").text.endswith(expected)


def write_norms(folder, norms):
    """Norms by arm at half of the training, as `brx hessian-norm` keeps them."""
    groups = {"names": [], "num_rows": [], "sums": [], "covariances": []}
    for arm, norm in norms.items():
        delayed = Study.load(folder).runs_by_place[arm, causes.DEEPEST]
        for run in delayed.index:
            space = "original" if arm == ADAMW else "rotated"
            content = {
                "run": run,
                "method": "m",
                "num_stages": 32,
                "iteration": LENGTH // 2,
                "space": space,
                "settings": {},
                "num_parameters": 10,
                "norm": norm,
                "norm_of_half": norm,
                "standard_error": 0.0,
                "tokens": 1,
                "below_resolution": 0.0,
                "blocks": groups,
                "kinds": groups,
                "num_own_stages": 8,
            }
            analysis = folder / str(run).rpartition("/")[2] / "analysis"
            analysis.mkdir(exist_ok=True)
            path = analysis / f"hessian-norm-{space}-{LENGTH // 2:08d}.json"
            path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("norms", "outcome"), [((1, 2, 3, 4, 5, 6), "holds"), ((6, 5, 4, 3, 2, 1), "refuted")]
)
def test_norms_in_the_order_of_costs_hold(norms, outcome, tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    write_norms(tmp_path, dict(zip([*BASES, ADAMW], norms, strict=True)))
    assert finding(tmp_path, "3").outcome == outcome


def test_unmeasured_norms_are_not_tried(tmp_path):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    with pytest.raises(UserError, match="norms have not been measured"):
        finding(tmp_path, "3")


@pytest.mark.parametrize(
    ("costs", "outcome"), [((0.3, 0.2, 0.1), "holds"), ((0.1, 0.2, 0.3), "refuted")]
)
def test_momentum_is_judged_at_one_update(costs, outcome, tmp_path):
    for value, cost in zip(causes.MOMENTA, costs, strict=True):
        arm = causes.with_momentum("muon", value)
        write_arm(tmp_path, arm, {causes.ONE_UPDATE: cost, causes.DEEPEST: 0.5 - cost})
    assert finding(tmp_path, "4, Muon").outcome == outcome


@pytest.mark.parametrize(
    ("lion", "muon", "outcome"),
    [(0.1, 0.1, "holds"), (0.05, 0.1, "holds"), (0.2, 0.1, "refuted"), (0.1, 0.2, "refuted")],
)
def test_geometry_needs_both_methods(lion, muon, outcome, tmp_path):
    write_arm(tmp_path, EIGENBASIS, {causes.DEEPEST: 0.1})
    write_arm(tmp_path, LION, {causes.DEEPEST: lion}, noise=(0.003, 0.0, -0.002))
    write_arm(tmp_path, MUON, {causes.DEEPEST: muon}, noise=(0.002, 0.001, -0.001))
    assert finding(tmp_path, "5, geometry").outcome == outcome


def test_lion_costs_less_in_the_eigenbasis(tmp_path):
    write_arm(tmp_path, LION, {causes.DEEPEST: 0.3})
    write_arm(tmp_path, ROTATED_LION, {causes.DEEPEST: 0.1})
    assert finding(tmp_path, "5, alignment").outcome == "holds"


def test_muon_costs_less_at_one_update(tmp_path):
    write_arm(tmp_path, ADAMW, {causes.ONE_UPDATE: 0.2})
    write_arm(tmp_path, MUON, {causes.ONE_UPDATE: 0.01})
    assert finding(tmp_path, "6").outcome == "holds"


def test_diverged_seed_costs_infinitely_much(tmp_path):
    write_arm(tmp_path, LION, {causes.DEEPEST: 0.3})
    delayed = Study.load(tmp_path).runs_by_place[LION, causes.DEEPEST].index[1]
    (tmp_path / str(delayed).rpartition("/")[2] / "summary.json").write_text(
        json.dumps({"status": "diverged", "data_fingerprint": "f"})
    )
    assert Study.load(tmp_path).cost(LION, causes.DEEPEST)[1] == math.inf


def test_two_experiments_of_an_arm_are_refused(tmp_path):
    write_arm(tmp_path, LION, {causes.DEEPEST: 0.3})
    settings = {**ARMS[LION], "pipeline.stages": 1, "training.iterations": LENGTH + 1}
    config = preset_with("similar", settings)
    losses = np.ones(LENGTH + 1)
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(tmp_path / "other", config, losses, {LENGTH + 1: 1.0}, 10.0, summary)
    with pytest.raises(UserError, match="of the same arm"):
        Study.load(tmp_path)


def test_other_runs_alone_are_refused(tmp_path):
    config = preset_with("similar", {"optimizer.method": "nesterov"})
    summary = {"status": "finished", "data_fingerprint": "f"}
    write_compact(tmp_path / "run", config, np.ones(9), {9: 1.0}, 10.0, summary)
    with pytest.raises(UserError, match="no runs of the study"):
        Study.load(tmp_path)


@pytest.mark.parametrize(("corrected", "outcome"), [(0.1, "holds"), (0.3, "refuted")])
def test_error_feedback_is_compared_without_it(corrected, outcome, tmp_path):
    write_arm(tmp_path, ADAMW, {causes.ONE_UPDATE: 0.2})
    write_arm_run_with_feedback(tmp_path, corrected)
    assert finding(tmp_path, "7, AdamW").outcome == outcome


def write_arm_run_with_feedback(folder, cost):
    """Runs of AdamW with error feedback; without delay they are AdamW's."""
    for seed, shift in enumerate(NOISE):
        final = 1.3 + cost + 0.01 * seed + shift / 2
        write_arm_run(folder, causes.ADAMW_FEEDBACK, causes.ONE_UPDATE, seed, final, slow=1 + cost)


def test_table_says_what_was_not_tried(tmp_path, capsys):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    assert main(["tables", "causes", "--runs", str(tmp_path), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    verdicts = {row["prediction"]: row["verdict"] for row in rows}
    assert (verdicts["1"], verdicts["6"]) == ("holds", "not tried")


def test_panels_without_runs_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("brx.plot.style.DPI", 30)
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    written = causes.draw_causes(tmp_path, tmp_path / "figure")
    caption = written[3].read_text()
    assert "Left out, for want of runs: momentum, geometry, corrections, error feedback." in caption


@pytest.fixture
def axes():
    with new_figure() as figure:
        yield figure.subplots()


def test_points_are_the_mean_costs(tmp_path, axes):
    write_bases(tmp_path, (0.05, 0.1, 0.15, 0.2, 0.25))
    causes.PANELS[0].draw(Study.load(tmp_path), axes)
    of_bases, _of_adamw = axes.containers
    shift = np.mean(NOISE)
    assert of_bases.lines[0].get_ydata() == pytest.approx(
        [cost + shift for cost in (0.05, 0.1, 0.15, 0.2, 0.25)]
    )


def test_momentum_title_has_the_change(tmp_path, axes):
    for value, cost in zip(causes.MOMENTA, (0.3, 0.2, 0.1), strict=True):
        write_arm(tmp_path, causes.with_momentum("muon", value), {causes.ONE_UPDATE: cost})
    causes.PANELS[1].draw(Study.load(tmp_path), axes)
    assert axes.get_title().endswith("Muon -0.20")


def test_least_cost_is_named(tmp_path, axes):
    write_arm(tmp_path, LION, {causes.DEEPEST: 0.3})
    write_arm(tmp_path, ROTATED_LION, {causes.DEEPEST: 0.1})
    causes.PANELS[2].draw(Study.load(tmp_path), axes)
    assert axes.get_title().endswith("Lion in the eigenbasis loses least")
