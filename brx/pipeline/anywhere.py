"""`delayed`: anybody's model, in anybody's training loop, under the delay of a pipeline. Needs
torch alone.

Hooks do it, with the engine's own versions (`brx.pipeline.rebinding`). Before a training forward
pass, each stage binds the version that docs/semantics.md names; after it, the newest weights are
back, for whoever looks at them. When the backward pass reaches the model's output, the version is
bound again (recomputed activations look weights up), until the backward pass ends. Gradients arrive
at the parameters themselves, so that clipping, GradScaler, DDP and the optimizer find them. After
`optimizer.step()`, the new version goes into the rings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Literal, NoReturn, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from brx.errors import UserError, some
from brx.pipeline.delay import StageDelay, delays_of
from brx.pipeline.forecasts import FORECAST_RULES, Forecast, StashMode
from brx.pipeline.rebinding import ReboundStage

Stages = int | Mapping[str, int] | Callable[[str], int]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_DELAYED: WeakSet[nn.Module] = WeakSet()  # the models whose passes hooks bind already


class DelayedPipeline:
    """Let a model train as an asynchronous pipeline of its stages would train it; the loop stays as
    it is.

        pipeline = delayed(model, optimizer, stages=32)

    A forward pass in training mode and its backward pass see old weights; `model.eval()` and
    everything between the passes see the newest. Buffers (running means) are not versioned.

    Args: model: called as a whole: `model(batch)`, whatever it takes and returns. DDP or
        torch.compile may wrap it. optimizer: one, or all that train the model; a version is
        complete when all have stepped. stages: P, which cuts the model's longest run of like blocks
        evenly; or a mapping from parameter names or their
            beginnings (`blocks.3`), or a function of the name, to the stage from 0
            (docs/own-model.md).
        accumulation: M, the micro-batches (forward and backward passes) per update; by default
            counted in the first update. A later update may take fewer (the end of an epoch), not
            more. State it where a GradScaler may skip the first update and `zero_grad` does not set
            gradients to None.
        delay, stash, forecast, rings: as in the section `pipeline` of a configuration
        (docs/semantics.md). seed: for a delay function.

    `updates` is t, the versions made so far; `by_stage` are the names of each stage's parameters.
    UserError where parameters cannot be assigned, are sharded (FSDP2, tensor parallel), or are not
    the model's."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        stages: Stages,
        delay: Any = "pipeline",
        *,
        accumulation: int | None = None,
        stash: StashMode = "exact",
        forecast: Forecast | None = None,
        rings: Literal["device", "host"] = "device",
        seed: int = 0,
    ) -> None:
        if model in _DELAYED:
            raise UserError(
                "delayed: the model is under delay already; call remove() of its pipeline first"
            )
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self.model, self.by_stage, self.updates = (
            model,
            names_by_stage(model, optimizers, stages),
            0,
        )
        known = {
            "stash": get_args(StashMode),
            "forecast": (None, *FORECAST_RULES),
            "rings": ("device", "host"),
        }
        if accumulation is not None and (type(accumulation) is not int or accumulation < 1):
            raise UserError(
                f"delayed: accumulation must be a whole number from 1, got {accumulation!r}"
            )
        for name, value in (("stash", stash), ("forecast", forecast), ("rings", rings)):
            if value not in known[name]:
                raise UserError(
                    f"delayed: {name} must be one of {', '.join(map(str, known[name]))}, got "
                    f"{value!r}"
                )
        if forecast is not None and stash != "exact":
            raise UserError(f"delayed: forecast needs stash exact, got {stash}")
        self._optimizers = [_innermost(optimizer) for optimizer in optimizers]
        self._parameters = dict(model.named_parameters())
        self._trained = [self._parameters[name] for names in self.by_stage for name in names]
        self._places = [
            (m, name, p)
            for m in model.modules()
            for name, p in m._parameters.items()
            if p is not None
        ]
        self._num_optimized = len(list(_optimized(self._optimizers)))
        self._profile, self._seed, self._accumulation = delay, seed, accumulation
        self._stash, self._forecast, self._on_host = stash, forecast, rings == "host"
        self._stages: list[
            ReboundStage
        ] = []  # made with the first update, when M and the device are known
        self.delays()  # a wrong profile is told at once
        self._micro_batch = 0  # j, of the update under way
        self._backward_of: int | None = None  # the micro-batch whose backward pass runs
        self._open: set[int] = set()  # micro-batches between the passes
        self._with_backward: set[int] = (
            set()
        )  # micro-batches of the update under way that had a backward pass
        self._stepped: set[int] = (
            set()
        )  # ids of the optimizers that have made their step of the update under way
        disable = torch.compiler.disable  # a compiled model calls the hooks between its graphs
        _DELAYED.add(model)
        self._hooks = [
            model.register_forward_pre_hook(disable(self._before_forward), prepend=True),  # type: ignore[no-untyped-call]
            model.register_forward_hook(disable(self._after_forward), always_call=True),  # type: ignore[no-untyped-call]
        ]
        for each in self._optimizers:
            self._hooks += [
                each.register_step_pre_hook(self._before_step),
                each.register_step_post_hook(self._after_step),
            ]

    def delays(self) -> list[StageDelay]:
        """The delay of each stage; with one micro-batch per update until M is known."""
        return delays_of(
            self._profile, len(self.by_stage), self._accumulation or 1, seed=self._seed
        )

    def delay_of(self, parameter: Tensor) -> float:
        """tau in updates of a parameter's stage, for a learning-rate rule; 0 of one that does not
        train."""
        stages = zip(self.by_stage, self.delays(), strict=True)
        taus = (
            delay.tau_updates
            for names, delay in stages
            if any(self._parameters[n] is parameter for n in names)
        )
        return next(taus, 0.0)

    def settings(self) -> dict[str, Any]:
        """What the pipeline is, as the section `pipeline` of a run's configuration."""
        profile = self._profile
        if callable(profile) or isinstance(
            profile, list | tuple
        ):  # a function's delays as their largest values
            profile = [delay.tau for delay in self.delays()]
        elif isinstance(profile, dict | Integral):  # numpy's integers, too
            profile = (
                int(profile) if isinstance(profile, Integral) else {"like": int(profile["like"])}
            )
        return {
            "stages": len(self.by_stage),
            "delay": profile,
            "accumulation": self._accumulation or 1,
            "stash": self._stash,
            "forecast": self._forecast,
        }

    def remove(self) -> None:
        """Take the hooks off: from here on the model trains without delay."""
        for hook in self._hooks:
            hook.remove()
        _DELAYED.discard(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The rings, to be saved with the model and the optimizer after a step (no copies)."""
        stages = [{**stage.state_dict(), "weights": {}} for stage in self._stages]
        return {"updates": self.updates, "accumulation": self._accumulation, "stages": stages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; after the model's own weights have been loaded."""
        if missing := {"updates", "accumulation", "stages"} - state.keys():
            raise ValueError(
                f"no state of a delayed pipeline: {', '.join(sorted(missing))} missing"
            )
        if state["stages"] and self._accumulation not in (None, state["accumulation"]):
            raise ValueError(
                f"the state is of accumulation {state['accumulation']}, not {self._accumulation}"
            )
        num_stages = sum(bool(names) for names in self.by_stage)
        if state["stages"] and len(state["stages"]) != num_stages:
            raise ValueError(f"the state is of {len(state['stages'])} stages, not {num_stages}")
        self._accumulation, self.updates = (
            state["accumulation"] or self._accumulation,
            state["updates"],
        )
        self._stepped.clear()
        self._forget_micro_batches()
        self._stages = (
            (self._stages or self._make_stages()) if state["stages"] else []
        )  # none before the first update
        for stage, saved in zip(self._stages, state["stages"], strict=True):
            weights = {name: weight.data for name, weight in stage.newest.items()}
            stage.load_state_dict({**saved, "weights": weights})

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UserError(
            "delayed: copy model and optimizer, call delayed on the copies, and load state_dict() "
            "there"
        )

    def __str__(self) -> str:
        lines = ["stage  tau  updates  parameters  ring"]
        for index, (names, delay) in enumerate(zip(self.by_stage, self.delays(), strict=True)):
            weights = [self._parameters[name] for name in names]
            ring = (
                delay.num_slots * sum(weight.nbytes for weight in weights) / 2**20
                if delay.tau
                else 0
            )
            shown = f"{names[0]} ... {names[-1]}" if names else "nothing that trains"
            count = sum(weight.numel() for weight in weights)
            taus = f"{delay.tau:>3}  {delay.tau_updates:>7.4g}"
            lines.append(f"{index:>5}  {taus}  {count:>10,}  {ring:.1f} MiB  {shown}")
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name not in self._parameters:
                lines.append(f"{name} is {first[id(parameter)]}, of the stage of its first use")
        if self._accumulation is None:
            lines.append("(of one micro-batch per update; more are counted in the first update)")
        return "\n".join(lines)

    def _make_stages(self) -> list[ReboundStage]:
        rule = None if self._forecast is None else FORECAST_RULES[self._forecast]
        return [
            ReboundStage(
                self.model,
                index,
                delay,
                self._stash,
                on_host=self._on_host,
                forecast=rule,
                names=set(names),
                always_copy=True,  # GradScaler may skip an update
            )
            for index, (names, delay) in enumerate(zip(self.by_stage, self.delays(), strict=True))
            if names
        ]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not (
            module is self.model and module.training and torch.is_grad_enabled()
        ):  # a copy has the hooks, too
            return
        if self._stepped:  # another optimizer has skipped its step
            self._complete_update()
        self._check_model()
        # A GradScaler that skips a step leaves no gradients, or zeros; zeros are worth looking for
        # when M are there.
        is_full = len(self._with_backward) == self._accumulation
        if self._with_backward and all(
            p.grad is None or (is_full and not p.grad.any()) for p in self._trained
        ):
            self._forget_micro_batches()  # they come anew
        if self._open and (self._stash != "exact" or self._on_host):
            what = "rings on the host need" if self._on_host else f"stash {self._stash} needs"
            raise UserError(f"delayed: {what} each backward pass before the next forward pass")
        if self._stash != "exact" and torch.is_autocast_enabled(self._trained[0].device.type):
            raise UserError(
                f"delayed: stash {self._stash} needs autocast off: it saves a copy of the weights"
            )
        self._micro_batch += 1
        for stage in self._stages:
            stage.bind_through(self._number(self._micro_batch))

    def _number(self, micro_batch: int) -> int:
        """n of the update's micro-batch j; those without a backward pass count, so that j may be
        more than M."""
        per_update = self._accumulation or 1
        return self.updates * per_update + (micro_batch - 1) % per_update + 1

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for stage in self._stages:
            stage.bind_newest()
        if (
            not (module is self.model and module.training and torch.is_grad_enabled())
            or output is None
        ):
            return
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not leaves:  # a data class of the user's own
            leaves = [
                value
                for value in getattr(output, "__dict__", {}).values()
                if isinstance(value, Tensor)
            ]
        tensors = [leaf for leaf in leaves if leaf.requires_grad]
        if not tensors:
            known = "tensors, lists, dicts or data classes of them"
            raise UserError(
                f"delayed: the model's output holds no tensor with a gradient; return {known}"
            )
        micro_batch, update = self._micro_batch, self.updates
        self._open.add(micro_batch)
        for tensor in tensors:  # whichever is reached first begins the backward pass
            tensor.register_hook(lambda gradient: self._before_backward(micro_batch, update))  # type: ignore[no-untyped-call]

    def _before_backward(self, micro_batch: int, update: int) -> None:
        if self._backward_of == micro_batch:
            return
        if update != self.updates:
            raise UserError(
                "delayed: a backward pass after the optimizer's step that its forward pass was for"
            )
        self._with_backward.add(micro_batch)
        if self._accumulation is not None and len(self._with_backward) > self._accumulation:
            raise UserError(
                f"delayed: an update takes more than {self._accumulation} micro-batches, which "
                f"were M of the first one;"
                " state the most that one takes as accumulation="
            )
        self._backward_of = micro_batch
        for stage in self._stages:
            stage.prepare_backward(self._number(micro_batch))
            stage.bind_through(self._number(micro_batch))  # recomputed activations look weights up
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(_AtEnd(partial(self._after_backward, micro_batch)))

    def _after_backward(self, micro_batch: int) -> None:
        if self._backward_of == micro_batch:
            self._backward_of = None
            for stage in self._stages:
                stage.bind_newest()
        self._open.discard(micro_batch)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        takes_closure = any(callable(argument) for argument in (*args, *kwargs.values()))
        if id(optimizer) in self._stepped:
            self._complete_update()
        if not takes_closure and all(
            p.grad is None for group in optimizer.param_groups for p in group["params"]
        ):
            raise UserError(
                "delayed: optimizer.step() without a backward pass through the delayed model"
            )
        if not takes_closure and not self._micro_batch:
            raise UserError(
                "delayed: optimizer.step() without a training forward pass of the delayed model as "
                "a whole"
            )
        if self.updates == 0 and not self._stages:
            # M is the number of micro-batches so far. A closure's own passes, the last of them, are
            # yet to come.
            self._accumulation = self._accumulation or len(self._with_backward) + takes_closure
            self._stages = self._make_stages()
        for stage in self._stages:
            stage.ring.finish_store()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = getattr(
            optimizer, "found_inf", None
        )  # where a fused optimizer skips the step itself
        if found is not None and bool(found):
            self._forget_micro_batches()
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._complete_update()

    def _complete_update(self) -> None:
        self.updates += 1
        for stage in self._stages:
            stage.record_update(self.updates)
        self._stepped.clear()
        self._forget_micro_batches()

    def _forget_micro_batches(self) -> None:
        self._micro_batch = 0
        self._with_backward.clear()
        self._open.clear()
        for stage in self._stages:
            stage.ring.forget()

    def _check_model(self) -> None:
        """UserError where what was given to `delayed` is no longer what trains."""
        for module, name, parameter in self._places:
            if module._parameters.get(name) is not parameter:
                raise UserError(
                    f"delayed: parameter {name} of {type(module).__name__} is another object than "
                    f"it was; call delayed"
                    " after the model is final (sharding with FSDP2 is not supported: its weights "
                    "are exchanged)"
                )
        if len(list(_optimized(self._optimizers))) != self._num_optimized:
            raise UserError(
                "delayed: an optimizer was given parameters later; call delayed after "
                "add_param_group"
            )
        if not self._micro_batch and sum(1 for _ in self.model.parameters()) != len(
            self._parameters
        ):
            raise UserError(
                "delayed: the model has other parameters than it had; call delayed after it is "
                "final"
            )
        for stage in (stage for stage in self._stages if stage.delay.tau):
            older, newest = stage.ring.slots[0][0], next(iter(stage.newest.values()))
            for was, now in ((older.dtype, newest.dtype), (older.device, newest.device)):
                if was != now and not (self._on_host and isinstance(now, torch.device)):
                    raise UserError(
                        f"delayed: the model went from {was} to {now}; convert or move it before "
                        f"the call"
                    )


class _AtEnd:
    """Called once at the end of a backward pass; where one fails, when autograd lets go of it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._actions = [action]

    def __call__(self) -> None:
        while self._actions:
            self._actions.pop()()

    __del__ = __call__


def names_by_stage(
    model: nn.Module, optimizers: Sequence[Optimizer], stages: Stages
) -> list[list[str]]:
    """The names of the parameters of each stage, of those that an optimizer trains; UserError for
    what has none."""
    named = dict(model.named_parameters())
    given = {
        id(p) for p in _optimized(optimizers) if p.is_floating_point() or p.is_complex()
    }  # no frozen integers
    trained = [name for name, parameter in named.items() if id(parameter) in given]
    if len(trained) < len(given):
        raise UserError(
            "delayed: the optimizer trains parameters that are not the model's; make it of its "
            "parameters"
        )
    if not trained:
        raise UserError("delayed: the optimizer trains no parameter of the model")
    sharded = [name for name in trained if type(named[name].data).__name__ == "DTensor"]
    if sharded:
        raise UserError(
            f"delayed: {some(sharded)} sharded (FSDP2 or tensor parallel), which exchanges weights "
            f"at its own times;"
            " use DDP, or a model that fits on one device"
        )
    stage_of: Callable[[str], Any]
    if isinstance(stages, Mapping):
        every = [
            name for name, _ in model.named_parameters(remove_duplicate=False)
        ]  # a tied head, too
        unknown = [
            key for key in stages if not any(f"{name}.".startswith(f"{key}.") for name in every)
        ]
        if unknown:
            raise UserError(
                f"delayed: stages: no parameter's name is or begins with {', '.join(unknown)}"
            )
        stage_of = partial(_by_beginning, stages)
    elif isinstance(stages, int):
        stage_of = _cut(model, stages)
    elif callable(stages):
        stage_of = stages
    else:
        raise UserError(
            f"delayed: stages must be a number, a mapping or a function of parameter names, got "
            f"{stages!r}"
        )
    found: dict[str, Any] = {name: stage_of(name) for name in trained}
    wrong = [
        name for name, k in found.items() if isinstance(k, bool) or not isinstance(k, int) or k < 0
    ]
    if wrong:
        raise UserError(
            f"delayed: stages: {some(wrong)} assigned to no stage; each needs a whole number from 0"
        )
    count = stages if isinstance(stages, int) else 1 + max(found.values())
    return [[name for name in trained if found[name] == k] for k in range(count)]


def _by_beginning(stages: Mapping[str, int], name: str) -> int | None:
    """The stage of the longest beginning of a name that the mapping has; None if it has none."""
    beginnings = [key for key in stages if f"{name}.".startswith(f"{key}.")]
    return stages[max(beginnings, key=len)] if beginnings else None


def _cut(model: nn.Module, num_stages: int) -> Callable[[str], int]:
    """The stage by name, when the longest run of like blocks is cut evenly."""
    runs: list[list[str]] = [
        []
    ]  # the longest of each list: what the names of each block's parameters begin with
    for path, container in model.named_modules():
        outer = (block for run in runs if len(run) >= max(2, num_stages) for block in run)
        if isinstance(container, LISTS) and not f"{path}.".startswith(
            tuple(outer)
        ):  # heads or experts of a block
            run: list[str] = []
            longest, kind = run, None
            for name, child in container.named_children():
                if next(child.parameters(), None) is None:  # an activation between two blocks
                    continue
                prefix = f"{path}.{name}." if path else f"{name}."
                run, kind = [*run, prefix] if _kind(child) == kind else [prefix], _kind(child)
                longest = max(longest, run, key=len)
            runs.append(longest)
    prefixes = max(runs, key=len)
    equal = [run[0] for run in runs if len(run) == len(prefixes) > 1 < num_stages]
    if len(equal) > 1:
        raise UserError(
            f"delayed: stages: {len(equal)} runs of {len(prefixes)} like blocks, from "
            f"{' and '.join(equal[:2])} on;"
            " give a mapping from parameter names to stages"
        )
    if not 1 <= num_stages <= max(1, len(prefixes)):
        raise UserError(
            f"delayed: stages must be from 1 to {max(1, len(prefixes))}, the model's longest run "
            f"of like blocks, got"
            f" {num_stages}; or give a mapping from parameter names to stages"
        )
    names = [name for name, _ in model.named_parameters()]
    first = next(
        (i for i, name in enumerate(names) if prefixes and name.startswith(prefixes[0])), 0
    )
    # Block i of n is in stage k where k n // P <= i < (k + 1) n // P, as in brx's own partition.
    bounds = [(k + 1) * len(prefixes) // num_stages for k in range(num_stages)]

    def stage_of(name: str) -> int:
        block = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
        if block is None:  # before the first block or after the last one
            return 0 if names.index(name) < first else num_stages - 1
        return next(k for k, bound in enumerate(bounds) if block < bound)

    return stage_of


def _kind(block: nn.Module) -> object:
    """What like blocks have in common: their class, and what is in one that is a mere list."""
    return [type(module) for module in block.modules()] if isinstance(block, LISTS) else type(block)


def _innermost(optimizer: Any) -> Optimizer:
    """The optimizer within accelerate's or another's wrapper."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer  # type: ignore[no-any-return]


def _optimized(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    return (
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    )


delayed = DelayedPipeline
