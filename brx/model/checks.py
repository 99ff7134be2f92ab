"""Checks that a user's own model can be trained in a pipeline, before data are prepared for it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from brx.config.schema import ModelSection, OwnModelConfig, RunConfig
from brx.config.user_code import fault
from brx.errors import UserError, some
from brx.model.attributes import carried_attribute
from brx.model.models import make_model, matrix_names
from brx.model.sizes import failing_in_one_line, meta_stream
from brx.model.stage import partition
from brx.model.trace import following_autocast, tried

BATCH = 2  # examples of the trial, which has no numbers

Buffers = dict[str, tuple[Tensor, int]]
"""The buffers of a module and their version counters, by name."""


@dataclass(frozen=True)
class _Trial:
    """One part of a model, and what it is tried with."""

    part: nn.Module
    name: str
    given: Tensor
    """The part's input."""
    expected_shape: tuple[int, ...]
    """The shape that its output must have."""
    recomputes: bool = False
    """Whether brx computes its activations again in the backward pass (`pipeline.recompute`)."""

    def run(self, config: ModelSection) -> Any:
        """The output of a forward pass; UserError if it fails."""
        with failing_in_one_line(config, self.part, self.name):
            return tried(self.part, [self.given])


def check_model_of(config: RunConfig) -> None:
    """`check_model` for the model and the stages of a run."""
    blocks = partition(config.model.blocks, config.pipeline.stages)
    check_model(
        config.model,
        config.data.vocabulary_size,
        blocks,
        may_recompute=config.pipeline.stash == "exact",
        recomputes=config.pipeline.recompute,
    )


def check_model(
    config: ModelSection,
    vocabulary_size: int,
    parts: Sequence[range],
    *,
    may_recompute: bool = True,
    recomputes: bool = False,
) -> None:
    """Run each part of a user's own model once, forward and backward, on the meta device.

    Models of brx are not checked.

    Args:
        config: the section `model` of the settings.
        vocabulary_size: V.
        parts: the blocks of each stage.
        may_recompute: whether a part may checkpoint its activations, which its backward pass then
            computes again from the weights of that time.
        recomputes: whether brx checkpoints every block (`pipeline.recompute`).

    Raises:
        UserError: the model cannot be made; a part is missing, fails, draws random numbers, changes
            a weight or a buffer, carries something from one pass to the next, uses a weight that is
            not its stage's, lets no gradient through, or returns a stream or logits of another
            shape; a weight is in two stages, has no effect on the loss, or gets its gradient from a
            backward pass within the backward pass; a stage has no weight;
            `matrices` names something else; a part checkpoints its activations and may not.
    """
    if not isinstance(config, OwnModelConfig):
        return
    with following_autocast():
        _check_own_model(
            config, vocabulary_size, parts, may_recompute=may_recompute, recomputes=recomputes
        )


def _check_own_model(
    config: OwnModelConfig,
    vocabulary_size: int,
    parts: Sequence[range],
    *,
    may_recompute: bool,
    recomputes: bool,
) -> None:
    """`check_model` for a user's own model."""
    model: Any = make_model(config, vocabulary_size, None, []).to("meta")
    where = f"model.class {config.name}"
    matrix_names(model)
    _check_shared(model, parts, where)
    _check_stages_have_weights(model, parts, where)
    _renew_weights(model)
    homes = _Homes(model, parts)
    tokens = torch.zeros((BATCH, config.sequence_length), dtype=torch.int64, device="meta")
    stream = meta_stream(config, BATCH, bf16=False)
    shape = tuple(stream.shape)
    logits_shape = (*shape[:2], vocabulary_size)
    embed = _Trial(model.embed, "embed", tokens, shape)
    # Each of them: blocks that look alike may use different weights of other parts.
    blocks = [
        _Trial(block, f"blocks.{index}", stream, shape, recomputes)
        for index, block in enumerate(model.blocks)
    ]
    head = _Trial(model.head, "head", stream, logits_shape)
    # The last stage is tried first, and the embedding last: on a device of its own, a stage does
    # not see what the parts before it have kept.
    by_stage = [blocks[index] for part in reversed(parts) for index in part]
    failures: dict[str, UserError] = {}
    cannot_run = set()
    for trial in (*by_stage, head, embed):
        try:
            _check_part(config, trial, homes, may_recompute=may_recompute)
        except UserError as error:
            failures[trial.name] = error
            if not _runs(config, trial):
                cannot_run.add(trial.name)
    for trial in (embed, *blocks, head):
        if trial.name not in failures:
            continue
        if trial.name in cannot_run and _runs(config, trial):
            raise UserError(
                f"{where}: {trial.name} uses what a part before it has kept, but a block and the"
                " head get the stream alone: other devices do not have the rest"
            )
        raise failures[trial.name]


def _runs(config: ModelSection, trial: _Trial) -> bool:
    try:
        trial.run(config)
    except UserError:
        return False
    return True


def _renew_weights(model: nn.Module) -> None:
    """Put a new weight in the place of each, as the engine does for a stage with delay. Whoever has
    kept a weight elsewhere still has the old one, which is no weight of the model any more."""
    renewed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is None:
                continue
            if weight not in renewed:
                renewed[weight] = nn.Parameter(torch.empty_like(weight))
            setattr(module, name, renewed[weight])


