"""Passes that do not follow each other in the ordinary way: nested, discarded, several before one
backward pass, backward passes of backward passes, steps in the middle of one."""

import contextlib
import copy
import warnings
from threading import Thread, current_thread, main_thread

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brx import delayed
from brx.errors import UserError
from tests.pipeline.loops import (
    STASHES,
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


def started(model=None, **settings):
    model = make() if model is None else model
    optimizer = sgd(model.parameters())
    return model, optimizer, delayed(model, optimizer, 4, **settings)


def updates_of(model, optimizer, first, last):
    for t in range(first, last):
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()


# Several forward passes


class SelfConditioned(nn.Sequential):
    """A first guess without gradients, by calling itself, goes into the real pass."""

    def forward(self, x, is_first=True):
        if is_first:
            with torch.no_grad():
                x = x + 0.1 * self(x, False)
        return super().forward(x)


def guess_first(call, t):
    """The same, written out for the naive simulation."""
    with torch.no_grad():
        guess = call(batch(t))
    return loss_of(call(batch(t) + 0.1 * guess.detach()))


def test_nested_call_sees_the_same_version():
    assert_same(train(SelfConditioned(*make()))[0], simulate(loss=guess_first))


def two_views(call, t):
    return (call(batch(t)) - call(batch(50 + t))).square().mean()


def test_two_views_are_one_micro_batch():
    assert_same(train(loss=two_views)[0], simulate(loss=two_views))


def test_three_views_with_one_discarded():
    def loss(call, t):
        call(batch(99))  # nobody uses it
        return two_views(call, t)

    assert_same(train(loss=loss)[0], simulate(loss=two_views))


def evaluated_in_between(model, t):
    loss = plain_loss(model, t)
    if isinstance(model, nn.Module):
        model.eval()
        with torch.inference_mode():
            model(batch(t))
        model.train()
        with torch.no_grad():
            model(batch(t))
    return loss


def test_evaluation_between_the_passes():
    assert_same(train(loss=evaluated_in_between)[0], simulate())


def test_evaluation_in_a_window_sees_the_newest():
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 6)
    plain = make()
    plain.load_state_dict(model.state_dict())
    loss = plain_loss(model, 6)
    with torch.no_grad():
        found = model(batch(7))
    assert torch.equal(found, plain(batch(7)))
    assert loss.item() != plain_loss(plain, 6).item()


