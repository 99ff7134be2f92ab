"""What the first updates show of a loop is told once, or refused."""

import math
import warnings

import pytest
import torch
from torch import nn

from brx import delayed
from brx.errors import UserError
from tests.pipeline import loops
from tests.pipeline.loops import STASHES, batch, loss_of, make, plain_loss, sgd, train


def test_ordinary_loop_is_told_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(updates=6)


class PrepareState(torch.optim.SGD):
    """Makes state before its first step, of the kinds that optimizers make."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.state["updates"] = 0
        for number, weight in enumerate(self.param_groups[0]["params"], start=1):
            self.state[weight] = {
                "seed": number,
                "mask": torch.ones_like(weight, dtype=torch.bool),
                "start": weight.detach().clone(),
                "sum": torch.zeros_like(weight),
            }


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, initial_accumulator_value=0.1)


def nothing_yet(parameters):
    optimizer = sgd(parameters)
    for weight in optimizer.param_groups[0]["params"]:
        assert not optimizer.state[weight]  # asking makes an entry
    return optimizer


PREPARED = [PrepareState, adagrad, nothing_yet]


@pytest.mark.parametrize("optimizer_of", PREPARED)
def test_state_before_the_first_step_is_no_resume(optimizer_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer_of=optimizer_of)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("optimizer_of", [PrepareState, adagrad, momentum, torch.optim.Adam])
def test_optimizer_resumed_without_the_pipeline_is_told(optimizer_of):
    model = make()
    optimizer = optimizer_of(model.parameters())
    plain_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    delayed(model, optimizer, 4)
    with pytest.warns(UserWarning, match="the optimizer has made steps already, but the pipeline"):
        plain_loss(model, 1).backward()


def two_passes(model, t):
    """A backward pass of its own before the loss's."""
    plain_loss(model, 50 + t).backward()
    return plain_loss(model, t)


def test_more_passes_than_stated_are_told_once():
    with pytest.warns(UserWarning, match="took 2 backward passes, .* set accumulation=2") as told:
        train(loss=two_passes, updates=6)
    assert len(told) == 1


def test_fewer_passes_than_stated_are_told_once():
    with pytest.warns(UserWarning, match="at most 1 backward pass each, .* is 4") as told:
        train(updates=6, accumulation=4)
    assert len(told) == 1


