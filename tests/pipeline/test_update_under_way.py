"""The counts of micro-batches in an update, without a model."""

import pytest
import torch

from brx.errors import UserError
from brx.pipeline.update_under_way import UpdateUnderWay


def start(accumulation):
    """A parameter, and the update under way of a loop that trains it."""
    parameter = torch.zeros(2, requires_grad=True)
    return parameter, UpdateUnderWay([parameter], accumulation)


def micro_batch(parameter, update):
    """A forward and a backward pass. Returns the micro-batch's number within the update."""
    number = update.begin_window()
    parameter.sum().backward()
    update.end_backward(has_gradients=True)
    return number


def counts(update):
    return update.num_windows, update.num_backward, update.num_cleared


def test_the_example_at_the_top():
    parameter, update = start(accumulation=2)
    assert micro_batch(parameter, update) == 1
    assert counts(update) == (1, 1, 0)
    assert micro_batch(parameter, update) == 2
    assert counts(update) == (2, 2, 0)
    parameter.grad = None
    assert counts(update) == (2, 2, 0)
    assert update.begin_window() == 1
    assert counts(update) == (1, 0, 2)


def test_micro_batches_beyond_m_have_the_number_of_the_last():
    parameter, update = start(accumulation=2)
    assert [micro_batch(parameter, update) for _ in range(4)] == [1, 2, 2, 2]


def test_gradients_of_zeros_are_cleared_ones():
    parameter, update = start(accumulation=2)
    micro_batch(parameter, update)
    parameter.grad.zero_()
    assert update.begin_window() == 1


def test_clearing_after_the_forward_pass_is_too_late():
    parameter, update = start(accumulation=2)
    micro_batch(parameter, update)
    update.begin_window()
    parameter.grad = None
    with pytest.raises(UserError, match="call zero_grad"):
        update.restart_if_cleared()


def test_clearing_after_the_forward_pass_is_in_time_with_one_micro_batch():
    parameter, update = start(accumulation=1)
    micro_batch(parameter, update)
    update.begin_window()
    parameter.grad = None
    update.restart_if_cleared()
    assert update.num_backward == 0


def test_gradients_that_were_never_at_the_parameters_are_not_cleared():
    _, update = start(accumulation=3)
    update.begin_window()
    update.end_backward(has_gradients=False)
    assert update.begin_window() == 2
