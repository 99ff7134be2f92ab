"""The search for a learning rate and a second setting on a tuning seed."""

import itertools
import math

import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.files import write_json
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.runs.formats import terminal_text
from brx.sweep.choice import choice_table, choices_and_repetitions, choose, tried_cells
from brx.sweep.spec import Sweep
from brx.sweep.state import State, prepare_folder, state_of
from tests.sweep.helpers import end, finish, write_losses, write_sweep

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BETAS = (0.8, 0.9, 0.95)
SEED = 100


def searching(folder, exclude=(), **choice):
    """A sweep over three rates, with beta1 as the second setting."""
    choice = {
        "over": "optimizer.lr",
        "further": [rate for rate in LADDER if rate not in (3e-4, 1e-3, 3e-3)],
        "seed": SEED,
        "second": [{"over": "optimizer.beta1", "values": [0.8, 0.95]}],
        **choice,
    }
    grid = {"pipeline.stages": [4], "optimizer.lr": [1e-3, 3e-3, 3e-4]}
    repeat = {"set": {"training.seed": [0, 1]}}
    content = {"grid": grid, "exclude": list(exclude), "choose": choice, "repeat": repeat}
    return Sweep.load(write_sweep(folder, **content))


def run_to_the_end(sweep, loss_of):
    """Let cells end with a loss of (rate, beta1) until the search asks for no more."""
    ended = set()
    while waiting := [cell for cell in tried_cells(sweep) if cell.folder not in ended]:
        for cell in waiting:
            prepare_folder(cell)
            write_losses(cell.folder)
            optimizer = cell.config.optimizer
            loss = loss_of(optimizer.lr, optimizer.beta1)
            is_finite = math.isfinite(loss)
            summary = {
                "status": "finished" if is_finite else "diverged",
                "iteration": cell.config.training.last_iteration,
                "final_val_loss": loss if is_finite else None,
                "trajectory_version": TRAJECTORY_VERSION,
            }
            write_json(cell.folder / "summary.json", summary)
            if not is_finite:
                (cell.folder / "failed.txt").write_text("exit code 1: diverged\n")
            ended.add(cell.folder)
    return tried_cells(sweep)


def test_further_rate_is_compared_on_all_seeds_of_the_grid(tmp_path):
    """On seed 1 alone it would win."""
    losses = {
        (1e-3, 0): 3.0,
        (1e-3, 1): 3.0,
        (3e-3, 0): 2.9,
        (3e-3, 1): 2.5,
        (1e-2, 0): 4.0,
        (1e-2, 1): 2.4,
    }
    grid = {"optimizer.lr": [1e-3, 3e-3], "training.seed": [0, 1]}
    sweep = Sweep.load(write_sweep(tmp_path, grid=grid, choose={"further": [1e-2]}))

    def key(cell):
        return cell.config.optimizer.lr, cell.config.training.seed

    while waiting := [cell for cell in tried_cells(sweep) if state_of(cell) is State.WAITING]:
        for cell in waiting:
            finish(cell, losses[key(cell)])
    tried = tried_cells(sweep)
    assert [key(cell) for cell in tried] == list(losses)
    scored = choose(tried, sweep.spec.choose)
    assert scored.loc[scored["is_best"], "optimizer.lr"].tolist() == [3e-3]


def test_values_of_a_nested_key_are_one_group(tmp_path):
    key = "optimizer.arguments.eps"
    sweep = Sweep.load(
        write_sweep(
            tmp_path,
            set={"optimizer.method": "torch.optim:Adamax"},
            grid={"eps": [{key: 1e-8}, {key: 1e-6}, {key: 1e-4}]},
            choose={"over": key},
        )
    )
    for cell, loss in zip(sweep.cells, [3.0, 2.0, 4.0], strict=True):
        finish(cell, loss)
    scored = choose(sweep.cells, sweep.spec.choose)
    assert scored["group"].nunique() == 1
    assert scored.loc[scored["is_best"], key].tolist() == [1e-6]


def key_of_tried(cells):
    return [(cell.config.pipeline.stages, cell.config.optimizer.lr) for cell in cells]


