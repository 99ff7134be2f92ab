"""The verdict on made-up measurements whose answers are plain arithmetic."""

from dataclasses import replace

import pytest

from brx.errors import UserError
from brx.planning.idle import SYNCHRONOUS
from brx.planning.verdict import Question, answer, default_loss, grid, iterations_at, update_costs
from brx.planning.verdict_text import (
    assumption_lines,
    asynchronous_table,
    sentence,
    synchronous_table,
    unmeasured_lines,
)
from brx.plot.verdict import draw_verdict
from brx.runs.time_to_loss import Experiment, Measurements


def experiment(method, delay, to_losses, seconds=1.0, num_rates=3, micro_batches=1):
    """Iterations to the losses 3.02, 3.0, 2.98, of one seed or several."""
    rows = [row if isinstance(row, list) else [row] for row in to_losses]
    pace = {"seconds": seconds, "micro_batches": micro_batches}
    return Experiment(method=method, delay=delay, lr=0.1, num_rates=num_rates, iterations=rows, **pace)


MEASURED = Measurements(
    source="runs",
    model="4 blocks",
    last_iteration=1000,
    losses=[3.02, 3.0, 2.98],
    experiments=[
        experiment("pipedream", 0, [90, 100, 110]),
        experiment("pipedream", 3, [180, 200, 220], seconds=1.1),
        experiment("pipedream", 15, [700, 900, None], num_rates=1),
        experiment("muon", 0, [70, 80, 90], seconds=1.5),
        experiment("muon", 31, [400, 500, 600], seconds=1.6),
    ],
)


def test_time_is_iterations_by_idle_time_and_cost():
    verdict = answer(MEASURED, Question(3.0, 4, 1))
    (asynchronous,) = verdict.asynchronous  # muon is not measured at a delay of 3, nor near it
    assert asynchronous.method == "pipedream"
    assert asynchronous.time == pytest.approx(200)
    times = {(option.schedule, option.method): option.time for option in verdict.synchronous}
    assert times["1F1B", "pipedream"] == pytest.approx(100 * 4)
    assert times["1F1B", "muon"] == pytest.approx(80 * (4 + 0.5))
    assert times["zero-bubble H1", "muon"] == pytest.approx(80 * (3 + 0.5))
    assert verdict.synchronous[0].method == "muon"
    assert verdict.advantage == pytest.approx(80 * 3.5 / 200)
    assert verdict.slowdown(asynchronous) == pytest.approx(200 / 80)
    assert verdict.break_even(asynchronous) == pytest.approx(3.5)
    assert verdict.unmeasured == {"muon": (0.0, 31.0)}


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 1), (7, 2), (31, 10), (3001, 1000)])
def test_delay_is_counted_in_updates(num_stages, num_micro_batches):
    assert Question(3.0, num_stages, num_micro_batches).delay == 3
    if num_stages < 100:
        (option,) = answer(MEASURED, Question(3.0, num_stages, num_micro_batches)).asynchronous
        assert option.iterations.count == pytest.approx(200)


def test_break_even_without_costs_is_one_over_the_busy_share():
    verdict = answer(MEASURED, Question(3.0, 4, 4, costs={"muon": 0.0}))
    best = verdict.synchronous[0]
    assert (best.schedule, best.method, best.idle_share) == ("zero-bubble H1", "muon", pytest.approx(0.2))
    assert verdict.break_even(verdict.asynchronous[0]) == pytest.approx(1 / (1 - 0.2))


def test_interpolation_is_linear_in_the_logarithm_between_neighbours():
    pipedream = [one for one in MEASURED.experiments if one.method == "pipedream"]
    between = iterations_at(MEASURED, pipedream, 7.0, 3.0)  # 1 + 7 is the geometric mean of 1 + 3 and 1 + 15
    assert between.count == pytest.approx((200 + 900) / 2)
    assert between.delays == (3.0, 15.0)
    assert between.num_rates == 1
    assert iterations_at(MEASURED, pipedream, 16.0, 3.0) is None


def test_a_run_that_never_gets_there_is_a_lower_bound_and_no_synchronous_option():
    verdict = answer(MEASURED, Question(2.98, 16, 1))
    assert verdict.asynchronous[0].iterations.is_lower_bound
    assert verdict.is_upper_bound
    never = MEASURED.model_copy(update={"experiments": [experiment("pipedream", 0, [90, None, None])]})
    assert answer(never, Question(3.0, 4, 1)).synchronous == []
    assert answer(never, Question(3.0, 4, 1)).advantage is None