def test_gradients_collected_elsewhere_are_told():
    """A loop that adds up the gradients of its micro-batches by itself."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4, accumulation=2)

    def update(t):
        sums = [torch.zeros_like(weight) for weight in model.parameters()]
        for j in range(2):
            plain_loss(model, 2 * t + j).backward()
            for total, weight in zip(sums, model.parameters(), strict=True):
                total += weight.grad
                weight.grad = None
        for total, weight in zip(sums, model.parameters(), strict=True):
            weight.grad = total
        optimizer.step()
        optimizer.zero_grad()

    def updates():
        for t in range(5):
            update(t)

    with pytest.warns(UserWarning, match="gradients were cleared between the micro-batc") as told:
        updates()
    assert len(told) == 1


def test_more_passes_later_are_told():
    def loss(model, t):
        return two_passes(model, t) if t == 8 else plain_loss(model, t)

    with pytest.warns(UserWarning, match="took 2 backward passes"):
        train(loss=loss)


def test_weights_that_change_without_a_step_are_told():
    model = make()
    delayed(model, sgd(model.parameters()), 4)

    def by_hand():
        for t in range(5):
            plain_loss(model, t).backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.1 * weight.grad
                    weight.grad = None

    with pytest.warns(UserWarning, match="changed without a step of the optimizer") as told:
        by_hand()
    assert len(told) == 1


def test_unused_parameters_are_told():
    class WithSpare(nn.Sequential):
        def __init__(self):
            super().__init__(*make())
            self.spare = nn.Linear(2, 2).double()

        def forward(self, x):
            for index in range(4):
                x = self[index](x)
            return x

    with pytest.warns(UserWarning, match="spare.weight and 1 more are given to the optimizer but"):
        train(WithSpare())


def with_second_optimizer():
    """A loop whose second optimizer trains the last layer, and is not given to `delayed`."""
    model = make()
    first, second = sgd(model[:3].parameters()), sgd(model[3].parameters())
    delayed(model, first, {str(k): k for k in range(4)})
    for t in range(5):
        plain_loss(model, t).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def test_optimizer_that_was_not_given_is_told():
    with pytest.warns(UserWarning, match=r"3.lin.weight and 1 more are trained by an opt") as told:
        with_second_optimizer()
    assert len(told) == 1


def test_frozen_weights_that_the_loop_writes_are_told_nothing():
    model = make()
    model[3].requires_grad_(False)
    optimizer = sgd(model[:3].parameters())
    delayed(model, optimizer, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(5):
            plain_loss(model, t).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[3].lin.weight.mul_(0.9)


def test_gradient_from_outside_of_a_window_is_refused():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    loss_of(model[3](model[2](batch(0)))).backward()
    with pytest.raises(UserError, match=r"a gradient reached 2.lin.bias by a pass outside"):
        model(batch(0))


def test_later_gradient_from_outside_is_refused():
    """A penalty on a part of the model that begins after a while."""

    def loss(call, t):
        if t == 8:
            loss_of(call[3](call[2](batch(0)))).backward()
        return plain_loss(call, t)

    with pytest.raises(UserError, match=r"a gradient reached 2.lin.bias by a pass outside"):
        train(loss=loss)


def test_gradient_from_outside_of_an_unfrozen_layer_is_refused():
    """It was frozen when the pipeline was made."""
    model = make()
    model[2].requires_grad_(False)
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    assert not model[2].lin.weight.requires_grad
    model[2].requires_grad_(True)
    loss_of(model[2](batch(0))).backward()
    with pytest.raises(UserError, match=r"a gradient reached 2.lin.bias by a pass outside"):
        model(batch(0))


def test_cleared_gradient_from_outside_is_allowed():
    """An attack in eval mode, before the pass that trains."""

    def loss(call, t):
        x = batch(t)
        if isinstance(call, nn.Module):
            x.requires_grad_()
            loss_of(call.eval()(x)).backward()
            call.train().zero_grad()
        return loss_of(call(x.detach()))

    train(loss=loss)


def test_training_in_eval_mode_is_refused():
    model = make().eval()
    with pytest.raises(UserError, match="in training mode"):
        train(model)


def of_parts(model):
    """A pass that never calls the model as a whole."""
    x = batch(0)
    for layer in model:
        x = layer(x)
    return loss_of(x)


def in_eval_mode(model):
    return loss_of(model.eval()(batch(0)))


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


@pytest.mark.parametrize("optimizer_of", [sgd, lbfgs])
@pytest.mark.parametrize("loss", [of_parts, in_eval_mode])
def test_passes_of_a_closure_outside_of_a_window_are_refused(loss, optimizer_of):
    """Networks for differential equations often train so."""
    model = make()
    optimizer = optimizer_of(model.parameters())
    delayed(model, optimizer, 4)

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    with pytest.raises(UserError, match=r"a gradient reached .* by a pass outside"):
        optimizer.step(closure)


def test_assigned_gradients_of_a_closure_without_a_window_are_refused():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)

    def closure():
        value = of_parts(model)
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(value, weights), strict=True):
            weight.grad = gradient
        return value

    with pytest.raises(UserError, match="without a training forward pass of the delayed model"):
        optimizer.step(closure)


def test_steps_by_hand_with_passes_outside_of_a_window_are_refused():
    """No step of an optimizer, and no call of the model, ever comes."""
    model = make()
    delayed(model, sgd(model.parameters()), 4)

    def update():
        of_parts(model).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.3 * weight.grad
        model.zero_grad()

    update()
    with pytest.raises(UserError, match=r"a gradient reached .* by a pass outside"):
        update()


def test_unknown_order_of_use_is_told():
    """Gradients that are computed apart from the model, and assigned."""
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)

    def update():
        with pipeline.micro_batch():
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            x = torch.vmap(lambda row: torch.func.functional_call(model, weights, (row,)))(batch(0))
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, x.mean().item())
        optimizer.step()

    update()
    with pytest.warns(UserWarning, match="follows the order of their definition; give example="):
        update()


def test_warning_names_the_line_of_the_loop():
    with pytest.warns(UserWarning, match="set accumulation=2") as told:
        train(loss=two_passes, updates=6)
    assert told[0].filename == loops.__file__


def test_print_shows_what_was_met():
    assert "met: 1 backward pass per update; tau is up to 3 updates" in str(train(updates=6)[1])


class Renormalised(nn.Module):
    """An embedding that writes its weights in the forward pass, through autograd or around it."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(10, 4, max_norm=0.5 if how == "max_norm" else None)
        self.rest, self.how = make(), how

    def forward(self, i):
        if self.how == "data":
            self.embed.weight.data *= 0.9
        return self.rest(self.embed(i))