class _Homes:
    """Where the weights of a model belong.

    Args:
        parts: the blocks of each stage.
    """

    def __init__(self, model: nn.Module, parts: Sequence[range]) -> None:
        self._stage_of_part: dict[str, int] = {"embed": 0, "head": len(parts) - 1}
        for stage, blocks in enumerate(parts):
            for index in blocks:
                self._stage_of_part[f"blocks.{index}"] = stage
        self._name_of: dict[Tensor, str] = {}
        self._stage_of: dict[Tensor, int] = {}
        for stage, blocks in enumerate(parts):
            for name, weight in _weights_of(model, blocks):
                self._name_of[weight] = name
                self._stage_of[weight] = stage

    def check(self, part: str, outputs: Sequence[Tensor], given: Tensor, where: str) -> None:
        """UserError if a part's outputs depend on a weight that is not of its stage."""
        here = self._stage_of_part[part]
        for leaf in _leaves(outputs):
            if leaf is given:
                continue
            stage = self._stage_of.get(leaf)
            if stage is None:
                raise UserError(
                    f"{where} trains a tensor of shape {tuple(leaf.shape)} that is none of its"
                    " parameters (kept in a list, perhaps); make it an nn.Parameter, and use it as"
                    " an attribute of its module"
                )
            if stage != here:
                raise UserError(
                    f"{where} is in stage {here} and uses {self._name_of[leaf]}, a weight of stage"
                    f" {stage}: a weight belongs to one stage (with pipeline.stages=1 to the only"
                    " one)"
                )


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors to which a backward pass from the outputs brings gradients."""
    ahead = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        function: Any = ahead.pop()
        if hasattr(function, "variable"):  # where a gradient arrives
            yield function.variable
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)


def _check_part(config: ModelSection, trial: _Trial, homes: _Homes, *, may_recompute: bool) -> None:
    """Run one part, forward and backward; UserError if anything is wrong with it."""
    part, name, given, expected_shape = trial.part, trial.name, trial.given, trial.expected_shape
    where = f"model.class {config.name}: {name}"
    buffers = buffers_of(part)
    generators = _states_of_generators()
    output = trial.run(config)
    for generator, state in _states_of_generators().items():
        if state != generators[generator]:
            raise UserError(
                f"{where} draws random numbers ({generator}), which would depend on the number of"
                " devices; leave them out"
            )
    losses = []
    if isinstance(output, tuple) and name.startswith("blocks."):
        output, auxiliary_loss = _pair(config, output, where)
        losses.append(auxiliary_loss)
    actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if actual != expected_shape:
        what = "logits" if name == "head" else "a stream"
        meaning = "vocabulary" if name == "head" else "model.width"
        raise UserError(
            f"{where} returns {what} of shape {actual}, must be {expected_shape}: examples, "
            f"tokens, {meaning}"
        )
    homes.check(name, [output, *losses], given, where)
    recomputing = _Recomputing()
    _check_gradients(config, trial, [output.sum(), *losses], where, recomputing)
    if recomputing.seen and not may_recompute:
        raise UserError(
            f"{where} computes activations again in its backward pass (checkpoint), where the"
            " weights are newer with this pipeline.stash, which is another algorithm; leave the"
            " checkpoint out, or set pipeline.stash=exact"
        )
    check_buffers(part, buffers, f"{where}.")
    carried = carried_attribute(part, lambda: trial.run(config))
    if carried is not None:
        raise UserError(
            f"{where}.{carried} is changed by each forward pass and read by the next one; a resumed"
            " run and other devices would have another value; leave it out"
        )
    if trial.recomputes:
        _check_recomputation(config, trial, where)


def _check_recomputation(config: ModelSection, trial: _Trial, where: str) -> None:
    """UserError if a part's activations cannot be computed again in the backward pass. The part has
    run before: a script's first passes keep other tensors than the later ones."""
    try:
        output = checkpoint(tried, trial.part, [trial.given], use_reentrant=False)
        stream: Tensor = output[0] if isinstance(output, tuple) else output
        torch.autograd.grad(stream, trial.given, torch.ones_like(stream))
    except Exception as error:
        raise UserError(
            f"{where}: with pipeline.recompute: {fault(error, config.name)} (run on the meta"
            " device, without numbers)"
        ) from None


class _Recomputing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a backward pass computes activations again: autograd turns gradients off in a
    backward pass, and only code that recomputes turns them on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen = self.seen or torch.is_grad_enabled()
        return function(*args, **(kwargs or {}))


def _states_of_generators() -> dict[str, Any]:
    """The states of the generators whose numbers torch does not see, by name."""
    state: Any = np.random.get_state(legacy=True)  # noqa: NPY002  # the user's code draws from it
    _, key, position, *_ = state
    return {"random": random.getstate(), "numpy.random": (key.tobytes(), position)}


