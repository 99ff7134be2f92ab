"""Ordinary steps on a GPU: the host waits for nothing, and a bad gradient changes nothing; tried
out on the CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brx.optim import BasisRotation
from brx.optim.elementwise import Kernels, compiled_kernels
from brx.optim.gradient_guard import LONGEST_WAIT, BadGradientError
from tests.optim.helpers import give_gradients, random, train

SHAPES = [(8, 8), (8, 8), (16, 8), (2, 4, 4), (8,), (12, 4)]


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ("cpu",))


def make(**options):
    series = [torch.nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(SHAPES)]
    groups = [{"params": series[:4]}, {"params": series[4:], "rotate": False}]
    options = {"lr": 0.01, "weight_decay": 0.1, "frequency": 20, **options}
    return series, BasisRotation(groups, **options)


@pytest.mark.parametrize("covariance", ["refresh", "step"])
@pytest.mark.parametrize("place", [0, 3, 4])
def test_bad_gradient_in_an_ordinary_step_changes_nothing(place, covariance):
    parameters, optimizer = make(covariance=covariance)
    twins, undisturbed = make(covariance=covariance)
    for time in range(1, 31):
        give_gradients(parameters, time)
        if time in (23, 26):
            parameters[place].grad.view(-1)[1] = float("nan") if time == 23 else float("inf")
        else:
            give_gradients(twins, time)
            undisturbed.step()
        optimizer.step()
    for parameter, twin in zip(parameters, twins, strict=True):
        assert torch.equal(parameter, twin)
        for name, value in undisturbed.state[twin].items():
            assert torch.equal(optimizer.state[parameter][name], value), name


def train_with_bad_gradients(parameters, optimizer, place, bad_at, last):
    for time in range(1, last):
        give_gradients(parameters, time)
        if time in bad_at:
            parameters[place].grad.view(-1)[1] = bad_at[time]
        optimizer.step()


def test_training_goes_on_after_bad_gradients():
    parameters, optimizer = make()
    with pytest.raises(ValueError, match="2 of the last updates met gradients with NaN"):
        train_with_bad_gradients(parameters, optimizer, 1, {23: torch.nan, 26: torch.nan}, 50)
    num_updates = int(optimizer.state[parameters[0]]["step"])
    assert 26 - 2 <= num_updates < 49 - 2  # told at the refresh at the latest
    train(optimizer, parameters, 50, 55)
    assert int(optimizer.state[parameters[0]]["step"]) == num_updates + 5


def test_refresh_names_its_bad_gradient_at_once():
    with pytest.raises(ValueError, match="parameter 2 of group 0"):
        train_with_bad_gradients(*make(), 2, {20: torch.nan}, 21)


@pytest.mark.parametrize("options", [{"frequency": None}, {"rotate": False}], ids=str)
def test_bad_gradients_are_told_of_without_any_refresh(options):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in [(4, 4), (4, 3)]]
    optimizer = BasisRotation(parameters, **options)
    train(optimizer, parameters, 1, 21)
    parameters[0].grad[0, 0] = float("nan")

    def train_on():
        for _ in range(LONGEST_WAIT + 1):
            optimizer.step()

    told = r"parameter 0 of group 0 .*, as in \d+ steps before"
    with pytest.raises(BadGradientError, match=told):
        train_on()
    give_gradients(parameters, 1)
    optimizer.step()
    assert int(optimizer.state[parameters[1]]["step"]) == 21


def test_run_without_waiting_does_not_tell_of_a_bad_gradient(monkeypatch):
    monkeypatch.setattr("brx.optim.gradient_guard.LONGEST_WAIT", 0)  # other steps would wait now
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = BasisRotation([parameter], frequency=2)
    train(optimizer, [parameter], 1, 4)
    before = parameter.detach().clone()
    parameter.grad[0, 0] = float("nan")
    with torch.no_grad(), optimizer.planned_step() as plan:
        assert plan.is_refresh
        optimizer.run(plan, without_waiting=True)
    assert torch.equal(parameter, before)


def test_single_bad_step_before_is_no_plural():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = BasisRotation([parameter], frequency=2)
    train(optimizer, [parameter], 1, 5)  # the refreshes 2 and 4 wait for the device, and so will 6
    parameter.grad[0, 0] = float("nan")
    optimizer.step()
    with pytest.raises(BadGradientError, match=r"no parameter was updated, as in 1 step before$"):
        optimizer.step()


@pytest.mark.parametrize("covariance", ["refresh", "step"])
def test_ordinary_step_asks_the_device_for_no_number(covariance):
    # Fake tensors have no values: code that asks for one gets an exception.
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters, optimizer = make(covariance=covariance)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ())
            with pytest.raises(DataDependentOutputException):  # a step that waits for the answer
                optimizer.step()
        for member in optimizer._layout.members.values():
            member.num_updates = 30
        optimizer.step()


class Asked(Exception):
    """An operation that makes the host wait for a GPU."""


class NoWaiting(TorchDispatchMode):
    """Refuses what makes the host wait, and counts what would be launched on a GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal")

    def __init__(self):
        super().__init__()
        self.num_launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        if name in self.WAITS:
            raise Asked(name)
        self.num_launches += not function.is_view
        return function(*args, **(kwargs or {}))


def launches(optimizer):
    with NoWaiting() as mode:
        optimizer.step()
    return mode.num_launches


def ready_for_an_ordinary_step():
    parameters, optimizer = make()
    train(optimizer, parameters, 1, 22)
    give_gradients(parameters, 22)
    return optimizer


def test_ordinary_step_runs_without_waiting():
    # Three batches of matrices; each costs some 65 operations, 45 of them of the noise floor.
    assert 0 < launches(ready_for_an_ordinary_step()) <= 225


def test_compiled_step_launches_few(monkeypatch):
    # Each compiled function counts as one.
    def rotated_update(gradient, *others):
        return torch.zeros_like(gradient)

    kernels = Kernels(rotated_update, lambda *arguments: None)
    monkeypatch.setattr(BasisRotation, "_kernels", lambda self, batch: kernels)
    assert launches(ready_for_an_ordinary_step()) <= 75


def test_waiting_is_seen(monkeypatch):
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ())
    optimizer = ready_for_an_ordinary_step()
    with pytest.raises(Asked, match="_local_scalar_dense"):
        launches(optimizer)


def test_numbers_on_the_device_take_the_same_step(monkeypatch):
    # As on a GPU: learning rate, decay and limit are read from tensors of one address.
    expected, optimizer = make(weight_decay=0.1)
    train(optimizer, expected, 1, 31)
    monkeypatch.setattr("brx.optim.step_scalars.ON_DEVICE", ("cpu",))
    series, optimizer = make(weight_decay=0.1)
    train(optimizer, series, 1, 11)
    addresses = {id(kept.lr) for kept in optimizer._scalars._kept}
    train(optimizer, series, 11, 31)
    assert {id(kept.lr) for kept in optimizer._scalars._kept} == addresses
    torch.testing.assert_close(series, expected, rtol=0, atol=1e-6)


def test_shapes_share_their_compiled_functions(monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr("brx.optim.step_scalars.ON_DEVICE", ("cpu",))
    kernels = compiled_kernels(backend="eager")
    monkeypatch.setattr(BasisRotation, "_kernels", lambda self, batch: kernels)
    shapes = [(rows, columns) for rows in (4, 6, 8) for columns in (4, 5, 7, 9)]
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes for _ in range(2)]
    optimizer = BasisRotation(parameters, lr=0.01)
    for step in (1, 2):
        give_gradients(parameters, step)
        optimizer.step()
    # Of each function one for the first shape, and one with sizes left open.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6
