"""Ordinary steps on a GPU: the host waits for nothing, and a bad gradient changes nothing; tried
out on the CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from brx.optim import BasisRotation
from brx.optim.gradient_guard import LONGEST_WAIT, BadGradientError
from tests.optim.helpers import give_gradients, random, train

SHAPES = [(8, 8), (8, 8), (16, 8), (2, 4, 4), (8,), (12, 4)]


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS", ("cpu",))


def make(**options):
    series = [torch.nn.Parameter(random(*shape, seed=k)) for k, shape in enumerate(SHAPES)]
    groups = [{"params": series[:4]}, {"params": series[4:], "rotate": False}]
    return series, BasisRotation(
        groups, **{"lr": 0.01, "weight_decay": 0.1, "frequency": 20, **options}
    )


@pytest.mark.parametrize("covariance", ["refresh", "step"])
@pytest.mark.parametrize("place", [0, 3, 4])
def test_bad_gradient_in_an_ordinary_step_changes_nothing(place, covariance):
    (parameters, optimizer), (twins, undisturbed) = (
        make(covariance=covariance),
        make(covariance=covariance),
    )
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


def test_next_refresh_tells_and_training_can_go_on():
    parameters, optimizer = make()
    with pytest.raises(ValueError, match="2 of the last updates met gradients with NaN"):
        train_with_bad_gradients(parameters, optimizer, 1, {23: torch.nan, 26: torch.nan}, 50)
    num_updates = int(optimizer.state[parameters[0]]["step"])
    assert 26 - 2 <= num_updates < 49 - 2
    train(optimizer, parameters, 50, 55)
    assert int(optimizer.state[parameters[0]]["step"]) == num_updates + 5
    with pytest.raises(
        ValueError, match="parameter 2 of group 0"
    ):  # at a refresh it is named at once
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

    with pytest.raises(
        BadGradientError, match=r"parameter 0 of group 0 .*, as in \d+ steps before"
    ):
        train_on()
    give_gradients(parameters, 1)
    optimizer.step()
    assert int(optimizer.state[parameters[1]]["step"]) == 21


@pytest.mark.parametrize("covariance", ["refresh", "step"])
def test_ordinary_step_asks_the_device_for_no_number(covariance):
    # Fake tensors have no values: whoever asks for one gets an exception.
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters, optimizer = make(covariance=covariance)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS", ())
            with pytest.raises(DataDependentOutputException):  # a step that waits for the answer
                optimizer.step()
        for member in optimizer._layout.members.values():
            member.num_updates = 30
        optimizer.step()
