"""Tries a method's optimizers for two steps on torch's fake tensors, to find the state that they
keep and the matrix products of a step.

Fake tensors have shapes and dtypes but no numbers, and take no memory and no time. So a plan can
try a model of any size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from brx.config.schema import CustomConfig, RunConfig
from brx.config.user_code import is_allowed
from brx.errors import UserError
from brx.methods.custom import begin_training, user_code
from brx.methods.groups import NOT_OPTIONS, member_of
from brx.methods.method import Method
from brx.methods.table import find_method
from brx.model.sizes import distinct_blocks, meta_stage
from brx.model.stage import Stage, partition
from brx.optim.basis_rotation import BasisRotation
from brx.optim.parameter_state import state_dtype, state_shapes
from brx.pipeline.delay import StageDelay, stage_delays

FP32 = 4  # bytes
NUM_STEPS = 2
"""Some optimizers keep more from their second step on."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a method keeps for one parameter."""

    moments: int = 0
    """All state except bases and covariances."""
    bases: int = 0
    """Bases and covariances."""

    def plus(self, more: Kept) -> Kept:
        return Kept(self.moments + more.moments, self.bases + more.bases)


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    kept: Mapping[str, Kept]
    """By name of each parameter that was tried."""
    kinds: Mapping[int, int] = field(default_factory=dict)
    """For each block, the first block like it, which was tried in its place. Empty if all blocks
    were tried."""
    product_flops: Mapping[int, float] = field(default_factory=dict)
    """The operations of the matrix products in one step of a user's method, by stage."""
    assumed: str | None = None
    """If the trial failed: what is assumed instead, and why. None if it succeeded."""

    def kept_for(self, names: Iterable[str]) -> Kept:
        """What the method keeps for some of the model's parameters."""
        total = Kept()
        for name in names:
            total = total.plus(self.kept[parameter_of_kind(name, self.kinds)])
        return total


@dataclass
class _TrialStage:
    """Stands for `brx.pipeline.versions.StageVersions`, with the attributes from which optimizers
    are made."""

    index: int
    delay: StageDelay
    module: Stage
    shapes: Mapping[str, torch.Size]
    """The shapes of the parameters that are tried, by name."""
    newest: dict[str, nn.Parameter] = field(default_factory=dict)

    def make_weights(self) -> None:
        """Make the parameters and their gradients; in fake mode, fake ones."""
        for name, shape in self.shapes.items():
            self.newest[name] = nn.Parameter(torch.empty(shape))
            self.newest[name].grad = torch.empty(shape)


_trials: dict[str, Trial] = {}


def trial_of(config: RunConfig) -> Trial:
    """Try the method of a run on its model.

    A built-in method treats equal blocks of all stages alike, and is tried on one block of each
    kind. A user's own method may depend on stage and delay, and is tried on all stages.

    Raises:
        UserError: a user's own method cannot be made; or, with an installed one, its constructor
            refuses the arguments.
    """
    key = _key(config)
    if key not in _trials:
        _trials[key] = _try(config)
    return _trials[key]


def _key(config: RunConfig) -> str:
    """A key that is equal for runs whose trials have the same result."""
    parts = [config.model_dump_json(include={"model", "optimizer"}), config.data.vocabulary_size]
    if is_own(config):
        delays = [delay.tau_updates for delay in stage_delays(config.pipeline)]
        parts += [delays, config.training.iterations, is_allowed()]
    return repr(parts)


def is_own(config: RunConfig) -> bool:
    """Whether the method is a user's own, or any torch optimizer."""
    return isinstance(config.optimizer, CustomConfig)


def parameter_of_kind(name: str, kinds: Mapping[int, int]) -> str:
    """The name of the same parameter in the block that is tried in place of its own."""
    section, _, rest = name.partition(".")
    if section != "blocks" or not kinds:
        return name
    index, _, inner = rest.partition(".")
    return f"blocks.{kinds[int(index)]}.{inner}"


def _try(config: RunConfig) -> Trial:
    if is_own(config) and not is_allowed():
        return _assumed(config, "its code is not run here")
    try:
        method = find_method(config)
        kinds = {} if is_own(config) else distinct_blocks(config.model)
        stages = _stages(config, kinds)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for stage in stages:
                stage.make_weights()
            with user_code(config, "optimizers", UserError):
                optimizers = method.optimizers(cast(Any, stages))
            begin_training(optimizers, config)
            kept = _kept_after_steps(method, optimizers, stages)
            problem = _add_kept_by_rules(kept, method, stages)
            flops = _product_flops(optimizers, stages) if is_own(config) else {}
    except ImportError as error:
        return _assumed(config, str(error))
    except UserError:
        if is_own(config):
            raise
        return _assumed(config, "its package is not installed")
    except Exception as error:
        # Most likely, the optimizer's step reads a tensor's value.
        if not is_own(config):
            raise
        return _assumed(config, f"it cannot be tried without numbers ({type(error).__name__})")
    return Trial(kept, kinds, flops, problem)