def test_losses_between_the_kept_ones_are_interpolated():
    first = MEASURED.experiments[0]
    assert MEASURED.reached(first, 3.01) == (pytest.approx(95), False)
    assert MEASURED.reached(first, 2.98) == (pytest.approx(110), False)
    assert MEASURED.reached(first, 2.5) == (1000, True)
    two_seeds = experiment("pipedream", 0, [[90, 94], [100, None], [None, None]])
    assert MEASURED.reached(two_seeds, 3.0) == ((100 + 1000) / 2, True)
    assert MEASURED.lowest_loss(two_seeds) == 3.02
    with pytest.raises(UserError, match=r"--loss 3\.5: above 3\.02"):
        MEASURED.reached(first, 3.5)


def test_default_loss_is_the_lowest_that_somebody_reaches_under_the_longest_delay():
    assert default_loss(MEASURED) == 2.98
    fewer = MEASURED.model_copy(update={"experiments": MEASURED.experiments[:3]})
    assert default_loss(fewer) == 3.0


def test_costs_are_relative_to_adamw():
    assert update_costs(MEASURED.experiments) == {"pipedream": 0.0, "muon": 0.5}
    assert update_costs(MEASURED.experiments[3:]) == {"muon": 0.0}


def test_costs_compare_only_runs_of_as_many_micro_batches():
    reached = [90, 100, 110]
    experiments = [
        experiment("pipedream", 1, reached, seconds=4.0, micro_batches=4),
        experiment("muon", 1, reached, seconds=4.2, micro_batches=4),
        experiment("soap", 1, reached, seconds=5.0, micro_batches=4),
        experiment("pipedream", 0, reached, seconds=1.0),
        experiment("muon", 0, reached, seconds=1.5),
        experiment("scion", 2, reached, seconds=9.0, micro_batches=8),
    ]
    for ordered in (experiments, experiments[::-1]):
        assert update_costs(ordered) == {"pipedream": 0.0, "muon": 0.5, "soap": 0.25, "scion": 0.0}


def test_transfers_cost_the_synchronous_pipeline_more():
    free, slow = (answer(MEASURED, Question(3.0, 4, 1, transfer_time=t)) for t in (0.0, 0.1))
    assert slow.synchronous[0].time > free.synchronous[0].time
    one = next(option for option in slow.synchronous if (option.schedule, option.method) == ("1F1B", "pipedream"))
    assert one.time == pytest.approx(100 * (12 + 6 * 0.1) / 3)


def test_at_the_break_even_of_a_schedule_both_are_as_fast_whatever_transfers_take():
    equal = {"pipedream": 0.0, "muon": 0.0}
    for transfer_time in (0.0, 0.1, 3.0):  # of 3, the asynchronous pipeline hides only a part
        verdict = answer(MEASURED, Question(3.0, 4, 1, transfer_time=transfer_time, costs=equal))
        (delayed,) = verdict.asynchronous
        for option in verdict.synchronous:
            per_update = verdict.schedule_break_even(option) * delayed.time_per_update
            assert per_update == pytest.approx(option.time_per_update)


def test_excluded_schedules_are_no_options():
    verdict = answer(MEASURED, Question(3.0, 4, 1, excluded=("zero-bubble H1", "zero-bubble H2", "asynchronous")))
    assert {option.schedule for option in verdict.synchronous} == {"GPipe", "1F1B", "interleaved 1F1B"}
    assert not verdict.asynchronous


def test_file_round_trip_and_what_is_none(tmp_path):
    MEASURED.write(tmp_path / "there" / "time-to-loss.json")
    assert Measurements.read(tmp_path / "there" / "time-to-loss.json") == MEASURED
    (tmp_path / "wrong.json").write_text('{"source": 1}')
    with pytest.raises(UserError, match=r"wrong\.json: source: "):
        Measurements.read(tmp_path / "wrong.json")
    MEASURED.model_copy(update={"losses": []}).write(tmp_path / "empty.json")
    with pytest.raises(UserError, match=r"empty\.json: losses: "):
        Measurements.read(tmp_path / "empty.json")


def test_figure_over_a_grid(tmp_path):
    cells = grid(MEASURED, Question(3.0, 1, 1), [4, 64], [1, 4])
    assert [verdict.advantage is None for verdict in cells.values()] == [False, False, True, True]
    files = draw_verdict(cells, tmp_path / "verdict", MEASURED)
    assert all(file.stat().st_size > 0 for file in files)


