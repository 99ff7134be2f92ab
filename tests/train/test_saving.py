"""Checkpoints beside the training: copies of the right moment, complete or told, however slow."""

import errno
import time

import pytest
import torch

from brx.config.loading import load_config
from brx.errors import NeighbourLostError, RunError
from brx.pipeline.world import World
from brx.runs import checkpoint
from brx.train.build import assemble
from brx.train.loop import train
from brx.train.saving import CheckpointWriter
from tests.train.helpers import steps_of, tiny_config


def states(run, iteration):
    """What a checkpoint's stages hold, but for the random numbers, which the process shares."""
    folder = checkpoint.checkpoint_folder(run, iteration)
    read = [checkpoint.read_stage(folder, stage, torch.device("cpu")) for stage in range(4)]
    return [{key: value for key, value in state.items() if key != "rng"} for state in read]


def slowly(monkeypatch, seconds):
    """Let the disk take so long for each file."""
    sync = checkpoint._SteadyWriter.sync

    def wait(self):
        time.sleep(seconds)
        sync(self)

    monkeypatch.setattr(checkpoint._SteadyWriter, "sync", wait)


def test_checkpoint_holds_its_own_iteration(tmp_path, monkeypatch):
    slowly(monkeypatch, 0.05)
    for background in ("true", "false"):
        settings = (f"checkpoint.background={background}", "training.iterations=14")
        train(tiny_config(tmp_path, *settings), tmp_path / background)
    aside, in_turn = (states(tmp_path / background, 7) for background in ("true", "false"))
    torch.testing.assert_close(aside, in_turn, rtol=0, atol=0)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    reached = []
    finish = checkpoint.finish

    def watched(run, iteration, *rest):
        reached.append(trained[-1])
        return finish(run, iteration, *rest)

    trained = [0]
    monkeypatch.setattr(checkpoint, "finish", watched)
    monkeypatch.setattr(CheckpointWriter, "check", lambda self: trained.append(trained[-1] + 1))
    slowly(monkeypatch, 0.2)
    train(tiny_config(tmp_path, "training.iterations=12"), tmp_path / "run")
    assert reached[0] > 7


def test_slow_checkpoint_is_waited_for(tmp_path, monkeypatch):
    slowly(monkeypatch, 0.3)  # for each of four stages
    settings = ("pipeline.timeout_s=0.8", "training.iterations=7")
    assert train(tiny_config(tmp_path, *settings), tmp_path / "run") == "finished"


def test_file_in_its_place_is_told(tmp_path):
    path = tmp_path / "checkpoints" / ".00000001.tmp" / "stage-000.pt"
    is_there = []
    checkpoint.write_stage(tmp_path, 1, 0, {}, lambda num_bytes: is_there.append(path.exists()))
    assert is_there == [False, True]


def test_step_without_bytes_is_progress(tmp_path):
    writer = CheckpointWriter(tmp_path, tiny_config(tmp_path), World())
    before = writer._progress()
    writer._count(0)
    assert writer._progress() != before


def test_disk_without_progress_is_told(tmp_path, monkeypatch):
    slowly(monkeypatch, 0.4)
    settings = ("pipeline.timeout_s=0.2", "training.iterations=7")
    with pytest.raises(
        NeighbourLostError, match=r"rank 0 wrote nothing of a checkpoint for 0\.2 s"
    ):
        train(tiny_config(tmp_path, *settings), tmp_path / "run")