def test_excluded_further_value_is_passed_over(tmp_path):
    choice = {"further": [3e-3, 1e-2], "seed": SEED}
    sweep = Sweep.load(
        write_sweep(
            tmp_path,
            grid={"pipeline.stages": [1, 4], "optimizer.lr": [3e-4, 1e-3]},
            exclude=[{"pipeline.stages": 1, "optimizer.lr": 3e-3}],  # no cell of the grid has it
            choose=choice,
            repeat={"set": {"training.seed": [0]}},
        )
    )
    tried = run_to_the_end(sweep, lambda rate, beta1: 1e-3 / rate)
    expected = [(1, 3e-4), (1, 1e-3), (4, 3e-4), (4, 1e-3), (1, 1e-2), (4, 3e-3), (4, 1e-2)]
    assert key_of_tried(tried) == expected


def test_excluded_second_value_is_not_tried(tmp_path):
    sweep = searching(tmp_path, exclude=[{"optimizer.beta1": 0.8}])
    tried = run_to_the_end(sweep, lambda rate, beta1: bowl(rate, beta1, (1e-3, 0.8)))
    assert {beta1 for _, beta1 in combinations_of(tried)} == {0.9, 0.95}


def test_excluded_repetition_is_not_run(tmp_path):
    sweep = searching(tmp_path, exclude=[{"training.seed": 1, "optimizer.lr": 1e-3}])
    _, repetitions = choices_and_repetitions(sweep, run_to_the_end(sweep, bowl))
    assert [cell.config.training.seed for cell in repetitions] == [0]


def test_nothing_is_chosen_where_every_cell_failed(tmp_path, capsys):
    sweep = searching(tmp_path, second=[])
    for cell in sweep.cells:
        prepare_folder(cell)
        write_losses(cell.folder)
        write_json(cell.folder / "summary.json", {"status": "failed", "iteration": 1})
        (cell.folder / "failed.txt").write_text("exit code 1: no room\n")
    _, repetitions = choices_and_repetitions(sweep, tried_cells(sweep))
    assert repetitions == []
    assert main(["sweep", str(sweep.path), "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "nothing is chosen: every cell failed" in printed
    assert printed.count("no room") == len(sweep.cells)


def combinations_of(cells):
    return [(cell.config.optimizer.lr, cell.config.optimizer.beta1) for cell in cells]


def bowl(rate, beta1, at=(1e-3, 0.9)):
    """Lowest at a rate and a beta1; the two do not interact."""
    return math.log(rate / at[0]) ** 2 + 10 * math.log((1 - beta1) / (1 - at[1])) ** 2


def test_best_inside_needs_the_grid_with_other_seconds(tmp_path):
    tried = run_to_the_end(searching(tmp_path), bowl)
    expected = [(1e-3, 0.9), (3e-3, 0.9), (3e-4, 0.9), (1e-3, 0.8), (1e-3, 0.95)]
    assert combinations_of(tried) == expected


def test_rates_are_extended_before_seconds_are_tried(tmp_path):
    tried = run_to_the_end(searching(tmp_path), lambda rate, beta1: bowl(rate, beta1, (1e-2, 0.9)))
    expected = [(1e-2, 0.9), (3e-2, 0.9), (1e-2, 0.8), (1e-2, 0.95)]
    assert combinations_of(tried)[3:] == expected


def test_better_second_gets_its_neighbouring_rates(tmp_path):
    tried = run_to_the_end(searching(tmp_path), lambda rate, beta1: bowl(rate, beta1, (1e-3, 0.8)))
    assert {(3e-4, 0.8), (3e-3, 0.8)} < set(combinations_of(tried))


def going_on(folder):
    """A search whose second values go on beyond 0.8 and 0.95."""
    further = [0.2, 0.6, 0.975, 0.9875]
    second = {"over": "optimizer.beta1", "values": [0.8, 0.95], "further": further}
    return searching(folder, second=[second])


@pytest.mark.parametrize(
    ("best", "further"),
    [
        (0.9, []),
        (0.8, [0.6]),
        (0.6, [0.6, 0.2]),
        (0.975, [0.975, 0.9875]),
        (0.9875, [0.975, 0.9875]),
    ],
)
def test_second_values_go_on_from_an_end(best, further, tmp_path):
    tried = run_to_the_end(going_on(tmp_path), lambda rate, beta1: bowl(rate, beta1, (1e-3, best)))
    at_best_rate = [beta1 for rate, beta1 in combinations_of(tried) if rate == 1e-3]
    assert at_best_rate == [0.9, 0.8, 0.95, *further]


def test_second_value_that_fails_ends_the_search(tmp_path):
    def loss_of(rate, beta1):
        return math.inf if beta1 < 0.7 else bowl(rate, beta1, (1e-3, 0.6))

    tried = run_to_the_end(going_on(tmp_path), loss_of)
    assert min(beta1 for _, beta1 in combinations_of(tried)) == 0.6


def test_further_second_value_gets_its_neighbouring_rates(tmp_path):
    tried = run_to_the_end(going_on(tmp_path), lambda rate, beta1: bowl(rate, beta1, (1e-3, 0.6)))
    assert {(3e-4, 0.6), (3e-3, 0.6)} < set(combinations_of(tried))


@pytest.mark.parametrize("seed", range(6))
def test_no_neighbour_of_the_chosen_is_better(tmp_path, seed):
    losses = {}

    def loss_of(rate, beta1):
        """Any numbers, some of them infinite: a surface with several valleys."""
        key = (LADDER.index(rate), BETAS.index(beta1))
        value = math.sin(12.9898 * (seed + 1) * (1 + key[0]) + 78.233 * key[1]) * 43758.5453
        losses[rate, beta1] = math.inf if value % 1 > 0.9 else 1 + value % 1
        return losses[rate, beta1]

    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, loss_of)
    scored = choose(tried, sweep.spec.choose)
    (best,) = scored[scored["is_best"]][["optimizer.lr", "second"]].itertuples(index=False)
    place = LADDER.index(best[0])
    if not math.isfinite(losses[tuple(best)]):
        assert len(tried) == 3  # every rate of the grid diverged: there is nothing to go on from
        return
    neighbours = [(rate, best[1]) for rate in LADDER[max(place - 1, 0) : place + 2]]
    neighbours += [(best[0], beta1) for beta1 in BETAS]
    assert all(losses[each] >= losses[tuple(best)] for each in neighbours)


def test_chosen_combination_is_repeated_on_reported_seeds(tmp_path):
    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, lambda rate, beta1: bowl(rate, beta1, (3e-3, 0.95)))
    _, repetitions = choices_and_repetitions(sweep, tried)
    found = [
        (cell.config.training.seed, cell.config.optimizer.lr, cell.config.optimizer.beta1)
        for cell in repetitions
    ]
    assert found == [(0, 3e-3, 0.95), (1, 3e-3, 0.95)]