def _assumed(config: RunConfig, reason: str) -> Trial:
    """The result where no trial is possible: state as AdamW has it, and the reason."""
    kept = {}
    for stage in _modules(config):
        for name, weight in stage.named_parameters():
            kept[name] = Kept(moments=2 * FP32 * weight.numel())
    assumed = "two fp32 values per weight are assumed, as AdamW keeps, and no matrix products"
    return Trial(kept, assumed=f"{assumed}: {reason}")


def _modules(config: RunConfig) -> list[Stage]:
    """The modules on the meta device: all stages for a user's own method, otherwise the whole model
    as one."""
    model = config.model
    parts = [range(model.blocks)]
    if is_own(config):
        parts = partition(model.blocks, config.pipeline.stages)
    return [meta_stage(model, config.data.vocabulary_size, blocks) for blocks in parts]


def _stages(config: RunConfig, kinds: Mapping[int, int]) -> list[_TrialStage]:
    delays = stage_delays(config.pipeline, config.training.seed)
    stages = []
    for index, module in enumerate(_modules(config)):
        shapes = {
            name: weight.shape
            for name, weight in module.named_parameters()
            if parameter_of_kind(name, kinds) == name
        }
        stages.append(_TrialStage(index, delays[index], module, shapes))
    return stages


def _kept_after_steps(
    method: Method, optimizers: Sequence[Optimizer], stages: Sequence[_TrialStage]
) -> dict[str, Kept]:
    """What the optimizers keep for each parameter after `NUM_STEPS` steps, by name."""
    kept = {name: Kept() for stage in stages for name in stage.newest}
    for optimizer in optimizers:
        if isinstance(optimizer, BasisRotation):
            # Its step reads flags from the device. What it keeps is known without a step.
            entries = _kept_by_rotation(optimizer)
        else:
            for _ in range(NUM_STEPS):
                optimizer.step()
            entries = _kept_by(optimizer, method.bases_in_state)
        for name, more in entries:
            kept[name] = kept[name].plus(more)
    return kept


def _add_kept_by_rules(
    kept: dict[str, Kept], method: Method, stages: Sequence[_TrialStage]
) -> str | None:
    """Add the state of the method's gradient rule and forecast to `kept`.

    Returns:
        The problem, in words, if they cannot be tried; else None.
    """
    try:
        entries = list(_kept_by_rules(method, stages))
    except Exception as error:
        return (
            f"nothing is counted for its gradient rule and forecast, which cannot be tried without "
            f"numbers ({type(error).__name__})"
        )
    for name, more in entries:
        kept[name] = kept[name].plus(more)
    return None


def _kept_by(optimizer: Optimizer, bases: frozenset[str]) -> Iterator[tuple[str, Kept]]:
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for entry, value in optimizer.state[parameter].items():
                size = _num_bytes(value)
                kept = Kept(bases=size) if entry in bases else Kept(moments=size)
                yield member_of(name), kept


def _num_bytes(value: object) -> int:
    """The bytes of all tensors in a value."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _kept_by_rotation(optimizer: BasisRotation) -> Iterator[tuple[str, Kept]]:
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for entry, shape in state_shapes(parameter, options).items():
                size = math.prod(shape) * state_dtype(entry, parameter).itemsize
                is_basis = entry.endswith(("_basis", "_covariance"))
                kept = Kept(bases=size) if is_basis else Kept(moments=size)
                yield member_of(name), kept


@torch.no_grad()
def _kept_by_rules(method: Method, stages: Sequence[_TrialStage]) -> Iterator[tuple[str, Kept]]:
    for stage in stages:
        if stage.delay.tau == 0:
            continue
        # The weights themselves: rules may find the optimizer's state by them.
        weights: list[Tensor] = list(stage.newest.values())
        others = [torch.empty_like(weight) for weight in weights]
        states: list[dict[str, Any]] = [{} for _ in weights]
        if method.corrects_gradients:
            gradients = [torch.empty_like(weight) for weight in weights]
            method.correct_gradients(gradients, weights, others, states)
        if method.forecasts:
            method.forecast(weights, others, stage.delay.tau_updates, states)
        for name, state in zip(stage.newest, states, strict=True):
            yield name, Kept(moments=_num_bytes(state))


def _product_flops(
    optimizers: Sequence[Optimizer], stages: Sequence[_TrialStage]
) -> dict[int, float]:
    """The operations of a step's matrix products, by stage; empty if a step has none."""
    if _counted_step(optimizers) == 0:
        return {}
    counts = {}
    for stage in stages:
        # A step in which this stage alone has gradients.
        for other in stages:
            for weight in other.newest.values():
                weight.grad = torch.empty_like(weight) if other is stage else None
        counts[stage.index] = _counted_step(optimizers)
    return counts


def _counted_step(optimizers: Sequence[Optimizer]) -> float:
    with FlopCounterMode(display=False) as counter:
        for optimizer in optimizers:
            if not isinstance(optimizer, BasisRotation):
                optimizer.step()
    return float(counter.get_total_flops())
