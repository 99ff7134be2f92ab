"""Version t is what the weights are when the first pass of the next update begins: whatever writes
them after the optimizer's step is in it."""

import copy

import pytest
import torch

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


def test_write_in_a_window_is_told_before_the_step():
    """Its backward pass has closed the window, and with that has lost what was written."""
    model = make()
    optimizer = sgd(model.parameters())
    delayed(model, optimizer, 4)
    loss_of(model(batch(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = flat(model)
    loss = loss_of(model(batch(1)))
    next(model.parameters()).data += 1.0  # no counter sees it
    loss.backward()
    with pytest.raises(UserError, match="written during a training forward pass"):
        optimizer.step()
    assert torch.equal(flat(model), before)


# Steps by hand, without the optimizer


def step_by_hand(model):
    """As before torch had optimizers: autograd's version counters do not see it."""
    for weight in model.parameters():
        weight.data.sub_(weight.grad.data, alpha=0.3)


@pytest.mark.filterwarnings("ignore:delayed. weights changed without a step")
@pytest.mark.parametrize("cleared", ["first", "between the passes", "last"])
def test_step_by_hand_is_an_update(cleared):
    model = make()
    pipeline = delayed(model, sgd(model.parameters()), 4)
    for t in range(12):
        if cleared == "first":
            model.zero_grad(set_to_none=False)
        loss = plain_loss(model, t)
        if cleared == "between the passes":
            model.zero_grad()
        loss.backward()
        step_by_hand(model)
        if cleared == "last":
            model.zero_grad()
    assert_same(flat(model), simulate())
    assert pipeline.updates == 12


@pytest.mark.filterwarnings("ignore:delayed. weights changed without a step")
@pytest.mark.parametrize("has_epochs", [False, True])
def test_step_by_hand_after_two_micro_batches(has_epochs):
    """With epochs, every third update is the last of one, and has one micro-batch of M = 2."""
    model, twin = make(), make()
    pipeline = delayed(model, sgd(model.parameters()), 4, accumulation=2)
    naive = Naive(twin, accumulation=2)
    for t in range(12):
        naive.begin_update()
        is_short = has_epochs and t % 3 == 2
        for j in (1,) if is_short else (1, 2):
            plain_loss(model, 2 * t + j).backward()
            naive.backward(lambda call, n=2 * t + j: plain_loss(call, n), j)
        for each in (model, twin):
            step_by_hand(each)
            each.zero_grad()
    assert_same(flat(model), flat(twin))
    assert pipeline.updates == 12


def test_step_by_hand_is_told():
    model = make()
    delayed(model, sgd(model.parameters()), 4)

    def loop():
        for t in range(3):
            plain_loss(model, t).backward()
            step_by_hand(model)
            model.zero_grad()

    with pytest.warns(UserWarning, match="changed without a step of the optimizer"):
        loop()


@pytest.mark.filterwarnings("ignore:delayed. an update took 2")
def test_extra_passes_make_no_update():
    """Without a delay there is no history to compare with."""
    model = make()
    optimizer = sgd(model.parameters())
    pipeline = delayed(model, optimizer, 1)
    for t in range(4):
        for j in (0, 1):
            plain_loss(model, 2 * t + j).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pipeline.updates == 4


# Weights that differ in the passes from what the optimizer steps from


def around_the_pass(change, restore):
    """A loop that changes weights before the forward pass and takes it back before the step; the
    version has the change."""
    model, twin = make(), make()
    optimizer, twin_optimizer = sgd(model.parameters(), 0.1), sgd(twin.parameters(), 0.1)
    delayed(model, optimizer, 4)
    naive = Naive(twin)
    for t in range(12):
        kept = change(model, t)
        plain_loss(model, t).backward()
        restore(model, kept)
        twin_kept = change(twin, t)
        naive.begin_update()
        naive.backward(lambda call, t=t: plain_loss(call, t))
        restore(twin, twin_kept)
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
    assert_same(flat(model), flat(twin))


def put_back(model, kept):
    for weight, before in zip(model.parameters(), kept, strict=True):
        weight.data.copy_(before)


def test_binary_weights_in_the_passes():
    def binarise(model, t):
        kept = [weight.data.clone() for weight in model.parameters()]
        for weight in model.parameters():
            weight.data = 0.3 * weight.data.sign()
        return kept

    around_the_pass(binarise, put_back)


def test_noise_on_weights_in_the_passes():
    def disturb(model, t):
        generator = torch.Generator().manual_seed(t)
        kept = [weight.data.clone() for weight in model.parameters()]
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.data.add_(noise, alpha=0.1)
        return kept

    around_the_pass(disturb, put_back)


# Writes in a window, or between two passes of one


def started(updates=5, lr=0.3):
    model = make()
    optimizer = sgd(model.parameters(), lr)
    delayed(model, optimizer, 4)
    for t in range(updates):
        plain_loss(model, t).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:delayed. weights changed without a step")
def test_state_loaded_after_a_discarded_pass_is_kept():
    model, _ = started()
    state = make().state_dict()
    plain_loss(model, 99)  # a loss to print: the window is open
    model.load_state_dict(state)
    assert torch.equal(flat(model), flat(make()))
    plain_loss(model, 5).backward()
    assert torch.equal(flat(model), flat(make()))


def test_state_loaded_between_the_passes_is_refused():
    model, _ = started()
    loss = plain_loss(model, 5)
    model.load_state_dict(make().state_dict())
    with pytest.raises(UserError, match="written between a forward pass and its backward pass"):
        loss.backward()


def test_write_before_a_second_backward_pass_is_refused():
    model, _ = started()
    loss = plain_loss(model, 5)
    loss.backward(retain_graph=True)
    clamp_data(model)
    with pytest.raises(UserError, match="written between a forward pass and its backward pass"):
        loss.backward()


def test_averages_swapped_in_within_a_window_are_refused():
    """The evaluation would be of the newest weights."""
    model, _ = started()
    plain_loss(model, 5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    model.eval()
    with pytest.raises(UserError, match="write the newest weights, after the optimizer's step"):
        model(batch(0))


def by_counter(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.7)


def by_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.7)


@pytest.mark.parametrize(("updates", "write"), [(0, by_counter), (0, by_data), (5, by_counter)])
def test_write_after_a_pass_without_a_backward_pass_is_refused(updates, write):
    """A pass that shows shapes, then the initialisation: the pass has begun the update."""
    model, _ = started(updates)
    plain_loss(model, 99)
    write(model)
    message = r"0.lin.weight and 5 more are written .* under torch.no_grad"
    with pytest.raises(UserError, match=message):
        plain_loss(model, 0)


def test_write_without_a_counter_is_not_lost_in_silence():
    """The window of a pass without a backward pass is closed by the state that is loaded."""
    model, _ = started()
    plain_loss(model, 99)
    by_data(model)
    model[0].load_state_dict(make()[0].state_dict())
    with pytest.raises(UserError, match=r"0.lin.weight and 5 more are written"):
        plain_loss(model, 5)


def update_with_graph_of_gradients(model, t):
    """A step by hand in the window, which `create_graph` leaves open."""
    weights = list(model.parameters())
    gradients = torch.autograd.grad(plain_loss(model, t), weights, create_graph=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.data.sub_(gradient.data, alpha=0.3)


@pytest.mark.parametrize("updates", [0, 1])
def test_step_by_hand_in_an_open_window_is_refused(updates):
    model, _ = started(updates)
    update_with_graph_of_gradients(model, 5)
    with pytest.raises(UserError, match="steps by hand after create_graph=True"):
        update_with_graph_of_gradients(model, 6)


@pytest.mark.filterwarnings("error:delayed", "ignore:delayed. weights changed without a step")
def test_step_by_hand_with_a_graph_of_gradients_in_the_explicit_form():
    model = make()
    pipeline = delayed(model, sgd(model.parameters()), 4)
    weights = list(model.parameters())
    for t in range(12):
        with pipeline.micro_batch():
            gradients = torch.autograd.grad(plain_loss(model, t), weights, create_graph=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.sub_(gradient.data, alpha=0.3)
    assert_same(flat(model), simulate())


@pytest.mark.filterwarnings("ignore:delayed. weights changed without a step")
def test_write_without_a_counter_between_the_first_micro_batches():
    """Both micro-batches of the first update have the weights that they have met."""
    model, twin = make(), make()
    delayed(model, sgd(model.parameters()), 4, accumulation=2)
    for n in (1, 2):
        by_data(model)
        by_data(twin)
        assert torch.equal(model(batch(n)), twin(batch(n)))
        plain_loss(model, n).backward()
        plain_loss(twin, n).backward()
    for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad)
