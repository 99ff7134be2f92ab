"""A state that is saved at any moment, and loaded into a new process, goes on as if nothing had
been."""

import io
import warnings

import pytest
import torch

from brx import delayed
from brx.errors import UserError
from tests.pipeline.loops import batch, loss_of, make, plain_loss

LAST = 8  # updates


def slow(stage, num_stages, micro_batch, seed):
    return (7 * micro_batch + 3 * stage) % 4


slow.most = 3

SETTINGS = [
    {},
    {"stages": 1},
    {"delay": 0},
    {"delay": slow},
    {"rings": "host", "delay": slow, "accumulation": 2},
    {"accumulation": 3, "delay": [9, 0, 5, 2]},
    {"stash": "none"},
    {"stash": "predict", "accumulation": 2},
    {"forecast": "average-update"},
    {"forecast": "last-update", "rings": "host"},
]


class Run:
    """An ordinary loop, and what it has lost."""

    def __init__(self, settings, model=None):
        settings = {"stages": 4, **settings}
        self.accumulation = settings.get("accumulation", 1)
        self.model = make() if model is None else model
        # With the sizes of its weights changing fast, each version counts.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.pipeline = delayed(self.model, self.optimizer, **settings)
        self.losses = []

    def go_on(self, first, last):
        """Micro-batches from `first` to `last`, each M-th with the step that follows; the last may
        have it or not."""
        for n in range(first, last + 1):
            loss = plain_loss(self.model, n)
            loss.backward()
            self.losses.append(loss.item())
            if n % self.accumulation == 0:
                self.step()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self):
        """A file of everything, also of the gradients of an update under way."""
        gradients = [weight.grad for weight in self.model.parameters()]
        states = [part.state_dict() for part in (self.model, self.optimizer, self.pipeline)]
        file = io.BytesIO()
        torch.save((*states, gradients), file)
        file.seek(0)
        return file

    def load(self, file):
        *states, gradients = torch.load(file, weights_only=True)
        for part, state in zip((self.model, self.optimizer, self.pipeline), states, strict=True):
            part.load_state_dict(state)
        for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
            weight.grad = gradient


def whole(settings):
    run = Run(settings)
    run.go_on(1, LAST * run.accumulation)
    return run


@pytest.mark.parametrize("settings", SETTINGS)
def test_state_after_any_micro_batch(settings):
    expected = whole(settings)
    num_micro_batches = LAST * expected.accumulation
    for at in (0, 1, 2, 3, 7):
        run = Run(settings)
        run.go_on(1, at)
        file = run.saved()
        run = Run(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run.load(file)
            assert run.pipeline.updates == at // run.accumulation
            run.go_on(at + 1, num_micro_batches)
        assert run.losses == expected.losses[at:], at
        assert run.pipeline.updates == LAST


@pytest.mark.parametrize("settings", [{}, {"stages": 1}, {"accumulation": 2, "stash": "predict"}])
@pytest.mark.parametrize("update", [1, 2, 5])
def test_state_between_the_passes_and_before_the_step(settings, update):
    expected = whole(settings)
    last = update * expected.accumulation
    for is_before_step in (True, False):
        run = Run(settings)
        run.go_on(1, last - 1)
        loss = plain_loss(run.model, last)
        if is_before_step:
            loss.backward()
        file = run.saved()
        run = Run(settings)
        run.load(file)
        if is_before_step:
            run.step()
            run.go_on(last + 1, LAST * run.accumulation)
            assert run.losses == expected.losses[last:]
        else:  # the forward pass comes again
            run.go_on(last, LAST * run.accumulation)
            assert run.losses == expected.losses[last - 1 :]
        assert run.pipeline.updates == LAST


def test_state_after_a_backward_pass_that_no_output_shows():
    class Hidden(torch.nn.Sequential):
        def forward(self, x):
            return iter([super().forward(x)])

    def micro_batch(run, n):
        loss = loss_of(next(run.model(batch(n))))
        loss.backward()
        run.losses.append(loss.item())
        if n % 2 == 0:
            run.step()

    run = Run({"accumulation": 2}, Hidden(*make()))
    for n in range(1, 16):
        micro_batch(run, n)
        if n == 7:
            file = run.saved()
    other = Run({"accumulation": 2}, Hidden(*make()))
    other.load(file)
    for n in range(8, 16):
        micro_batch(other, n)
    assert other.losses == run.losses[7:]


def test_state_in_an_accumulation_whose_gradients_are_lost():
    """The accumulation begins anew."""
    settings = {"accumulation": 3}
    run = Run(settings)
    run.go_on(1, 8)
    run.optimizer.zero_grad()
    file = run.saved()
    run = Run(settings)
    run.load(file)
    run.go_on(7, LAST * 3)
    assert run.losses == whole(settings).losses[6:]


def test_state_after_the_first_update_has_its_cut():
    """Where the order of use is another one than that of definition."""

    def reordered():
        run = Run({})
        run.model.forward = lambda x: run.model[1](run.model[0](run.model[3](run.model[2](x))))
        return run

    run = reordered()
    run.go_on(1, 1)
    file = run.saved()
    cut = run.pipeline.by_stage
    run.go_on(2, LAST)
    other = reordered()
    other.load(file)
    other.go_on(2, LAST)
    assert other.pipeline.by_stage == cut
    assert other.losses == run.losses[1:]


def test_state_of_an_earlier_version_without_version_0_is_refused():
    run = Run({})
    run.go_on(1, 1)
    state = run.pipeline.state_dict()
    del state["initial"]
    with pytest.raises(ValueError, match="left out version 0; load one of a later update"):
        Run({}).pipeline.load_state_dict(state)


@pytest.mark.parametrize("updates", [0, 2])
def test_a_pass_from_before_a_load_is_refused(updates):
    run = Run({})
    run.go_on(1, updates)
    loss = plain_loss(run.model, updates + 1)
    run.pipeline.load_state_dict(Run({}).pipeline.state_dict())
    with pytest.raises(UserError, match="a state was loaded between a forward pass and its"):
        loss.backward()
