"""What wraps models and optimizers, copies and saves them."""

import copy
import gc
import importlib
import io
import warnings
from weakref import ref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from brx import delayed
from brx.errors import UserError
from tests.pipeline.loops import (
    Layer,
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


def started(updates=6, **settings):
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4, **settings)
    go_on(model, optimizer, range(updates))
    return model, optimizer, pipeline


def go_on(model, optimizer, updates):
    for t in updates:
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()


# Models: copied, saved, wrapped


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("is_in_window", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copy_is_plain_with_the_newest_weights(copied, is_in_window):
    model, _, _ = started()
    newest = flat(model)
    if is_in_window:
        plain_loss(model, 6)
    twin = copied(model)
    assert torch.equal(flat(twin), newest)
    before = twin(batch(0))
    twin(batch(1)).sum().backward()
    assert torch.equal(twin(batch(0)), before)


def test_window_goes_on_after_a_copy():
    model, optimizer, _ = started(0)
    for t in range(12):
        loss = plain_loss(model, t)
        copy.deepcopy(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


class CopiedInItsPass(Layer):
    """As in BYOL, whose forward pass makes the target network, a copy of the online one."""

    def __init__(self):
        super().__init__()
        self.found = []

    def forward(self, x):
        self.found.append(copy.deepcopy(self.lin).weight.detach())
        return super().forward(x)


@pytest.mark.parametrize("stash", ["exact", "none"])
def test_training_pass_goes_on_after_a_copy_in_it(stash):
    """The copy has the newest weights, and the layers after it the window's."""
    model, optimizer, _ = started(0, stash=stash)
    twin = make(CopiedInItsPass)
    twin_optimizer = sgd(twin.parameters())
    delayed(twin, twin_optimizer, 4, stash=stash)
    for t in range(8):
        newest = [layer.lin.weight.detach().clone() for layer in twin]
        go_on(model, optimizer, [t])
        go_on(twin, twin_optimizer, [t])
        for layer, weight in zip(twin, newest, strict=True):
            assert torch.equal(layer.found[-1], weight)
    assert torch.equal(flat(twin), flat(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_window_goes_on_between_two_forward_passes(copied):
    """Both see the version of the micro-batch, and so do weights that are read after the copy."""
    model, twin = make(), make()
    optimizer, twin_optimizer = sgd(model.parameters()), sgd(twin.parameters())
    pipeline = delayed(model, optimizer, 4, 3, accumulation=2)
    naive = Naive(twin, accumulation=2)
    naive.taus = dict.fromkeys(naive.taus, 3)
    for t in range(8):
        naive.begin_update()
        for j in (1, 2):
            n = 2 * t + j
            first = plain_loss(model, n)
            held = flat(model)
            newest = flat(copied(model))
            assert torch.equal(flat(model), held)
            assert torch.equal(newest, flat(twin))
            (first * plain_loss(model, n + 50)).backward()
            naive.backward(lambda call, n=n: plain_loss(call, n) * plain_loss(call, n + 50), j)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 8


def test_saved_model_in_a_window_is_a_plain_file():
    """It is the file of a model outside of a window: nothing of the pipeline is in it."""
    model, _, _ = started()
    plain_loss(model, 6)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"AtEnd" not in file.getvalue()


@pytest.mark.parametrize("is_in_window", [False, True])
def test_saved_model_loads_with_weights_only(is_in_window):
    """A loop need not name anything of brx as safe, only the classes of its model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 2)
    inputs = torch.randn(4, 8)
    for _ in range(3):
        model(inputs).sum().backward()
        optimizer.step()
    newest = flat(model)
    if is_in_window:
        model(inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(flat(loaded), newest)
    assert loaded(inputs).shape == (4, 1)


def test_copied_part_in_a_window_is_newest():
    model, _, _ = started()
    newest = flat(model)
    outer = nn.ModuleDict({"model": model})
    plain_loss(model, 6)
    assert torch.equal(flat(copy.deepcopy(outer)), newest)


def test_copied_module_that_holds_its_pipeline():
    model, _, pipeline = started()
    model.pipeline = pipeline
    with pytest.warns(UserWarning, match="a copy of the model is a plain one"):
        twin = copy.deepcopy(model)
    assert twin.pipeline is None
    assert saved(model).pipeline is None


@pytest.mark.parametrize("of_part", [False, True])
def test_state_dict_in_a_window_is_the_newest(of_part):
    model, optimizer, _ = started()
    expected = copy.deepcopy(model.state_dict())
    loss = plain_loss(model, 6)
    found = (
        {f"0.{k}": v for k, v in model[0].state_dict().items()} if of_part else model.state_dict()
    )
    loss.backward()
    optimizer.step()  # the state is a copy: it stays what it was
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])


def test_state_dict_in_a_window_changes_no_gradient():
    model, optimizer, _ = started(0)
    for t in range(12):
        loss = plain_loss(model, t)
        model.state_dict()
        model[1].state_dict()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


class Calls(nn.Module):
    """A part of a model that calls a function, if it has one, in the middle of the forward pass."""

    call = None

    def forward(self, x):
        if self.call is not None:
            self.call()
        return x


def with_calls():
    model = make()
    calls = Calls()
    model.insert(1, calls)
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    go_on(model, optimizer, range(6))
    return model, calls


SAVES = pytest.mark.parametrize("save", [nn.Module.state_dict, copy.deepcopy])


@SAVES
def test_evaluation_in_a_window_is_the_newest_after_a_save_within(save):
    model, calls = with_calls()
    model.eval()
    expected = model(batch(0))
    model.train()
    plain_loss(model, 6)
    model.eval()
    calls.call = lambda: save(model)
    assert torch.equal(model(batch(0)), expected)


@SAVES
def test_training_pass_goes_on_with_its_version_after_a_save_within(save):
    model, _ = with_calls()
    expected = plain_loss(model, 6)
    model, calls = with_calls()
    calls.call = lambda: save(model)
    loss = plain_loss(model, 6)
    assert torch.equal(loss, expected)
    calls.call = None
    loss.backward()


def test_state_dict_that_fails_in_a_window():
    """The next one is of the newest weights again."""

    class Failing(nn.Linear):
        is_failing = False

        def _save_to_state_dict(self, *args):
            if self.is_failing:
                raise ZeroDivisionError
            super()._save_to_state_dict(*args)

    model = nn.Sequential(*make(), Failing(4, 4).double())
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 5)
    go_on(model, optimizer, range(4))
    newest = flat(model)
    loss = plain_loss(model, 4)
    model[4].is_failing = True
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    model[4].is_failing = False
    plain_loss(model, 4)  # the window goes on
    found = model.state_dict()
    assert torch.equal(torch.cat([weight.flatten() for weight in found.values()]), newest)
    loss.backward()
    assert torch.equal(flat(model), newest)


def test_removed_pipeline_trains_without_delay():
    model, optimizer, pipeline = started()
    plain = make()
    plain.load_state_dict(model.state_dict())
    twin = sgd(plain.parameters())
    plain_loss(model, 6)  # a window is open
    pipeline.remove()
    for each, of in ((model, optimizer), (plain, twin)):
        go_on(each, of, range(6, 10))
    assert_same(flat(model), flat(plain))


class Remembering(nn.Sequential):
    """Keeps its last output, and the graph behind it."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("kind", [nn.Sequential, Remembering])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_models_that_nobody_holds_are_freed(kind, create_graph):
    def train_one():
        model = kind(*make())
        optimizer = sgd(model.parameters())
        pipeline = delayed(model, optimizer, 4)
        for t in range(4):
            optimizer.zero_grad()
            plain_loss(model, t).backward(create_graph=create_graph)
            optimizer.step()
        return ref(model), ref(pipeline)

    references = train_one()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_pipeline_that_nobody_holds_goes_on():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    gc.collect()
    go_on(model, optimizer, range(12))
    assert_same(flat(model), simulate())


def test_data_parallel_copies_are_refused():
    model, _, _ = started()
    replica = model._replicate_for_data_parallel()
    with pytest.raises(UserError, match="use DDP"):
        replica(batch(0))


def test_capture_of_the_loop_is_refused(monkeypatch):
    """Replays of a CUDA graph would compute with the versions of one pass for good."""
    monkeypatch.setattr("brx.pipeline.delayed.is_capturing", lambda device: True)
    with pytest.raises(UserError, match="a CUDA graph of the training loop would repeat"):
        train()
    train(stages=1)


def test_trunk_under_two_pipelines_is_refused():
    trunk = make()
    first = nn.Sequential(trunk, nn.Linear(4, 4).double())
    second = nn.Sequential(trunk, nn.Linear(4, 2).double())
    delayed(first, sgd(first.parameters()), 2)
    with pytest.raises(UserError, match=r"0.0.lin.weight and 7 more are under delay already"):
        delayed(second, sgd(second.parameters()), 2)


def test_trunk_of_a_removed_pipeline_is_free():
    trunk = make()
    delayed(trunk, sgd(trunk.parameters()), 2).remove()
    model = nn.Sequential(trunk, nn.Linear(4, 4).double())
    delayed(model, sgd(model.parameters()), 2)


def test_compiled_model_without_graph_breaks():
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(train(compiled, updates=6)[0], simulate(updates=6))


def test_compiled_training_step():
    """The compiler must not trace into what autograd calls in the backward pass."""
    torch._dynamo.reset()
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)

    @torch.compile(backend="eager")
    def step(x):
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for t in range(6):
        step(batch(t))
    assert_same(flat(model), simulate(updates=6))


def test_compiled_call_without_graph_breaks_says_how():
    torch._dynamo.reset()
    model = make()
    delayed(model, sgd(model.parameters()), 4)
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give it the compiled model"):
        model(batch(0))


def test_training_step_within_the_call_of_the_model():
    """As Lightning runs it under DDP: the outer call is the model's, and calls the model again."""

    class Redirected(nn.Sequential):
        def forward(self, x, is_outer=True):
            return loss_of(self(x, False)) if is_outer else super().forward(x)

    def loss(call, t):
        return call(batch(t)) if isinstance(call, nn.Module) else plain_loss(call, t)

    assert_same(train(Redirected(*make()), loss=loss)[0], simulate())


# Optimizers


class Wrapper:
    """A wrapper that is no torch optimizer and cannot be iterated over."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


class Uninitialized(torch.optim.Optimizer):
    """A wrapper that is an optimizer, but never calls its constructor, as Opacus' and old ones."""

    def __init__(self, optimizer):
        self.original_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self):
        self.original_optimizer.step()

    def zero_grad(self):
        self.original_optimizer.zero_grad()


class InSlots:
    """A wrapper without a `__dict__`, as a data class with slots is."""

    __slots__ = ("inner",)

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class Combined:
    """An optimizer for the matrices and one for the vectors, kept in a dictionary."""

    def __init__(self, optimizers):
        self.matrices = optimizers[0]
        self.all = dict(enumerate(optimizers))

    def step(self):
        for optimizer in self.all.values():
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.all.values():
            optimizer.zero_grad()


def combined(parameters):
    weights = list(parameters)
    matrices = [weight for weight in weights if weight.ndim == 2]
    vectors = [weight for weight in weights if weight.ndim == 1]
    return Combined([torch.optim.Muon(matrices, lr=0.02), sgd(vectors)])


class InTwoSteps(torch.optim.SGD):
    """A step that is two steps of the base class, after a decay."""

    def step(self, closure=None):
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight *= 0.99
        super().step()
        super().step()


def in_two_steps(parameters):
    return InTwoSteps(list(parameters), lr=0.1)


def test_two_steps_of_the_base_class():
    found, pipeline = train(optimizer_of=in_two_steps)
    assert_same(found, simulate(in_two_steps))
    assert pipeline.updates == 12


def test_blocks_in_turn():
    """Block coordinate descent: the optimizer has the parameters of one block at a time."""
    model, twin = make(), make()
    optimizer, twin_optimizer = sgd(model.parameters()), sgd(twin.parameters())
    delayed(model, optimizer, 4)
    naive = Naive(twin)
    for t in range(12):
        for of, each in ((model, optimizer), (twin, twin_optimizer)):
            each.param_groups[0]["params"] = list(of[t // 3].parameters())
        naive.begin_update()
        naive.backward(lambda call, t=t: plain_loss(call, t))
        plain_loss(model, t).backward()
        for of, each in ((model, optimizer), (twin, twin_optimizer)):
            each.step()
            of.zero_grad()
    assert_same(flat(model), flat(twin))


def test_step_after_one_that_failed():
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    for t in range(12):
        plain_loss(model, t).backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())


@pytest.mark.filterwarnings("ignore:delayed. weights changed without a step")
def test_new_optimizer_after_a_step_that_failed():
    """Its steps make versions, as those of any optimizer that `delayed` was not given."""
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 4)
    for t in range(12):
        plain_loss(model, t).backward()
        if t == 4:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            optimizer = sgd(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert_same(flat(model), simulate())
    assert pipeline.updates == 12


def test_wrapped_twice():
    assert_same(
        train(optimizer_of=lambda parameters: Wrapper(Wrapper(sgd(parameters))))[0], simulate()
    )


@pytest.mark.parametrize(
    "optimizer_of",
    [
        combined,
        lambda parameters: Uninitialized(Uninitialized(sgd(parameters))),
        lambda parameters: InSlots(sgd(parameters)),
    ],
    ids=["combined", "uninitialized", "in slots"],
)
def test_optimizers_are_found_in_any_attribute(optimizer_of):
    found, pipeline = train(optimizer_of=optimizer_of)
    assert_same(found, simulate(optimizer_of))
    assert pipeline.updates == 12


def test_optimizers_in_a_dictionary():
    model = make()
    halves = {"first": sgd(model[:2].parameters()), "second": sgd(model[2:].parameters())}
    delayed(model, halves, 4)
    for t in range(12):
        plain_loss(model, t).backward()
        for optimizer in halves.values():
            optimizer.step()
            optimizer.zero_grad()
    assert_same(flat(model), simulate())


@pytest.mark.parametrize("name", ["Lookahead", "ScheduleFreeWrapper", "OrthoGrad"])
def test_wrappers_of_a_library(name):
    library = pytest.importorskip("pytorch_optimizer")

    def wrapped(parameters):
        optimizer = getattr(library, name)(sgd(parameters))
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    assert_same(train(optimizer_of=wrapped)[0], simulate(wrapped))


def test_schedule_free_weights_swapped_for_evaluation():
    library = pytest.importorskip("pytorch_optimizer")
    held = []

    def wrapped(parameters):
        held.append(library.ScheduleFreeWrapper(sgd(parameters)))
        held[-1].train()
        return held[-1]

    def evaluate(model):
        held[-1].eval()
        held[-1].train()

    assert_same(train(optimizer_of=wrapped, after=evaluate)[0], simulate(wrapped, after=evaluate))


def test_no_optimizer_is_one_clear_error():
    with pytest.raises(UserError, match=r"must be a torch optimizer, .* got object"):
        delayed(make(), object(), 4)


def test_optimizer_of_copies_is_one_clear_error():
    model = make()
    masters = [nn.Parameter(weight.detach().float().clone()) for weight in model.parameters()]
    with pytest.raises(UserError, match=r"trains no parameter of the model. .*master weights"):
        delayed(model, sgd(masters), 4)


def test_optimizer_without_hooks_is_one_clear_error():
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

    model = make()
    with pytest.raises(UserError, match=r"got Bare, whose constructor has not called"):
        delayed(model, Bare(model.parameters()), 4)


@pytest.mark.parametrize("given", [None, [make()], torch.optim.SGD(make().parameters())])
def test_no_module_is_one_clear_error(given):
    with pytest.raises(UserError, match=f"must be a torch.nn.Module, got {type(given).__name__}"):
        delayed(given, sgd(make().parameters()), 4)


class Sam:
    """Sharpness-aware minimisation: two half steps, at the weights and at a point nearby."""

    def __init__(self, parameters):
        self.base_optimizer = sgd(parameters)
        self.kept = []

    @property
    def weights(self):
        return self.base_optimizer.param_groups[0]["params"]

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([weight.grad.norm() for weight in self.weights]).norm()
        self.kept = [weight.detach().clone() for weight in self.weights]
        for weight in self.weights:
            weight += 0.05 * weight.grad / norm
            weight.grad = None

    @torch.no_grad()
    def second_step(self):
        for weight, kept in zip(self.weights, self.kept, strict=True):
            weight.copy_(kept)
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()


def test_two_half_steps_are_refused():
    model = make()
    with pytest.raises(UserError, match="Sam steps in two halves; give delayed its base optimizer"):
        delayed(model, Sam(model.parameters()), 4)


def test_two_half_steps_in_the_explicit_form():
    model = make()
    optimizer = Sam(model.parameters())
    pipeline = delayed(model, optimizer.base_optimizer, 4)
    twin = make()
    naive, twin_optimizer = Naive(twin), sgd(twin.parameters())
    for t in range(12):
        with pipeline.micro_batch():
            plain_loss(model, t).backward()
            optimizer.first_step()
            plain_loss(model, t).backward()
            optimizer.second_step()
        naive.begin_update()
        weights = naive.used()
        loss = plain_loss(lambda x, w=weights: functional_call(twin, w, (x,)), t)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        moved = {}
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            moved[name] = (weight + 0.05 * gradient / norm).detach().requires_grad_()
        plain_loss(lambda x, w=moved: functional_call(twin, w, (x,)), t).backward()
        for name, weight in twin.named_parameters():
            weight.grad = moved[name].grad
        twin_optimizer.step()
        twin_optimizer.zero_grad()
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 12


# Resume


def resumed(*, with_pipeline, order=("model", "optimizer", "pipeline")):
    model, optimizer, pipeline = started()
    parts = {"model": model, "optimizer": optimizer, "pipeline": pipeline}
    kept = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    model, optimizer, pipeline = started(0)
    parts = {"model": model, "optimizer": optimizer, "pipeline": pipeline}
    for name in order:
        if name != "pipeline" or with_pipeline:
            parts[name].load_state_dict(kept[name])
    go_on(model, optimizer, range(6, 12))
    return flat(model)


def momentum(parameters):
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def test_resumed_loop_is_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resumed(with_pipeline=True)
    assert torch.equal(found, flat(started(12)[0]))


def test_clamping_after_the_state_was_saved():
    """What is written between the saved state and the next pass is in the version, as without."""

    def clamped(save):
        model, optimizer, pipeline = started(0)
        for t in range(8):
            go_on(model, optimizer, [t])
            if save:
                pipeline.state_dict()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.clamp_(-0.2, 0.2)
        return flat(model)

    assert torch.equal(clamped(True), clamped(False))


def test_resume_without_the_pipeline_is_told():
    model = make()
    optimizer = momentum(model.parameters())
    go_on(model, optimizer, range(3))
    twin = make()
    twin_optimizer = momentum(twin.parameters())
    delayed(twin, twin_optimizer, 4)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="does not know the older versions"):
        go_on(twin, twin_optimizer, range(3, 6))


def test_state_through_distributed_checkpoint_functions():
    """They make a step without gradients to have the optimizer's state."""
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")

    def start():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, delayed(model, optimizer, 4)

    model, optimizer, pipeline = start()
    go_on(model, optimizer, range(6))
    kept = copy.deepcopy(
        (
            model.state_dict(),
            states.get_optimizer_state_dict(model, optimizer),
            pipeline.state_dict(),
        )
    )
    go_on(model, optimizer, range(6, 12))
    for pipeline_first in (False, True):
        twin, twin_optimizer, twin_pipeline = start()
        of_model, of_optimizer, of_pipeline = copy.deepcopy(kept)
        twin.load_state_dict(of_model)
        if pipeline_first:
            twin_pipeline.load_state_dict(of_pipeline)
        states.set_optimizer_state_dict(twin, twin_optimizer, of_optimizer)
        if not pipeline_first:
            twin_pipeline.load_state_dict(of_pipeline)
        go_on(twin, twin_optimizer, range(6, 12))
        assert torch.equal(flat(twin), flat(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulation": 2}, "of accumulation 1, not 2"),
        ({"stages": {"0": 0, "1": 0, "2": 1, "3": 2}}, "of 4 stages, not 3"),
        ({"stages": {"0": 0, "1": 0, "2": 1, "3": 3}}, "another cut into stages"),
        ({"delay": [5, 2, 1, 0]}, r"of delays \[3, 2, 1, 0\], not \[5, 2, 1, 0\]"),
        ({"stash": "none"}, "of stash exact, not none"),
        ({"forecast": "last-update"}, "of forecast None, not last-update"),
    ],
)
def test_state_of_another_pipeline_is_refused(settings, message):
    state = started()[2].state_dict()
    model = make()
    stages = settings.pop("stages", 4)
    pipeline = delayed(model, sgd(model.parameters()), stages, **settings)
    with pytest.raises(ValueError, match=message):
        pipeline.load_state_dict(state)


@pytest.mark.parametrize(
    ("saved", "settings"),
    [
        ({"stash": "predict"}, {"forecast": "average-update"}),
        ({"forecast": "average-update"}, {"forecast": "last-update"}),
        ({"delay": [3, 2, 1, 0], "accumulation": 4}, {"delay": [4, 2, 1, 0], "accumulation": 4}),
    ],
)
def test_state_that_fits_by_chance_is_refused(saved, settings):
    """Both keep as many versions, and averages of the same name."""
    state = started(**saved)[2].state_dict()
    model = make()
    pipeline = delayed(model, sgd(model.parameters()), 4, **settings)
    with pytest.raises(ValueError, match="the state is of"):
        pipeline.load_state_dict(state)


@pytest.mark.parametrize("updates", [1, 6])
def test_state_of_other_shapes_is_refused(updates):
    state = started(updates)[2].state_dict()
    model = make()
    model[1].lin.weight = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))
    pipeline = delayed(model, sgd(model.parameters()), {str(k): k for k in range(4)})
    with pytest.raises(ValueError, match=r"1.lin.weight has shape \(4, 4\), not \(1, 4\)"):
        pipeline.load_state_dict(state)


def test_state_of_an_earlier_version_has_no_settings():
    state = started()[2].state_dict()
    for name in ("delays", "stash", "forecast"):
        del state[name]
    model = make()
    pipeline = delayed(model, sgd(model.parameters()), 4)
    pipeline.load_state_dict(state)
    assert pipeline.updates == 6
