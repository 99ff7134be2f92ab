"""A trial without numbers finds what real optimizers keep, and the products that they take."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from brx.config.loading import apply_overrides
from brx.errors import UserError
from brx.methods.method import Method
from brx.methods.table import METHODS
from brx.methods.trial import trial_of
from brx.train.build import assemble

pytestmark = pytest.mark.usefixtures("own_code")
SMALL = {
    "model": {"blocks": 3, "width": 16, "heads": 2, "sequence_length": 8},
    "pipeline": {"stages": 3},
    "training": {"batch_size": 2, "iterations": 100},
}


class SignOfGradient(Optimizer):
    """Keeps nothing."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad.sign(), alpha=group["lr"])


class Whitened(Optimizer):
    """Keeps one buffer per weight from the second step on, and multiplies matrices."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "num_steps" in state:
                    state["last"] = weight.grad.clone()
                state["num_steps"] = 1
                if weight.ndim == 2:
                    weight.sub_(weight.grad @ (weight.grad.T @ weight.grad), alpha=1e-9)


class ByDelay(Method):
    """As many buffers as a stage's delay."""

    def matrices(self, groups):
        return KeepsUpdates(groups, self.lr)


class KeepsUpdates(Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                num_kept = int(group["delay"])
                self.state[weight]["kept"] = [torch.zeros_like(weight) for _ in range(num_kept)]


class Remembers(Method):
    """A gradient rule and a forecast, each with a buffer of its own."""

    def correct_gradients(self, gradients, newest, used, state):
        for gradient, own in zip(gradients, state, strict=True):
            own["mean"] = gradient.clone()


class AsksForNumbers(SignOfGradient):
    """Its step depends on the gradients."""

    def step(self):
        for group in self.param_groups:
            if float(group["params"][0].grad.norm()) > 1e9:
                raise AssertionError
        super().step()


class NeedsTrain(SignOfGradient):
    """Schedule-free: refuses a step before `train`."""

    is_training = False

    def eval(self):
        self.is_training = False

    def train(self):
        self.is_training = True

    def step(self):
        assert self.is_training
        super().step()


class Refuses(SignOfGradient):
    def __init__(self, params, lr):
        raise ValueError("not today")


def configured(method, *overrides):
    name = method if isinstance(method, str) else f"{__name__}:{method.__name__}"
    return apply_overrides(SMALL, [f"optimizer={{method: '{name}'}}", *overrides], "small")


def held_by_stage(config):
    """Bytes of tensors that a real run keeps after three updates: optimizers' state and rules'."""
    shape = (config.training.batch_size, config.model.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    assembly = assemble(config, lambda n: (tokens, tokens))
    for _ in assembly.engine.run(1, lambda: 3 * config.pipeline.accumulation):
        pass
    held = []
    for stage in assembly.stages:
        saved = assembly.updater.stage_state(stage)
        states = [entry["state"] for entry in saved["optimizer"]]
        leaves = tree_leaves([states, saved.get("correction", {})])
        held.append(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)))
    return held


def planned_by_stage(config):
    trial = trial_of(config)
    planned = []
    for stage in assemble(config, lambda n: None).stages:
        kept = trial.kept_for(stage.newest)
        planned.append(kept.moments + kept.bases)
    return planned


BUILT_IN = [name for name in METHODS if ":" not in name]
OWN = [
    "torch.optim:SGD",
    "torch.optim:Adagrad",
    "examples/methods/xpipe.py:XPipe",
    "examples/methods/lion_on_matrices.py:LionOnMatrices",
    "examples/methods/drift_corrector.py:DriftCorrector",
    "examples/methods/staleness_aware_rate.py:StalenessAware",
    "examples/methods/delay_damped.py:Damped",
    "brx.methods.causes:RotatedLion",
    "brx.methods.causes:TurnedRotation",
    SignOfGradient,
    Whitened,
    ByDelay,
    Remembers,
]


def name_of(method):
    return method if isinstance(method, str) else method.__name__


@pytest.mark.parametrize("method", [*BUILT_IN, *OWN], ids=name_of)
def test_state_is_the_measured_one(method):
    config = configured(method)
    assert planned_by_stage(config) == pytest.approx(held_by_stage(config), rel=0.001)


@pytest.mark.parametrize("method", ["muon", "soap", "scion", "basis-rotation"])
def test_experts_are_counted_one_by_one(method):
    config = configured(method, "model.moe={experts: 3}")
    assert planned_by_stage(config) == pytest.approx(held_by_stage(config), rel=0.001)


def test_momentum_is_one_moment():
    plain = configured("torch.optim:SGD")
    heavy = configured("torch.optim:SGD", "optimizer.arguments={momentum: 0.9}")
    num_weights = sum(weight.numel() for stage in stages_of(plain) for weight in stage.parameters())
    assert sum(planned_by_stage(plain)) == 0
    assert sum(planned_by_stage(heavy)) == 4 * num_weights


def stages_of(config):
    return [stage.module for stage in assemble(config, lambda n: None).stages]


def test_products_of_a_users_optimizer_are_counted():
    config = configured(Whitened)
    for stage in stages_of(config):
        expected = 0
        for weight in stage.parameters():
            if weight.ndim == 2:
                m, n = weight.shape
                expected += 2 * m * n * n + 2 * m * n * n  # G^T G, then G (G^T G)
        index = 0 if stage.embedding is not None else 2 if stage.head is not None else 1
        assert trial_of(config).product_flops[index] == expected


def test_built_in_products_are_those_that_torch_counts():
    config = configured("muon")
    weight = nn.Parameter(torch.zeros(16, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Muon([weight])
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    products = METHODS["muon"].bound_to(config).products((16, 64))
    assert products.total == counter.get_total_flops()


@pytest.mark.parametrize(
    "method", [*BUILT_IN, Whitened, ByDelay, Remembers, NeedsTrain], ids=name_of
)
def test_nothing_is_assumed_after_a_trial(method):
    assert trial_of(configured(method)).assumed is None


def test_failed_trial_says_what_it_assumes():
    assert trial_of(configured(AsksForNumbers)).assumed == (
        "two fp32 values per weight are assumed, as AdamW keeps, and no matrix products: it cannot "
        "be tried without numbers (DataDependentOutputException)"
    )


def test_rule_that_needs_numbers_is_named():
    assumed = trial_of(configured("examples/methods/xpipe.py:XPipe")).assumed
    assert assumed.startswith("nothing is counted for its gradient rule and forecast")


def test_failed_trial_counts_two_moments():
    config = configured(AsksForNumbers)
    num_weights = sum(math.prod(w.shape) for s in stages_of(config) for w in s.parameters())
    assert sum(kept.moments for kept in trial_of(config).kept.values()) == 8 * num_weights


def test_code_that_may_not_run_is_assumed(monkeypatch):
    monkeypatch.setattr("brx.methods.trial.is_allowed", lambda: False)
    assert trial_of(configured(SignOfGradient)).assumed.endswith(": its code is not run here")


def test_constructor_that_refuses_is_a_users_error():
    with pytest.raises(UserError, match=r"Refuses.*not today"):
        trial_of(configured(Refuses))
