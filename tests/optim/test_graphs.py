"""Steps that are recorded and replayed, tried out on the CPU: a recording is the device's part of a
step, run again with what it held when it was recorded."""

from contextlib import contextmanager

import pytest
import torch

from brx.optim import BasisRotation
from brx.optim.gradient_guard import LONGEST_WAIT, BadGradientError
from brx.optim.graphs import CudaGraphMaker, GraphedSteps, MovingGradientsError
from tests.optim.helpers import random

SHAPES = [(8, 8), (8, 8), (16, 8), (2, 4, 4), (8,)]


class Recording:
    def __init__(self, work, optimizer):
        self._work = work
        self._guard = optimizer._guard
        self.num_replays = 0

    def replay(self):
        on_the_host = self._guard._num_unread
        self._work()
        self._guard._num_unread = on_the_host  # a graph's replay runs no code of the host
        self.num_replays += 1


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ("cpu",))
    monkeypatch.setattr("brx.optim.step_scalars.ON_DEVICE", ("cpu",))


@pytest.fixture
def recordings():
    return []


def make(recordings, **options):
    series = [torch.nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(SHAPES)]
    groups = [{"params": series[:4]}, {"params": series[4:], "rotate": False}]
    optimizer = BasisRotation(groups, **{"lr": 0.01, "weight_decay": 0.1, **options})
    for parameter in series:
        parameter.grad = torch.zeros_like(parameter)

    def record(work):
        recordings.append(Recording(work, optimizer))
        return recordings[-1]

    return series, optimizer, GraphedSteps(optimizer, record, "cpu")


def give(series, time):
    for k, parameter in enumerate(series):
        parameter.grad.copy_(random(*parameter.shape, seed=100 * time + k))


def run(step, optimizer, series, times):
    for time in times:
        give(series, time)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / time  # of every step another
        step()


@pytest.mark.parametrize(
    "options",
    [
        {"frequency": 5},
        {"frequency": 5, "source": "1st"},
        {"frequency": 5, "covariance": "interval"},
        {"frequency": None, "maximize": True},
    ],
    ids=str,
)
def test_replayed_steps_are_those_of_the_optimizer(options, recordings):
    series, optimizer, graphed = make(recordings, **options)
    twins, eager, _ = make([], **options)
    run(graphed.step, optimizer, series, range(1, 32))
    run(eager.step, eager, twins, range(1, 32))
    assert sum(recording.num_replays for recording in recordings) >= 20
    # A refresh that looks at no gradient takes the covariances' decay in two roundings.
    torch.testing.assert_close(series, twins, rtol=0, atol=1e-5)
    for parameter, twin in zip(series, twins, strict=True):
        state, expected = optimizer.state[parameter], eager.state[twin]
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def test_only_two_kinds_of_steps_are_recorded(recordings):
    series, optimizer, graphed = make(recordings, frequency=5)
    run(graphed.step, optimizer, series, range(1, 32))
    assert len(recordings) == 2


@pytest.mark.parametrize("bad_at", [17, 20])  # an ordinary step, a refresh
def test_bad_gradient_in_a_replayed_step_changes_nothing(bad_at, recordings):
    series, optimizer, graphed = make(recordings, frequency=5)
    run(graphed.step, optimizer, series, range(1, bad_at))
    before = [p.detach().clone() for p in series]
    states = {p: {n: v.clone() for n, v in s.items()} for p, s in optimizer.state.items()}
    give(series, bad_at)
    series[1].grad[0, 0] = torch.nan
    graphed.step()
    assert all(map(torch.equal, series, before))
    for parameter, state in states.items():
        for name, value in state.items():
            assert torch.equal(optimizer.state[parameter][name], value), name


def test_bad_gradients_are_told_of_at_last(recordings):
    series, optimizer, graphed = make(recordings, frequency=5)
    run(graphed.step, optimizer, series, range(1, 20))
    series[1].grad[0, 0] = torch.nan

    def train_on():
        for _ in range(LONGEST_WAIT + 1):
            graphed.step()

    with pytest.raises(BadGradientError, match="of the last updates met gradients with NaN"):
        train_on()


def test_gradients_that_move_are_refused(recordings, monkeypatch):
    monkeypatch.setattr("brx.optim.graphs.MAX_SIGNATURES", 5)
    series, _, graphed = make(recordings)
    kept = []

    def train_on():
        for _ in range(20):
            for parameter in series:
                parameter.grad = torch.ones_like(parameter)
                kept.append(parameter.grad)  # so that no address comes back
            graphed.step()

    with pytest.raises(MovingGradientsError, match="no two alike"):
        train_on()


def test_parameters_elsewhere_are_refused():
    with pytest.raises(ValueError, match="one CUDA device; parameters are on cpu"):
        GraphedSteps(BasisRotation([torch.nn.Parameter(torch.ones(2, 2))]))


def test_parameters_on_two_devices_are_refused():
    series = [torch.nn.Parameter(torch.ones(2, 2, device=name)) for name in ("cpu", "meta")]
    with pytest.raises(ValueError, match="parameters are on cpu, meta"):
        GraphedSteps(BasisRotation(series), device_type="cpu")


def test_no_parameters_are_refused():
    optimizer = BasisRotation([torch.nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="no parameters, so there is no step to record"):
        GraphedSteps(optimizer)


def test_graphs_are_recorded_on_a_stream_of_their_device(monkeypatch):
    """Not of the current device, whose stream would record nothing."""
    device = torch.device("cuda", 1)
    seen = []

    @contextmanager
    def graph(recorded, *, pool, stream, capture_error_mode):
        seen.append(("graph", stream))
        yield

    @contextmanager
    def current(chosen):
        seen.append(("device", chosen))
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: f"a stream of {place}")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", current)
    CudaGraphMaker(device)(lambda: seen.append("work"))
    assert seen == [("device", device), ("graph", "a stream of cuda:1"), "work"]
