"""A step that is skipped makes no version: the rest is the loop without it, and the pass is not
counted."""

import pytest
import torch
from torch import nn

from brx import delayed
from brx.errors import UserError
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
)


@pytest.mark.parametrize("skips", [{0}, {5}, {0, 1, 6, 7}])
@pytest.mark.parametrize("to_none", [True, False])
def test_skipped_step_makes_no_version(skips, to_none):
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)
    for t in range(12):
        loss = plain_loss(model, t)
        optimizer.zero_grad(to_none)  # between the passes, as many loops have it
        loss.backward()
        if t not in skips:
            optimizer.step()
    assert_same(flat(model), simulate(skips=skips))
    assert pipeline.updates == 12 - len(skips)


@pytest.mark.parametrize(
    ("skips", "settings"),
    [({1}, {}), ({1, 4, 5}, {"stash": "none"}), ({2, 6}, {"stash": "predict"})],
)
def test_grad_scaler_that_skips(skips, settings):
    def run(with_skips):
        model = make()
        optimizer = sgd(model.parameters())
        delayed(model, optimizer, 4, **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**6)
        for t in range(9):
            bad_first = [True, False] if with_skips and t in skips else [False]
            for is_bad in bad_first:
                plain_loss(model, t).backward()
                if is_bad:
                    model[0].lin.bias.grad.fill_(torch.inf)
                scaler.scale(torch.zeros(1))  # makes the scale
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update(1.0)
                optimizer.zero_grad()
        return flat(model)

    assert torch.equal(run(True), run(False))


def test_fused_optimizer_that_skips_by_itself():
    def run(skips):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        pipeline = delayed(model, optimizer, 4)
        for t in range(9):
            for is_bad in [True, False] if t in skips else [False]:
                plain_loss(model, t).backward()
                optimizer.found_inf = torch.tensor(float(is_bad))
                optimizer.grad_scale = torch.tensor(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return flat(model), pipeline.updates

    (found, updates), (expected, _) = run({2, 3}), run(set())
    assert torch.equal(found, expected)
    assert updates == 9


@pytest.mark.parametrize("to_none", [True, False])
def test_skipped_step_of_two_micro_batches(to_none):
    def run(skips):
        model = make()
        optimizer = sgd(model.parameters())
        delayed(model, optimizer, 4, accumulation=2)
        for t in range(8):
            for is_bad in [True, False] if t in skips else [False]:
                for j in (1, 2):
                    plain_loss(model, 2 * t + j).backward()
                if not is_bad:
                    optimizer.step()
                optimizer.zero_grad(to_none)
        return flat(model)

    assert torch.equal(run({0, 4, 5}), run(set()))


class Hidden(nn.Sequential):
    """Its output shows no backward pass."""

    def forward(self, x):
        return iter([super().forward(x)])


@pytest.mark.parametrize("kind", [nn.Sequential, Hidden])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("scale", [False, True])
def test_dropped_beginning_of_an_accumulation(kind, to_none, scale):
    """The rest of an epoch is no whole accumulation, and its gradients are cleared."""

    def run(dropped):
        model = kind(*make())
        optimizer = sgd(model.parameters())
        pipeline = delayed(model, optimizer, 4, accumulation=3)

        def micro_batch(n):
            out = model(batch(n))
            loss_of(next(out) if kind is Hidden else out).backward()
            if scale:  # written gradients that are not cleared go on counting
                for weight in model.parameters():
                    weight.grad *= 0.5

        for t in range(8):
            for n in range(dropped if t % 2 else 0):
                micro_batch(60 + n)
            optimizer.zero_grad(to_none)
            for j in range(3):
                micro_batch(3 * t + j)
            optimizer.step()
            optimizer.zero_grad(to_none)
        assert pipeline.updates == 8
        return flat(model)

    expected = run(0)
    assert torch.equal(run(1), expected)
    assert torch.equal(run(2), expected)


def test_loss_that_is_not_finite_is_skipped():
    """The backward pass is left out: the next pass takes its place."""
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4, accumulation=2)
    twin = make()
    twin_optimizer, naive = sgd(twin.parameters()), Naive(twin, accumulation=2)
    for t in range(8):
        naive.begin_update()
        plain_loss(model, 90 + t)  # not finite, say
        for j in (1, 2):
            plain_loss(model, 2 * t + j).backward()
            naive.backward(lambda call, n=2 * t + j: plain_loss(call, n), j)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 8