def test_a_cell_is_asked_with_its_own_transfers_and_memory(tmp_path):
    def fitted(question):
        if question.num_stages == 32:
            return None
        excluded = ["asynchronous"] if question.num_micro_batches == 4 else []
        return replace(question, transfer_time=question.num_stages / 100, excluded=excluded)

    asked = Question(3.0, 8, 8, transfer_time=9.0, excluded=("1F1B",))
    cells = grid(MEASURED, asked, [4, 16, 32], [1, 4], fitted)
    assert cells[4, 1].advantage == answer(MEASURED, Question(3.0, 4, 1, transfer_time=0.04)).advantage
    assert cells[16, 1].advantage == answer(MEASURED, Question(3.0, 16, 1, transfer_time=0.16)).advantage
    assert cells[16, 4].question.is_memory_short
    assert cells[32, 1] is None
    draw_verdict(cells, tmp_path / "verdict", MEASURED)
    caption = (tmp_path / "verdict.txt").read_text()
    assert "transfers of 0.04 to 0.16 forward passes" in caption
    assert "Blank: the model has fewer than P blocks" in caption
    assert "Without the schedules that need more memory" in caption


ONLY_DELAYED = MEASURED.model_copy(update={"experiments": [one for one in MEASURED.experiments if one.delay]})
NEVER_THERE = MEASURED.model_copy(update={"experiments": [experiment("pipedream", 0, [90, None, None])]})


@pytest.mark.parametrize(
    ("measurements", "excluded", "reason"),
    [
        (MEASURED, [*SYNCHRONOUS, "asynchronous"], "no schedule fits into the memory of a device."),
        (MEASURED, SYNCHRONOUS, "no synchronous schedule fits into the memory of a device, the asynchronous one does."),
        (MEASURED, ["asynchronous"], "the asynchronous schedule does not fit into the memory of a device, zero-bubble"),
        (ONLY_DELAYED, [], "none of the runs is without delay; runs with pipeline.stages=1 would measure it."),
        (NEVER_THERE, [], "no run without delay reaches this loss; ask for a higher --loss."),
        (NEVER_THERE, SYNCHRONOUS, "no synchronous schedule fits into the memory of a device, the asynchronous one"),
    ],
)
def test_without_a_verdict_it_says_why(measurements, excluded, reason):
    said = sentence(answer(measurements, Question(3.0, 4, 1, excluded=excluded)))
    assert said.startswith(f"No verdict: {reason}")


def test_costs_are_told_of_the_methods_that_are_shown():
    (_, line, *_) = assumption_lines(answer(MEASURED, Question(3.0, 4, 1, costs={"muon": 0.25})))
    assert line.endswith(
        "muon 25% (by --cost or --cost-from); pipedream 0% (from the pace of these runs: --cost and --cost-from do not"
        " name them)."
    )
    nothing_fits = Question(3.0, 4, 1, excluded=[*SYNCHRONOUS, "asynchronous"])
    assert len(assumption_lines(answer(MEASURED, nothing_fits))) == 1


def test_a_default_loss_that_nobody_reaches_is_asked_for():
    experiments = [experiment("pipedream", 0, [90, 100, 110]), experiment("pipedream", 3, [None, None, None])]
    too_slow = MEASURED.model_copy(update={"experiments": experiments})
    with pytest.raises(
        UserError, match=r"^--loss: needed, since no run falls to 3\.02 nats under the longest delay, 3 "
    ):
        default_loss(too_slow)


def test_it_says_who_wins_and_what_is_not_measured():
    verdict = answer(MEASURED, Question(3.0, 4, 1))
    assert sentence(verdict) == (
        "Asynchronous wins: pipedream is 1.40 times as fast as zero-bubble H1 with muon"
        " (slowdown 2.50, break-even 3.50)."
    )
    (heading, line) = unmeasured_lines(verdict)
    assert "delays up to 3 updates; runs of them with pipeline.stages=4 would" in heading
    assert line == "  measured only at 0 and 31: muon"
    assert sentence(answer(MEASURED, Question(3.0, 4, 16))).startswith(
        "Synchronous wins: zero-bubble H2 with pipedream"
    )
    assert "no run measures a slowdown at delays up to 63 updates" in sentence(answer(MEASURED, Question(3.0, 64, 1)))
    bound = answer(MEASURED, Question(2.98, 16, 1))
    assert sentence(bound).startswith("No verdict: no asynchronous method reached the loss; so far slowdown")
    first = asynchronous_table(bound, {"asynchronous": 2e9}).iloc[0]
    assert first["iterations"] == "> 1000"
    assert first["GB of the busiest device"] == "2.00"
    assert synchronous_table(bound, {})["synchronous schedule"].iloc[0] == bound.synchronous[0].schedule
    assert "pipedream" in assumption_lines(bound)[-1]