def test_cells_that_are_compared_are_marked_as_tuning(tmp_path):
    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, bowl)
    _, repetitions = choices_and_repetitions(sweep, tried)
    marks = [cell.config.training.for_tuning for cell in itertools.chain(tried, repetitions)]
    assert marks == [True] * len(tried) + [False] * len(repetitions)


def test_tuning_seed_is_in_names(tmp_path):
    assert searching(tmp_path).cells[0].name == "p4-lr0.001-s100"


def test_group_of_all_cells_is_named(tmp_path):
    """The sweep varies only what is chosen."""
    choice = {"seed": SEED, "second": [{"over": "optimizer.beta1", "values": [0.8]}]}
    grid = {"optimizer.lr": [1e-3, 3e-3, 3e-4]}
    repeat = {"set": {"training.seed": [0]}}
    sweep = Sweep.load(write_sweep(tmp_path, grid=grid, choose=choice, repeat=repeat))
    tried = run_to_the_end(sweep, bowl)
    table = choice_table(choose(tried, sweep.spec.choose), sweep.spec.choose)
    assert table["cells"].tolist() == ["all"] * len(tried)


def test_narrow_terminal_shows_what_was_chosen(tmp_path):
    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, bowl)
    table = choice_table(choose(tried, sweep.spec.choose), sweep.spec.choose)
    shown = terminal_text(table.assign(cells="like32-basis-rotation"), 60)
    assert "Too narrow for: final_val_loss" in shown
    assert "yes" in shown


def test_choice_table_has_the_second_value(tmp_path):
    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, bowl)
    table = choice_table(choose(tried, sweep.spec.choose), sweep.spec.choose)
    chosen = table[table["chosen"] == "yes"]
    assert chosen[["optimizer.lr", "second value"]].to_numpy().tolist() == [["0.001", "0.9"]]