@pytest.mark.filterwarnings("ignore:delayed. an update took 2")
@pytest.mark.parametrize("to_none", [True, False])
def test_sparse_gradients_of_two_passes(to_none):
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make()
            self.table = nn.Embedding(10, 4, sparse=True)

        def forward(self, rows):
            return self.layers(self.table(rows))

    def stage_of(name):
        return 0 if name.startswith("table") else int(name.split(".")[1])

    model, twin = WithTable().double(), WithTable().double()
    twin.load_state_dict(model.state_dict())
    optimizer, twin_optimizer = sgd(model.parameters()), sgd(twin.parameters())
    delayed(model, optimizer, stage_of)
    naive = Naive(twin, stage_of=stage_of)
    for t in range(8):
        rows = torch.arange(4) + t % 6
        naive.begin_update()
        used = naive.used()
        loss = loss_of(torch.func.functional_call(twin, used, (rows,)))
        gradients = torch.autograd.grad(loss, list(used.values()))
        for weight, gradient in zip(twin.parameters(), gradients, strict=True):
            weight.grad = 2 * gradient
        for _ in range(2):
            loss_of(model(rows)).backward()
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad(to_none)
    assert_same(flat(model), flat(twin))


def test_gradients_cleared_too_late_are_refused():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4, accumulation=2)
    for t in range(2):
        plain_loss(model, t).backward()
    loss = plain_loss(model, 0)  # the step was skipped, and the two come again
    optimizer.zero_grad()
    with pytest.raises(UserError, match=r"call zero_grad.. before the forward pass"):
        loss.backward()


def test_step_with_rate_zero_is_an_update():
    """As in the first step of a warm-up."""

    def warmed_up(parameters):
        optimizer = sgd(parameters)
        optimizer.param_groups[0]["lr"] = 0.0
        return optimizer

    model, twin = make(), make()
    optimizer, twin_optimizer = warmed_up(model.parameters()), warmed_up(twin.parameters())
    pipeline, naive = delayed(model, optimizer, 4), Naive(twin)
    for t in range(10):
        plain_loss(model, t).backward()
        naive.begin_update()
        naive.backward(lambda call, t=t: plain_loss(call, t))
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
            each.param_groups[0]["lr"] = 0.3 * (t % 3)  # zero again and again
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 10


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("is_between", [True, False])
@pytest.mark.filterwarnings("ignore:delayed. an update took 2 backward")
def test_gan_whose_other_step_leaves_gradients(to_none, is_between):
    critic, generator = make(), make()
    optimizer, other = sgd(critic.parameters(), 0.1), sgd(generator.parameters(), 0.1)
    pipeline = delayed(critic, optimizer, 4)
    twin, twin_generator = make(), make()
    twin_optimizer, twin_other = sgd(twin.parameters(), 0.1), sgd(twin_generator.parameters(), 0.1)
    naive = Naive(twin)

    def loss(critic, fake, t):
        return loss_of(critic(batch(t))) + critic(fake.detach()).square().mean()

    for t in range(8):
        if not is_between:
            optimizer.zero_grad(to_none)
        fake = generator(batch(50 + t))
        value = loss(critic, fake, t)
        if is_between:
            optimizer.zero_grad(to_none)
        value.backward()
        optimizer.step()
        other.zero_grad()
        loss_of(critic(fake)).backward()
        other.step()

        naive_fake = twin_generator(batch(50 + t))
        if not t:
            naive.begin_update()
        twin_optimizer.zero_grad()
        naive.backward(lambda call, t=t, x=naive_fake: loss(call, x, t))
        twin_optimizer.step()
        naive.begin_update()  # the generator's pass through the critic is the first of the next
        twin_other.zero_grad()
        call = torch.func.functional_call
        loss_of(call(twin, naive.used(), (naive_fake,))).backward()
        twin_other.step()
    assert_same(flat(critic), flat(twin))
    assert_same(flat(generator), flat(twin_generator))
    assert pipeline.updates == 8


def test_frozen_critic_in_the_step_of_the_generator():
    critic, generator = make(), make()
    optimizer, other = sgd(critic.parameters(), 0.1), sgd(generator.parameters(), 0.1)
    pipeline = delayed(critic, optimizer, 4)
    for t in range(6):
        critic.requires_grad_(False)
        fake, real = generator(batch(50 + t)), critic(batch(t)).detach()
        loss_of(critic(fake) - real.mean()).backward()
        other.step()
        other.zero_grad()
        critic.requires_grad_(True)
        optimizer.zero_grad()
        (loss_of(critic(batch(t))) + critic(fake.detach()).square().mean()).backward()
        optimizer.step()
    assert pipeline.updates == 6