def _pair(config: ModelSection, output: tuple[Any, ...], where: str) -> tuple[Tensor, Tensor]:
    """The stream and the auxiliary loss that a block returned; UserError if it returned something
    else."""
    if len(output) != 2 or not all(isinstance(one, Tensor) for one in output):
        kinds = ", ".join(type(one).__name__ for one in output)
        raise UserError(
            f"{where} returns a tuple ({kinds}), must be the stream alone, or a pair of the stream"
            " and an auxiliary loss (tensors)"
        )
    stream, auxiliary_loss = output
    if auxiliary_loss.shape != ():
        raise UserError(
            f"{where} returns an auxiliary loss of shape {tuple(auxiliary_loss.shape)}, must be"
            " a number"
        )
    if not _has_auxiliary_loss(config):
        raise UserError(
            f"{where} returns an auxiliary loss; set has_auxiliary_loss = True in the model's class"
        )
    return stream, auxiliary_loss


def buffers_of(module: nn.Module) -> Buffers:
    """The buffers of a module as they are now, for `check_buffers`."""
    return {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}


def check_buffers(part: nn.Module, before: Buffers, where: str) -> None:
    """UserError if a buffer was made, removed, replaced or written by the forward pass.

    Args:
        before: `buffers_of` the part before the pass.
        where: what precedes a buffer's name in the message.
    """
    now = dict(part.named_buffers())
    for key in {**before, **now}:
        buffer = now.get(key)
        buffer_before, version = before.get(key, (None, 0))
        if buffer is None or buffer is not buffer_before or buffer._version != version:
            raise UserError(
                f"{where}{key} is changed by the forward pass; checkpoints and other devices would"
                " not see that; leave it out (BatchNorm: track_running_stats=False)"
            )


def _has_auxiliary_loss(config: ModelSection) -> bool:
    model = make_model(config, 256, None, [])
    return bool(getattr(model, "has_auxiliary_loss", False))


def _check_gradients(
    config: ModelSection,
    trial: _Trial,
    losses: Sequence[Tensor],
    where: str,
    recomputing: _Recomputing,
) -> None:
    """UserError if a weight of a part has no effect on the losses, which depend on its output, or
    if no gradient goes on to the parts before it. `recomputing` watches the backward pass."""
    given = trial.given
    named = dict(trial.part.named_parameters())
    total = torch.stack([loss.float() for loss in losses]).sum()
    if named and not total.requires_grad:
        raise UserError(f"{where}: its output depends on none of its weights")
    wanted: list[Tensor] = list(named.values())
    if given.requires_grad:  # the stream; token ids have no gradient
        wanted.append(given)
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if total.requires_grad and wanted:
        try:
            start = torch.ones_like(total)
            with recomputing:
                gradients = torch.autograd.grad(total, wanted, start, allow_unused=True)
        except Exception as error:
            raise UserError(
                f"{where}: backward pass: {fault(error, config.name)} (run on the meta device,"
                " without numbers)"
            ) from None
    by_name = dict(zip(named, gradients, strict=False))
    unused = [name for name, gradient in by_name.items() if gradient is None]
    # An inner backward pass adds to `.grad`; the one here only returns gradients.
    inner = [name for name in unused if named[name].grad is not None]
    if inner:
        raise UserError(
            f"{where}: {some(inner)} given gradients by a backward pass within the backward pass"
            " (a reversible layer's), which measurements of gradients would miss; let the autograd"
            " function return them"
        )
    if unused:
        raise UserError(f"{where}: {some(unused)} without effect on its output")
    for name, gradient in by_name.items():
        if gradient is not None and gradient.layout != torch.strided:
            raise UserError(
                f"{where}.{name} has sparse gradients; let them be dense (sparse=False)"
            )
    if given.requires_grad and gradients[-1] is None:
        raise UserError(
            f"{where} lets no gradient through to its input (detach, no_grad), so no part before it"
            " would train"
        )


def _check_shared(model: nn.Module, parts: Sequence[range], where: str) -> None:
    """UserError if a weight belongs to two stages."""
    stage_of: dict[int, tuple[int, str]] = {}
    for stage, blocks in enumerate(parts):
        for name, parameter in _weights_of(model, blocks):
            other, other_name = stage_of.setdefault(id(parameter), (stage, name))
            if other != stage:
                raise UserError(
                    f"{where}: {other_name} and {name} are one weight, used in stages {other} and"
                    f" {stage}; a weight belongs to one stage: untie it, or set pipeline.stages=1"
                )


def _check_stages_have_weights(model: nn.Module, parts: Sequence[range], where: str) -> None:
    """UserError if a stage has nothing to train."""
    for stage, blocks in enumerate(parts):
        if not list(_weights_of(model, blocks)):
            raise UserError(
                f"{where}: stage {stage} (blocks {blocks.start} to {blocks.stop - 1}) has no"
                " weights; set pipeline.stages to fewer"
            )


def _weights_of(model: Any, blocks: range) -> Iterator[tuple[str, nn.Parameter]]:
    """The names and weights of a stage with these blocks."""
    if blocks.start == 0:
        yield from model.embed.named_parameters("embed")
    for index in blocks:
        yield from model.blocks[index].named_parameters(f"blocks.{index}")
    if blocks.stop == len(model.blocks):
        yield from model.head.named_parameters("head")
