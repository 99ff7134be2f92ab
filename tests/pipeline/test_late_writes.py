"""Version t is what the weights are when the first pass of the next update begins: whatever writes
them after the optimizer's step is in it."""

import copy

import pytest
import torch

from brx import delayed
from tests.pipeline.loops import (
    Naive,
    assert_same,
    batch,
    flat,
    loss_of,
    make,
    plain_loss,
    sgd,
    simulate,
    train,
)


@torch.no_grad()
def clamp(model):
    for weight in model.parameters():
        weight.clamp_(-0.2, 0.2)


def clamp_data(model):
    for weight in model.parameters():
        weight.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def normalise(model):
    for layer in model:
        layer.lin.weight /= layer.lin.weight.norm(dim=1, keepdim=True)


def replace_data(model):
    """As some libraries restore weights: another memory for the same parameter."""
    for weight in model.parameters():
        weight.data = weight.data.clone() * 0.99


@pytest.mark.parametrize("after", [clamp, clamp_data, normalise, replace_data])
def test_writes_after_the_step_are_in_the_version(after):
    assert_same(train(after=after)[0], simulate(after=after))


def test_post_hook_of_a_step_counts():
    def hooked(parameters):
        optimizer = sgd(parameters)

        def shrink(*args):
            with torch.no_grad():
                for weight in optimizer.param_groups[0]["params"]:
                    weight *= 0.9

        optimizer.register_step_post_hook(shrink)
        return optimizer

    assert_same(train(optimizer_of=hooked)[0], simulate(hooked))


class Lookahead:
    """Every third step, go half of the way back; a wrapper that is no torch optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.steps = 0
        self.slow = [weight.detach().clone() for weight in self.weights]

    @property
    def weights(self):
        return self.optimizer.param_groups[0]["params"]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, weight in zip(self.slow, self.weights, strict=True):
                weight.lerp_(slow, 0.5)
                slow.copy_(weight)

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_lookahead_is_in_the_version():
    def wrapped(parameters):
        return Lookahead(sgd(parameters))

    assert_same(train(optimizer_of=wrapped)[0], simulate(wrapped))


def test_averaged_weights_swapped_in_for_evaluation():
    average = [weight.detach().clone() for weight in make().parameters()]

    @torch.no_grad()
    def evaluate(model):
        kept = [weight.detach().clone() for weight in model.parameters()]
        for weight, mean in zip(model.parameters(), average, strict=True):
            weight.copy_(mean)
        model.eval()
        model(batch(0))
        model.train()
        for weight, before in zip(model.parameters(), kept, strict=True):
            weight.copy_(before)

    found, pipeline = train(after=evaluate)
    assert_same(found, simulate())
    assert pipeline.updates == 12


def test_swap_between_micro_batches_makes_no_version():
    def loss(model, t):
        average_in_and_out(model)
        return plain_loss(model, t)

    @torch.no_grad()
    def average_in_and_out(model):
        for weight in getattr(model, "parameters", list)():
            kept = weight.clone()
            weight.zero_()
            weight.copy_(kept)

    assert train(loss=loss)[1].updates == 12


def test_write_to_frozen_weights_is_no_update():
    """As adapters are merged into a base for an evaluation, with rounding."""
    model = make()
    model[:2].requires_grad_(False)

    @torch.no_grad()
    def merge(model):
        for weight in model[:2].parameters():
            weight += 1e-3

    optimizer = sgd(model[2:].parameters())
    pipeline = delayed(model, optimizer, 4)
    for t in range(6):
        merge(model)
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pipeline.updates == 6


def test_going_back_to_a_checkpoint_is_an_update():
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)
    twin = make()
    naive, twin_optimizer = Naive(twin), sgd(twin.parameters())
    kept = copy.deepcopy(model.state_dict())
    for t in range(10):
        naive.begin_update()
        naive.backward(lambda call, t=t: plain_loss(call, t))
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
        if t == 5:  # after an update that went wrong
            model.load_state_dict(kept)
            twin.load_state_dict(kept)
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 10


def test_write_without_a_counter_is_kept():
    """`weight.data` between two micro-batches of one update: no counter sees it."""
    model = make()
    optimizer = sgd(model.parameters(), lr=0.0)
    delayed(model, optimizer, 4, accumulation=2)
    for t in range(6):
        for _ in range(2):
            for weight in model.parameters():
                weight.data += 1.0
            loss_of(model(batch(t))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), flat(make()) + 12.0)