@pytest.mark.parametrize("stash", STASHES)
@pytest.mark.parametrize("how", ["max_norm", "data"])
def test_weights_written_in_the_forward_pass_are_refused(how, stash):
    model = Renormalised(how).double()
    rows = torch.arange(4)

    def loss(model, t):
        return loss_of(model(rows + t % 6))

    with pytest.raises(UserError, match=r"embed.weight is written during a training forward pass"):
        train(model, loss=loss, stages={"embed": 0, "rest": 3}, stash=stash)


@pytest.mark.parametrize("how", ["max_norm", "data"])
def test_weights_written_in_the_first_forward_pass_are_refused(how):
    """All versions are the initial weights, which have just been overwritten."""
    model = Renormalised(how).double()

    def loss(model, t):
        return loss_of(model(torch.arange(4)))

    with pytest.raises(UserError, match=r"embed.weight is written during a training forward pass"):
        train(model, loss=loss, stages={"embed": 0, "rest": 3}, updates=1)


class Momentum(nn.Module):
    """A network, and a frozen average of it that its forward pass writes (MoCo)."""

    def __init__(self):
        super().__init__()
        self.query, self.key = make(), make().requires_grad_(False)

    def forward(self, x):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = 0.9 * key.data + 0.1 * query.data
        return self.query(x) + self.key(x)


def stage_in_momentum(name):
    return int(name.split(".")[1])


def test_frozen_weights_written_in_the_forward_pass_say_what_helps():
    with pytest.raises(UserError, match="leave frozen parameters that the model writes out of"):
        train(Momentum(), stages=stage_in_momentum)


def test_frozen_weights_that_the_optimizer_has_not_may_be_written():
    model = Momentum()
    train(model, lambda _: sgd(model.query.parameters()), stages=stage_in_momentum)


def test_weights_written_in_the_explicit_form_are_refused():
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)
    for t in range(2):
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()

    def write():
        with pipeline.micro_batch(), torch.no_grad():
            model[0].lin.weight.mul_(2.0)

    with pytest.raises(UserError, match=r"0.lin.weight is written during a training forward pass"):
        write()


@pytest.mark.parametrize("bad", [0, 1, 5])
@pytest.mark.parametrize("settings", [{}, {"stash": "predict"}, {"forecast": "last-update"}])
def test_diverged_loop_is_told_nothing(bad, settings):
    """Weights of NaN are no others than they were."""
    losses = []

    def loss(model, t):
        value = plain_loss(model, t) * (torch.inf if t == bad else 1.0)
        losses.append(value.item())
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, pipeline = train(loss=loss, updates=10, **settings)
    assert math.isnan(losses[-1])
    assert pipeline.updates == 10


def test_skipped_steps_at_weights_of_nan_make_no_version():
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)
    with torch.no_grad():
        model[1].lin.weight[0] = torch.nan
    for t in range(6):
        plain_loss(model, t).backward()
        if t % 2:
            optimizer.step()
        optimizer.zero_grad()
    plain_loss(model, 6)
    assert pipeline.updates == 3


def test_writes_next_to_nan_are_seen():
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)

    def write():
        with pipeline.micro_batch(), torch.no_grad():
            model[0].lin.weight[1] += 1.0

    with torch.no_grad():
        model[0].lin.weight[0] = torch.nan
    plain_loss(model, 0).backward()
    optimizer.step()
    plain_loss(model, 1).backward()
    with pytest.raises(UserError, match=r"0.lin.weight is written during a training forward pass"):
        write()


def test_undelayed_stage_may_write_in_its_pass():
    model = Renormalised("max_norm").double()

    def loss(model, t):
        return loss_of(model(torch.arange(4) + t % 6))

    train(model, loss=loss, stages={"embed": 0, "rest": 0}, delay=[0])
    assert model.embed.weight[:9].norm(dim=1).max() < 0.6
