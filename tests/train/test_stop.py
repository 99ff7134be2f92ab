"""All ranks stop after the same iteration, whichever was asked, with no message in flight."""

import math
import os
import random
import signal
import time
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from brx.methods.updater import lr_factor
from brx.pipeline.schedule import asynchronous_1f1b
from brx.pipeline.world import World
from brx.runs.checkpoint import list_checkpoints
from brx.train.device import SAME_REQUEST_S, StopSignal
from brx.train.loop import Trainer, train
from tests.train.helpers import losses, tiny_config

ENDS = (9, 14, 40)  # of the segments


class SharedWorld(World):
    """One of several ranks that run in turn in this process."""

    def __init__(self, rank, num_ranks, announced):
        self.rank, self.num_ranks, self._announced = rank, num_ranks, announced


class Pipeline:
    """Ranks that exchange the numbers of micro-batches, one action at a time."""

    def __init__(self, num_ranks, asked_rank, asked_at):
        self.num_ranks, self.asked = num_ranks, (asked_rank, asked_at)
        self.announced = {}
        self.messages = {}  # by kind and receiving rank
        self.posted, self.received = Counter(), Counter()
        self.trainers = [self._trainer(rank) for rank in range(num_ranks)]

    def _trainer(self, rank):
        trainer = Trainer.__new__(Trainer)
        trainer.world = SharedWorld(rank, self.num_ranks, self.announced)
        trainer.iteration, trainer._stop_at, trainer._has_asked = 0, None, False
        trainer._deadline = math.inf
        return trainer

    def run(self, rank):
        """The actions of a rank; yields wherever another rank may come in between."""
        trainer, stop = self.trainers[rank], SimpleNamespace(requested=False)
        for end in ENDS:
            trainer._end = trainer._until_stop(end)
            actions = asynchronous_1f1b(
                rank, self.num_ranks, trainer.iteration + 1, lambda: trainer._end, 1
            )
            for action in actions:
                yield
                if action.kind == "U":
                    trainer.iteration = action.number
                    stop.requested = stop.requested or (rank, action.number) == self.asked
                    trainer._look_for_stop(stop)
                    trainer._end = trainer._until_stop(end)
                    continue
                source = rank - 1 if action.kind == "F" else rank + 1
                target = rank + 1 if action.kind == "F" else rank - 1
                if 0 <= source < self.num_ranks:
                    yield from self._receive(action, rank, more=action.number < trainer._end)
                if 0 <= target < self.num_ranks:
                    self.messages.setdefault((action.kind, target), deque()).append(action.number)
            if trainer.iteration == trainer._stop_at:
                return

    def _receive(self, action, rank, *, more):
        key = action.kind, rank
        while not self.messages.get(key):
            yield
        assert self.messages[key].popleft() == action.number
        self.received[key] = action.number
        if more:  # a receive that is posted ahead
            self.posted[key] = action.number + 1


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def stopped(request):
    """Sixty pipelines of that many ranks after a rank was asked to stop, and the iteration of each
    request. The ranks take turns at random."""
    num_ranks = request.param
    choose = random.Random(num_ranks)
    pipelines = []
    for _ in range(60):
        asked_at = choose.randint(1, 20)
        pipeline = Pipeline(num_ranks, choose.randrange(num_ranks), asked_at)
        running = [pipeline.run(rank) for rank in range(num_ranks)]
        for _ in range(20_000):
            if not running:
                break
            rank = choose.choice(running)
            if next(rank, "ended") == "ended":
                running.remove(rank)
        assert not running, "somebody waits for ever"
        pipelines.append((pipeline, asked_at))
    return pipelines


def ends(pipeline):
    return {trainer.iteration for trainer in pipeline.trainers}


def test_all_ranks_stop_after_the_same_iteration(stopped):
    assert all(len(ends(pipeline)) == 1 for pipeline, _ in stopped)


def test_ranks_stop_soon_after_the_request(stopped):
    for pipeline, asked_at in stopped:
        assert asked_at <= min(ends(pipeline))
        assert max(ends(pipeline)) <= asked_at + 3 * pipeline.num_ranks


def test_stopped_ranks_leave_no_message(stopped):
    for pipeline, _ in stopped:
        assert not any(pipeline.messages.values())


def test_stopped_ranks_wait_for_no_message(stopped):
    for pipeline, _ in stopped:
        for key, last in pipeline.received.items():
            assert pipeline.posted[key] <= last


@pytest.fixture
def heard_hangup():
    """SIGHUP is not ignored, as it would be under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heard_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signal_asks_for_a_stop(number):
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
    assert stop.requested


def test_signals_at_once_are_one_request():
    with StopSignal() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert stop.requested


def test_second_ctrl_c_interrupts():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        stop._first = time.monotonic() - 2 * SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not stop.requested


def test_run_out_of_time_saves(tmp_path):
    config = tiny_config(tmp_path)
    assert train(config, tmp_path / "run", seconds=0.0) == "out of time"
    assert [record["iteration"] for record in losses(tmp_path / "run")] == [1]


def test_run_out_of_time_resumes_exactly(tmp_path):
    config = tiny_config(tmp_path)
    train(config, tmp_path / "straight")
    train(config, tmp_path / "run", seconds=0.0)
    assert train(config, tmp_path / "run", resume=True) == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """The folder of a run that gets Ctrl-C in its fifth update, within this process."""

    def interrupting(t, training):
        if t == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return lr_factor(t, training)

    with monkeypatch.context() as patch:
        patch.setattr("brx.methods.updater.lr_factor", interrupting)
        assert train(tiny_config(tmp_path), tmp_path / "run") == "interrupted"
    return tmp_path / "run"


def test_ctrl_c_saves_the_iteration_under_way(interrupted):
    assert [path.name for path in list_checkpoints(interrupted)] == ["00000005"]


def test_run_after_ctrl_c_resumes_exactly(interrupted, tmp_path):
    train(tiny_config(tmp_path), tmp_path / "straight")
    train(tiny_config(tmp_path), interrupted, resume=True)
    assert losses(interrupted) == losses(tmp_path / "straight")