def test_what_fails_in_the_background_ends_the_run(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RunError("stage-000.pt: cannot be written: No space left on device")

    monkeypatch.setattr(checkpoint, "write_stage", fail)
    with pytest.raises(RunError, match="No space left"):
        train(tiny_config(tmp_path, "training.iterations=1000"), tmp_path / "run")
    assert steps_of(tmp_path / "run")[-1]["iteration"] < 1000


def fill_disk(monkeypatch, stage):
    """Let the disk be full when a stage's file is written."""
    write = checkpoint._SteadyWriter.write

    def full(self, data):
        if f"stage-{stage:03d}" in self._file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(checkpoint._SteadyWriter, "write", full)


@pytest.mark.parametrize("background", ["true", "false"])
def test_full_disk_gets_its_room_back(tmp_path, monkeypatch, background):
    fill_disk(monkeypatch, stage=2)
    config = tiny_config(tmp_path, f"checkpoint.background={background}")
    with pytest.raises(RunError, match="No space left"):
        train(config, tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


class SharedWorld(World):
    """One of two ranks that are threads, or take turns, in one process."""

    num_ranks = 2

    def __init__(self, rank, announced):
        self.rank = rank
        self._announced = announced


@pytest.fixture
def two_ranks(tmp_path):
    """The writers of two ranks with a stage each."""
    config, announced = tiny_config(tmp_path), {}
    writers = [CheckpointWriter(tmp_path, config, SharedWorld(r, announced)) for r in range(2)]
    for stage, writer in enumerate(writers):
        writer._stages = [stage]
    return writers


def no_states():
    raise RunError("no space")
    yield


def test_files_of_a_rank_that_saved_first_go(tmp_path, two_ranks):
    first, second = two_ranks
    second._write(7, [(1, {})], {})
    first._write(7, no_states(), {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_files_of_a_rank_that_saves_last_go(tmp_path, two_ranks):
    first, second = two_ranks
    first._write(7, no_states(), {})
    second._write(7, [(1, {})], {})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_files_of_a_rank_that_still_writes_stay(tmp_path, two_ranks):
    temporary = tmp_path / "checkpoints" / ".00000007.tmp"
    checkpoint.write_stage(tmp_path, 7, 1, {})
    two_ranks[0]._write(7, no_states(), {})
    assert [path.name for path in temporary.iterdir()] == ["stage-001.pt"]


def test_checkpoints_without_rings_are_smaller(tmp_path):
    for rings in ("true", "false"):
        settings = (f"checkpoint.rings={rings}", "training.iterations=7", "model.width=32")
        train(tiny_config(tmp_path, *settings), tmp_path / rings)
    sizes = {
        rings: sum(entry["bytes"] for entry in manifest["stages"])
        for rings in ("true", "false")
        for manifest in [checkpoint.read_manifest(tmp_path / rings / "checkpoints" / "00000007")]
    }
    # Weights, two moments, and 4 + 3 + 2 versions of 4 stages: 12 + 9 in quarters of the weights.
    assert sizes["false"] < 0.7 * sizes["true"]


class RowByRow(torch.optim.Optimizer):
    """Momentum in float64, which reaches one row of a weight at a time; the row is an index."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight, dtype=torch.float64)
                    state["visits"] = [torch.tensor(0), torch.zeros(len(weight), dtype=torch.bool)]
                row, is_seen = state["visits"]
                state["momentum"].lerp_(weight.grad.double(), 0.1)
                weight[row] -= group["lr"] * state["momentum"][row].to(weight.dtype)
                is_seen[row] = True
                row += 1
                row %= len(weight)


def test_state_of_an_optimizer_keeps_its_data_types(tmp_path):
    method = f"optimizer={{method: '{__name__}:RowByRow', lr: 0.1}}"
    train(tiny_config(tmp_path, method), tmp_path / "straight")
    train(tiny_config(tmp_path, method, "training.stop_after=12"), tmp_path / "run")
    train(tiny_config(tmp_path, method), tmp_path / "run", resume=True)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "straight")


@pytest.fixture
def resumed(tmp_path):
    """A run without rings in its checkpoints, stopped after 12 and resumed."""
    train(tiny_config(tmp_path), tmp_path / "straight")
    settings = ("checkpoint.rings=false", "training.stop_after=12")
    train(tiny_config(tmp_path, *settings), tmp_path / "run")
    return tmp_path


def test_resuming_without_rings_is_said(resumed, capsys):
    train(tiny_config(resumed), resumed / "run", resume=True)
    assert "has no older weight versions (checkpoint.rings: false)" in capsys.readouterr().err


def test_unsaved_rings_begin_with_the_newest_weights(resumed):
    config = load_config(resumed / "run")
    assembly = assemble(config, lambda n: pytest.fail("nothing is trained"))
    assembly.restore(checkpoint.checkpoint_folder(resumed / "run", 12))
    for stage in assembly.stages:
        state = stage.state_dict()
        for name, versions in state["ring"].items():
            newest = state["weights"][name].expand_as(versions)
            torch.testing.assert_close(versions, newest, rtol=0, atol=0)


def test_losses_differ_after_resuming_without_rings(resumed):
    train(tiny_config(resumed), resumed / "run", resume=True)
    run, straight = steps_of(resumed / "run"), steps_of(resumed / "straight")
    differing = [one["iteration"] for one, other in zip(run, straight, strict=True) if one != other]
    assert differing[0] == 13