@pytest.mark.parametrize("stash", STASHES)
def test_evaluation_in_the_backward_pass_changes_nothing(stash):
    def run(evaluate):
        model, optimizer, _ = started(stash=stash)
        model[2].lin.weight.register_hook(lambda gradient: evaluate(model))
        updates_of(model, optimizer, 0, 8)
        return flat(model)

    def evaluate(model):
        with torch.no_grad():
            model(batch(50))

    assert torch.equal(run(evaluate), run(lambda model: None))


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_evaluation_in_another_thread_is_refused(is_in_backward):
    """It would exchange the weights under the running pass, which goes on as if alone."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    refused = []

    def evaluate():
        with torch.no_grad(), pytest.raises(UserError, match="runs in another thread"):
            model(batch(0))
        refused.append(True)

    def call_in_thread(*args):
        if current_thread() is main_thread():
            thread = Thread(target=evaluate)
            thread.start()
            thread.join()

    for t in range(12):
        y = model(batch(t))
        if is_in_backward:
            y.register_hook(call_in_thread)
        loss_of(y).backward()
        if not is_in_backward and not t:
            model[2].register_forward_hook(call_in_thread)
        optimizer.step()
        optimizer.zero_grad()
    assert len(refused) == (12 if is_in_backward else 11)
    assert_same(flat(model), simulate())


@pytest.mark.parametrize("is_in_backward", [False, True])
@pytest.mark.parametrize(
    "action",
    [
        lambda model: model.state_dict(),
        lambda model: copy.deepcopy(model),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.load_state_dict(make().state_dict()),
    ],
    ids=["saved", "copied", "saved and loaded", "loaded"],
)
def test_copy_in_another_thread_is_refused(action, is_in_backward):
    """It would exchange the weights under the running pass, which goes on as if alone."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    refused = []

    def act():
        with pytest.raises(UserError, match="runs in another thread"):
            action(model)
        refused.append(True)

    def act_in_thread(*args):
        thread = Thread(target=act)
        thread.start()
        thread.join()

    for t in range(12):
        if t == 1 and not is_in_backward:
            model[2].register_forward_hook(act_in_thread)
        y = model(batch(t))
        if is_in_backward:
            y.register_hook(act_in_thread)
        loss_of(y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(refused) == (12 if is_in_backward else 11)
    assert_same(flat(model), simulate())


def test_copy_between_the_passes_in_another_thread_is_newest():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    saved = []
    for t in range(12):
        newest = flat(model)
        loss = plain_loss(model, t)
        thread = Thread(target=lambda: saved.append(model.state_dict()))
        thread.start()
        thread.join()
        assert_same(torch.cat([weight.flatten() for weight in saved.pop().values()]), newest)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_pass_that_begins_while_another_thread_saves_is_told():
    """The state would be of older weights."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    for t in range(4):
        loss = plain_loss(model, t)
        if t < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def backward_in_thread(*args):
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join()

    model[1].register_state_dict_pre_hook(backward_in_thread)
    with pytest.raises(UserError, match="began in another thread while the model was saved"):
        model.state_dict()


def test_discarded_pass_leaves_the_newest_weights():
    model, optimizer, pipeline = started()
    for t in range(12):
        plain_loss(model, t).backward()
        plain_loss(model, 50 + t)  # a loss to print
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())
    assert pipeline.updates == 12


def test_interrupted_pass_does_not_end_the_delay():
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 4)
    stop = model[2].register_forward_pre_hook(
        lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        model(batch(4))
    stop.remove()
    updates_of(model, optimizer, 4, 12)
    assert_same(flat(model), simulate())


@pytest.mark.parametrize("is_training", [False, True])
def test_interrupted_evaluation_does_not_end_the_delay(is_training):
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 4)
    stop = model[2].register_forward_pre_hook(
        lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    model.train(is_training)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(batch(4))
    stop.remove()
    model.train()
    updates_of(model, optimizer, 4, 12)
    assert_same(flat(model), simulate())


def test_failed_pass_leaves_no_trace():
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 4)
    with contextlib.suppress(RuntimeError):
        model(torch.zeros(2, 3).double())
    updates_of(model, optimizer, 4, 12)
    assert_same(flat(model), simulate())


def episode(call, t):
    """Passes of a loss whose number varies: none of them is a micro-batch of its own."""
    return sum(loss_of(call(batch(10 * t + k))) for k in range(1 + t % 4))


@pytest.mark.parametrize("rings", ["device", "host"])
def test_episodes_of_varying_length(rings):
    assert_same(train(loss=episode, rings=rings)[0], simulate(loss=episode))


def test_autocast_around_the_whole_loop():
    """Autocast keeps casts of weights until its block ends; a window needs new ones."""

    def run(around, within):
        model = make().float()
        optimizer = sgd(model.parameters(), 0.1)
        delayed(model, optimizer, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for t in range(8):
                with torch.autocast("cpu", torch.bfloat16, enabled=around or within):
                    loss = loss_of(model(batch(t).float()).float())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    assert torch.equal(run(True, False), run(False, True))


@pytest.mark.filterwarnings("ignore:delayed. an update took 2")
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_smaller_batches_after_a_failure(fails_in):
    """As after an OutOfMemoryError."""
    model, optimizer, _ = started()

    def fail(*args):
        raise torch.OutOfMemoryError

    for t in range(12):
        if fails_in == "forward":
            hook = model[2].register_forward_pre_hook(fail)
        else:
            hook = model[1].lin.weight.register_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            plain_loss(model, t).backward()
        hook.remove()
        optimizer.zero_grad()
        for half in batch(t).chunk(2):
            (0.5 * loss_of(model(half))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


# Several backward passes


def penalised(call, t):
    """Gradient penalty: a gradient is differentiated."""
    x = batch(t).requires_grad_()
    y = call(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + loss_of(y)


def test_double_backward():
    assert_same(train(loss=penalised)[0], simulate(loss=penalised))


def forces(call, t):
    """A force field: the loss is of a gradient alone."""
    x = batch(t).requires_grad_()
    (force,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    return force.square().mean()


def test_loss_of_a_gradient_alone():
    assert_same(train(loss=forces)[0], simulate(loss=forces))


def test_two_backward_passes_through_one_forward_pass():
    model, optimizer, _ = started()
    for t in range(12):
        y = model(batch(t))
        (0.5 * loss_of(y)).backward(retain_graph=True)
        (0.5 * loss_of(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_backward_passes_after_both_forward_passes():
    model, optimizer, _ = started()
    for t in range(12):
        losses = [0.5 * plain_loss(model, t), 0.5 * plain_loss(model, 50 + t)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def both(call, t):
        return 0.5 * plain_loss(call, t) + 0.5 * plain_loss(call, 50 + t)

    assert_same(flat(model), simulate(loss=both))


def test_gradient_of_the_input_first():
    """An adversarial example: a backward pass for the input, then one for the weights."""

    def loss(call, t):
        x = batch(t).requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(call(x)), x)
        return loss_of(call(x.detach() + 0.1 * slope.sign()))

    assert_same(train(loss=loss)[0], simulate(loss=loss))


def test_failed_backward_pass_is_repeated():
    model, optimizer, _ = started()
    for t in range(12):
        loss = plain_loss(model, t)
        hook = model[1].lin.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        hook.remove()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_the_model(use_reentrant):
    def loss(call, t):
        x = batch(t).requires_grad_()
        if isinstance(call, nn.Module):
            return loss_of(checkpoint(call, x, use_reentrant=use_reentrant))
        return loss_of(call(x))

    assert_same(train(loss=loss)[0], simulate(loss=loss))


def test_checkpoint_around_an_evaluation_sees_the_newest():
    """The function of reentrant checkpointing runs without gradients. Here it has no backward pass,
    either, so it is no training pass, though the model is in training mode."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    for t in range(12):
        loss = plain_loss(model, t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x = batch(50).requires_grad_()
        with torch.no_grad():
            found = checkpoint(model, x, use_reentrant=True)
        assert torch.equal(found, copy.deepcopy(model)(x))
    assert_same(flat(model), simulate())


@pytest.mark.filterwarnings("ignore:delayed. an update took 3")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_chunks_checkpointed_around_the_model(use_reentrant):
    def loss(call, t):
        x = batch(t).requires_grad_()
        if isinstance(call, nn.Module):
            chunks = [checkpoint(call, part, use_reentrant=use_reentrant) for part in x.chunk(2)]
        else:
            chunks = [call(part) for part in x.chunk(2)]
        return loss_of(torch.cat(chunks))

    assert_same(train(loss=loss, accumulation=1)[0], simulate(loss=loss))


class CheckpointedFrom(nn.Module):
    """All layers but the first ones are checkpointed."""

    def __init__(self, first, use_reentrant):
        super().__init__()
        self.layers = make()
        self.first = first
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index < self.first:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("stash", ["none", "predict"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_without_stash_is_refused(use_reentrant, stash):
    """It would compute activations again from newer weights."""
    with pytest.raises(UserError, match=f"stash {stash} needs activations and weights as autograd"):
        train(CheckpointedFrom(2, use_reentrant), stash=stash)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_a_stage_without_delay_needs_no_stash(use_reentrant):
    found, _ = train(CheckpointedFrom(3, use_reentrant), stash="none")
    assert_same(found, train(stash="none")[0])


def test_reentrant_checkpoint_around_the_model_needs_no_stash():
    """The whole pass comes again, with the weights of the forward pass."""

    def loss(call, t):
        return loss_of(checkpoint(call, batch(t).requires_grad_(), use_reentrant=True))

    assert_same(train(loss=loss, stash="none")[0], train(stash="none")[0])


def around_the_model(call, t):
    return loss_of(checkpoint(call, batch(t), use_reentrant=False))


def saved_on_the_host(call, t):
    with torch.autograd.graph.save_on_cpu():
        return plain_loss(call, t)


@pytest.mark.parametrize("loss", [around_the_model, saved_on_the_host])
def test_hooks_around_the_model_without_stash_are_refused(loss):
    with pytest.raises(UserError, match="saved-tensor hooks around Linear, or take stash exact"):
        train(loss=loss, stash="none")


def test_hooks_around_an_evaluation_are_allowed():
    def loss(call, t):
        value = plain_loss(call, t)
        with torch.autograd.graph.save_on_cpu():
            call.eval()(batch(t))
        call.train()
        return value

    assert_same(train(loss=loss, stash="none")[0], train(stash="none")[0])


@pytest.mark.parametrize("is_in_place", [False, True])
def test_compiled_graph_without_stash_is_told(is_in_place):
    model = make()
    if is_in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="stash none under torch.compile: a compiled graph may"):
        found, _ = train(model, stash="none")
    assert_same(found, train(stash="none")[0])


# Steps


def stepped_within_backward(groups):
    """An optimizer per group of parameters, which steps when the group's gradients are there."""
    model = make()
    optimizers = []
    waiting = {}

    def step_of(group, optimizer):
        def step(weight):
            waiting[group] -= 1
            if not waiting[group]:
                waiting[group] = len(groups[group])
                optimizer.step()
                optimizer.zero_grad()

        return step

    named = dict(model.named_parameters())
    for group, names in groups.items():
        waiting[group] = len(names)
        optimizer = sgd([named[name] for name in names])
        optimizers.append(optimizer)
    pipeline = delayed(model, optimizers, 4)
    for (group, names), optimizer in zip(groups.items(), optimizers, strict=True):
        for name in names:
            named[name].register_post_accumulate_grad_hook(step_of(group, optimizer))
    for t in range(12):
        plain_loss(model, t).backward()
    return flat(model), pipeline.updates


NAMES = [name for name, _ in make().named_parameters()]


@pytest.mark.parametrize(
    "groups",
    [
        {name: [name] for name in NAMES},
        {k: [name for name in NAMES if name.startswith(str(k))] for k in range(4)},
    ],
    ids=["parameter", "layer"],
)
def test_optimizer_in_the_backward_pass(groups):
    found, updates = stepped_within_backward(groups)
    assert_same(found, simulate())
    assert updates == 12


def test_evaluation_amid_backward_steps_is_refused():
    model = make()
    optimizers = {weight: sgd([weight]) for weight in model.parameters()}
    delayed(model, list(optimizers.values()), 4)

    def step(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()
        with torch.no_grad():
            model(batch(0))

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(UserError, match="evaluate after the backward pass"):
        plain_loss(model, 0).backward()


class HessianStep(torch.optim.Optimizer):
    """A product with the Hessian scales the step, as in AdaHessian."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        weights = self.param_groups[0]["params"]
        move(weights, [weight.grad for weight in weights], weights)
        for weight in weights:
            weight.grad = None


def move(weights, gradients, used):
    """weights -= 0.1 g / (1 + |H 1|), where `gradients` g have a graph that ends at `used`."""
    ones = [torch.ones_like(gradient) for gradient in gradients]
    products = torch.autograd.grad(gradients, used, ones)
    with torch.no_grad():
        for weight, gradient, product in zip(weights, gradients, products, strict=True):
            weight -= 0.1 * gradient / (1 + product.abs())


@pytest.mark.filterwarnings(
    "ignore:delayed. the first 3 updates took at most 0", "ignore:Using backward"
)
def test_hessian_product_in_the_step():
    model, twin = make(), make()
    optimizer, naive = HessianStep(model.parameters()), Naive(twin)
    pipeline = delayed(model, optimizer, 4)
    for t in range(10):
        plain_loss(model, t).backward(create_graph=True)
        optimizer.step()
        naive.begin_update()
        used = naive.used()
        loss = plain_loss(lambda x, w=used: torch.func.functional_call(twin, w, (x,)), t)
        gradients = torch.autograd.grad(loss, list(used.values()), create_graph=True)
        move(list(twin.parameters()), gradients, list(used.values()))
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 10


class ExtraGradient(torch.optim.Optimizer):
    """Steps with the gradient of a point ahead; moves weights by `.data`, which no counter sees."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        weights = self.param_groups[0]["params"]
        closure()
        kept = [weight.data.clone() for weight in weights]
        for weight in weights:
            weight.data.sub_(weight.grad, alpha=0.1)
        closure()
        for weight, before in zip(weights, kept, strict=True):
            weight.data = before - 0.1 * weight.grad


@pytest.mark.filterwarnings("ignore:delayed. an update took 2")
def test_closure_after_moves_without_a_counter():
    """Both passes use one version; the stage without a delay sees the point ahead."""
    model, twin = make(), make()
    optimizer, twin_optimizer = (
        ExtraGradient(model.parameters()),
        ExtraGradient(twin.parameters()),
    )
    delayed(model, optimizer, 4)
    naive = Naive(twin)
    for t in range(10):
        naive.begin_update()

        def closure(t=t):
            optimizer.zero_grad()
            plain_loss(model, t).backward()

        def twin_closure(t=t):
            twin_optimizer.zero_grad()
            version = naive.versions[-1]
            naive.versions[-1] = version | dict(twin[3].named_parameters("3"))
            naive.backward(lambda call: plain_loss(call, t))
            naive.versions[-1] = version

        optimizer.step(closure)
        twin_optimizer.step(twin_closure)
    assert_same(flat(model), flat(twin))


def test_backward_pass_of_an_earlier_update_is_refused():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    for t in range(4):
        loss = plain_loss(model, t)
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    plain_loss(model, 4)  # the update is recorded as a version
    with pytest.raises(UserError, match="came after the optimizer's step that it belongs to"):
        loss.backward()


@pytest.mark.filterwarnings("error:delayed. the optimizer", "ignore:delayed. an update took")
def test_closure_that_is_called_several_times():
    """LBFGS moves the newest weights within its step. Its passes all use one version; a stage
    without a delay sees the newest, as it would without a pipeline."""

    def lbfgs(parameters):
        return torch.optim.LBFGS(list(parameters), lr=0.1, max_iter=3, history_size=2)

    model, twin = make(), make()
    optimizer, twin_optimizer = lbfgs(model.parameters()), lbfgs(twin.parameters())
    pipeline, naive = delayed(model, optimizer, 4), Naive(twin)
    for t in range(8):
        naive.begin_update()

        def closure(t=t):
            optimizer.zero_grad()
            loss = plain_loss(model, t)
            loss.backward()
            return loss

        def twin_closure(t=t):
            naive.versions[-1] |= {k: v.detach().clone() for k, v in twin[3].named_parameters("3")}
            twin_optimizer.zero_grad()
            return naive.backward(lambda call: plain_loss(call, t))

        optimizer.step(closure)
        twin_optimizer.step(twin_closure)
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 8


@pytest.mark.parametrize("look", ["evaluate", "state_dict", "deepcopy"])
def test_evaluation_within_a_closure_sees_the_trial_point(look):
    """Between the two passes, and after them."""

    def newest(model):
        if look == "state_dict":
            return torch.cat([weight.flatten() for weight in model.state_dict().values()])
        if look == "deepcopy":
            return flat(copy.deepcopy(model))
        seen = []
        handle = model[1].register_forward_pre_hook(lambda *_: seen.append(flat(model)))
        model.eval()
        with torch.no_grad():
            model(batch(0))
        model.train()
        handle.remove()
        return seen[0]

    def run(is_looking):
        model = make()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)
        delayed(model, optimizer, 4)
        for t in range(5):

            def closure(t=t):
                trial = flat(model)
                optimizer.zero_grad()
                loss = plain_loss(model, t)
                if is_looking:
                    assert torch.equal(newest(model), trial)
                loss.backward()
                assert torch.equal(flat(model), trial)
                if is_looking:
                    assert torch.equal(newest(model), trial)
                return loss

            optimizer.step(closure)
        return flat(model)

    assert torch.equal(run(True), run(False))


# The explicit form


class Parts(nn.Sequential):
    def encode(self, x):
        return self[1](self[0](x))

    def decode(self, x):
        return self[3](self[2](x))


def test_parts_of_a_model_in_the_explicit_form():
    model, optimizer, pipeline = started(Parts(*make()))
    for t in range(12):
        with pipeline.micro_batch():
            loss_of(model.decode(model.encode(batch(t)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_training_in_eval_mode_in_the_explicit_form():
    model, optimizer, pipeline = started(make().eval())
    for t in range(12):
        with pipeline.micro_batch():
            plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_cached_outputs_in_the_explicit_form():
    """Passes without gradients first, whose outputs get gradients; then passes with them."""
    model, optimizer, pipeline = started()
    for t in range(12):
        chunks = batch(t).chunk(2)
        with pipeline.micro_batch():
            with torch.no_grad():
                cached = torch.cat([model(chunk) for chunk in chunks])
            loss_of(cached.requires_grad_()).backward()
            for chunk, gradient in zip(chunks, cached.grad.chunk(2), strict=True):
                model(chunk).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_evaluation_in_the_explicit_form_sees_the_newest():
    model, optimizer, pipeline = started()
    updates_of(model, optimizer, 0, 6)
    plain = make()
    plain.load_state_dict(model.state_dict())
    with pipeline.micro_batch():
        plain_loss(model, 6).backward()
        model.eval()
        with torch.no_grad():
            found = model(batch(7))
    assert torch.equal(found, plain(batch(7)))


def test_several_updates_in_one_block():
    """The block's window is that of its first update; the others have windows as without it."""
    model, optimizer, pipeline = started()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(0, 12, 2):
            with pipeline.micro_batch():
                updates_of(model, optimizer, t, t + 2)
    assert_same(flat(model), simulate())


def test_closure_in_a_block_says_where_the_block_belongs():
    model, optimizer, pipeline = started(Parts(*make()))

    def closure():
        optimizer.zero_grad()
        loss = model.encode(batch(0)).square().mean()
        loss.backward()
        return loss

    with (
        pytest.raises(UserError, match=r"\(inside the closure, if they are in one\)"),
        pipeline.micro_batch(),
    ):
        optimizer.step(closure)


def test_nested_explicit_form_is_one_micro_batch():
    model, optimizer, pipeline = started(Parts(*make()))
    for t in range(12):
        with pipeline.micro_batch():
            with pipeline.micro_batch():
                code = model.encode(batch(t))
            loss_of(model.decode(code)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_explicit_micro_batches_are_counted():
    model, optimizer, pipeline = started(Parts(*make()), accumulation=2)
    twin = make()
    naive, twin_optimizer = Naive(twin, accumulation=2), sgd(twin.parameters())
    for t in range(12):
        naive.begin_update()
        for j in (1, 2):
            with pipeline.micro_batch():
                loss_of(model.decode(model.encode(batch(2 * t + j)))).backward()
            naive.backward(lambda call, n=2 * t + j: plain_loss(call, n), j)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))


class Whole(Parts):
    """Either the model, or a part of it, so that the naive simulation can call both."""

    def forward(self, x, only_encode=False):
        return self.encode(x) if only_encode else super().forward(x)


def test_explicit_micro_batch_that_fails_is_repeated():
    """One that fails before its backward pass does not count as a micro-batch of its update."""
    final = []
    for fails in (False, True):
        model, optimizer, pipeline = started(accumulation=3)
        for n in range(1, 25):
            if fails and n % 3 == 2:
                with pytest.raises(ZeroDivisionError), pipeline.micro_batch():
                    plain_loss(model, n).backward(1 / 0)
            with pipeline.micro_batch():
                plain_loss(model, n).backward()
            if n % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        final.append(flat(model))
    assert torch.equal(*final)


def test_part_after_the_model_sees_the_same_version():
    def loss(call, t):
        whole = plain_loss(call, t)
        if isinstance(call, nn.Module):
            return whole + call.encode(batch(50 + t)).square().mean()
        return whole + call(batch(50 + t), True).square().mean()

    twin = Whole(*make())
    naive, optimizer = Naive(twin), sgd(twin.parameters())
    for t in range(12):
        naive.begin_update()
        naive.backward(lambda call, t=t: loss(call, t))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(train(Whole(*make()), loss=loss)[0], flat(twin))


def test_part_before_the_model_is_refused_by_autograd():
    model, optimizer, _ = started(Parts(*make()))
    updates_of(model, optimizer, 0, 3)
    early = model.encode(batch(0)).square().mean()  # the newest weights, which the window replaces
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (plain_loss(model, 3) + early).backward()


def attacked(model, x, is_checkpointed):
    """Inputs moved along their gradient, by passes in eval mode."""
    model.eval()
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
    (gradient,) = torch.autograd.grad(loss_of(y), x)
    model.train()
    return (x + 0.1 * gradient.sign()).detach()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_attack_within_the_window_is_on_the_newest_weights(is_checkpointed):
    model, optimizer, _ = started()
    twin = make()
    naive, twin_optimizer = Naive(twin), sgd(twin.parameters())
    for t in range(10):
        naive.begin_update()
        x = attacked(twin, batch(t), is_checkpointed)
        naive.backward(lambda call, t=t, x=x: plain_loss(call, t) + loss_of(call(x)))
        clean = plain_loss(model, t)
        x = attacked(model, batch(t), is_checkpointed)
        (clean + loss_of(model(x))).backward()
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))


@pytest.mark.parametrize("stash", ["exact", "none", "predict"])
def test_backward_pass_of_an_evaluation_changes_nothing(stash):
    def run(evaluates):
        model, optimizer, _ = started(stash=stash)
        for t in range(8):
            loss = plain_loss(model, t)
            if evaluates:
                attacked(model, batch(t), False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(model)

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("is_evaluation_first", [False, True])
def test_one_backward_pass_through_a_training_pass_and_an_evaluation_is_refused(
    is_evaluation_first,
):
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 3)
    loss = plain_loss(model, 3)
    evaluated = plain_loss(model.eval(), 3)
    both = evaluated + loss if is_evaluation_first else loss + evaluated
    with pytest.raises(UserError, match="through a training forward pass and through an eval"):
        both.backward()


def test_gradient_of_an_evaluation_within_the_window_is_refused():
    model, optimizer, _ = started()
    updates_of(model, optimizer, 0, 3)
    loss = plain_loss(model, 3)
    plain_loss(model.eval(), 3).backward()
    with pytest.raises(UserError, match="by a pass outside of the model's training forward pass"):
        loss.backward()


def test_cleared_gradient_of_an_evaluation_within_the_window_is_allowed():
    model, optimizer, _ = started()
    for t in range(12):
        loss = plain_loss(model, t)
        plain_loss(model.eval(), t).backward()
        model.train().zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


def test_explicit_form_needs_exact_stash():
    _, _, pipeline = started(stash="none")
    with pytest.raises(UserError, match="needs stash exact"), pipeline.micro_batch():
        pass