@pytest.mark.parametrize(
    ("best", "remark"),
    [
        ((1e-3, 0.9), ""),
        ((1e-3, 0.8), "second value at the edge"),
        ((3e-2, 0.9), "at the edge: widen the grid"),
        ((3e-2, 0.95), "both at the edge: widen the grid"),
    ],
)
def test_choice_at_an_edge_is_remarked(best, remark, tmp_path):
    sweep = searching(tmp_path)
    tried = run_to_the_end(sweep, lambda rate, beta1: bowl(rate, beta1, best))
    table = choice_table(choose(tried, sweep.spec.choose), sweep.spec.choose)
    assert table.loc[table["chosen"] == "yes", "remark"].tolist() == [remark]
    assert (table.loc[table["chosen"] == "", "remark"] == "").all()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"seed": 1}, "choose.seed: 1 is among the reported seeds of repeat.set"),
        ({"seed": None}, "choose.second: needs choose.seed"),
        (
            {"second": [{"over": "optimizer.lr", "values": [1.0]}]},
            "choose.second[0].over: must not be optimizer.lr",
        ),
        (
            {"second": [{"over": "optimizer.beta1", "values": [1.5]}]},
            "optimizer.beta1: input should be less than 1",
        ),
        (
            {"second": [{"over": "optimizer.beta1", "values": [0.8], "further": [1.5]}]},
            "optimizer.beta1: input should be less than 1",
        ),
        (
            {"second": [{"over": "optimizer.method", "values": [1]}]},
            "needs a key of numbers, optimizer.method is 'pipedream'",
        ),
        (
            {
                "second": [
                    {"over": "optimizer.beta1", "values": [0.8]},
                    {"over": "optimizer.beta2", "values": [0.9]},
                ]
            },
            "choose.second[1].where: cell p4-lr0.001-s100 has a second key already",
        ),
        (
            {
                "second": [
                    {"over": "optimizer.beta1", "values": [0.8], "where": {"pipeline.stages": 2}}
                ]
            },
            "choose.second[0].where: matches no cell",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, choice, expected):
    with pytest.raises(UserError) as refused:
        searching(tmp_path, **choice)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"grid": {"training.seed": [3]}}, "leave training.seed out of set and grid"),
        ({"set": {"training.seed": 3}}, "leave training.seed out of set and grid"),
        (
            {"grid": {"axis": [{"training.seed": 3}]}},
            "leave training.seed out of set and grid",
        ),
        ({"repeat": None}, "name the seeds that are under repeat.set.training.seed"),
    ],
)
def test_tuning_seed_alone_decides(tmp_path, content, expected):
    content = {
        "choose": {"seed": SEED},
        "repeat": {"set": {"training.seed": [0]}},
        **content,
    }
    with pytest.raises(UserError, match=r"choose\.seed: ") as refused:
        Sweep.load(write_sweep(tmp_path, **content))
    assert expected in str(refused.value)


@pytest.fixture
def with_killed_cell(tmp_path):
    """A sweep of two seeds and two rates, with a cell that was killed. Seeds 1 and 2 of the better
    rate are repetitions."""
    grid = {"training.seed": [0, 1], "optimizer.lr": [1e-3, 3e-3]}
    repeat = {"set": {"training.seed": [1, 2]}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    sweep = Sweep.load(path)
    for cell, val_loss in zip(sweep.cells, (None, 2.0, 1.0, 1.5), strict=True):
        end(cell, val_loss=val_loss)
    (sweep.cells[0].folder / "summary.json").unlink()
    return sweep


def test_killed_cell_decides_nothing(with_killed_cell):
    choices, _ = choices_and_repetitions(with_killed_cell, with_killed_cell.cells)
    assert choices.loc[choices["is_best"], "optimizer.lr"].tolist() == [1e-3]


def test_seeds_of_the_grid_are_not_repeated(with_killed_cell):
    _, repetitions = choices_and_repetitions(with_killed_cell, with_killed_cell.cells)
    assert [cell.config.training.seed for cell in repetitions] == [2]


@pytest.fixture
def diverged(tmp_path):
    """A sweep whose rates have all diverged, shown once more."""
    grid = {"pipeline.stages": [4], "optimizer.lr": [1e29, 1e30]}
    repeat = {"set": {"training.seed": [1]}}
    path = write_sweep(tmp_path, grid=grid, choose={"over": "optimizer.lr"}, repeat=repeat)
    for cell in Sweep.load(path).cells:
        end(cell, val_loss=None)
    assert main(["sweep", str(path), "--jobs", "2"]) == 1
    return tmp_path / "cells"


def test_no_rate_is_chosen_where_all_diverge(diverged):
    assert "p4,1e+29,failed,," in (diverged / "choice-sweep.csv").read_text()


def test_nothing_is_repeated_where_all_rates_diverge(diverged):
    assert not list(diverged.glob("*-s1--*"))


def test_repetitions_are_of_the_best_rate(half_done):
    _, repetitions = choices_and_repetitions(half_done, half_done.cells)
    assert [cell.name for cell in repetitions] == ["p4-lr0.01-s1", "p4-lr0.01-s2"]
