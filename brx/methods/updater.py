"""Runs a method on one device's stages: sets learning rates, applies the gradient rule, takes the
optimizers' steps, and saves their state by stage."""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from brx.config.schema import CustomConfig, RunConfig, TrainingConfig
from brx.errors import DivergedError, RunError, UserError
from brx.methods.custom import begin_training, moves_weights, user_code
from brx.methods.groups import NOT_OPTIONS, check_each_parameter_once
from brx.methods.table import find_method
from brx.optim import BadGradientError, BasisRotation
from brx.optim.graphs import GraphedSteps, GraphMaker, MovingGradientsError
from brx.pipeline.forecasts import ParameterStates, copied_to
from brx.pipeline.slots import copy_tensors
from brx.pipeline.versions import StageVersions

Step = Callable[[], object]
"""Takes an optimizer's step."""
CODE = (FunctionType, BuiltinFunctionType, type)
"""The types of options that are code. No checkpoint holds it: a constructor sets it again."""


def num_warmup_iterations(training: TrainingConfig) -> int:
    return round(training.warmup_fraction * training.iterations)


def lr_factor(iteration: int, training: TrainingConfig) -> float:
    """The learning rate of update `iteration` (from 1) relative to the peak: linear warm-up, then a
    cosine."""
    warmup = num_warmup_iterations(training)
    if iteration <= warmup:
        return iteration / warmup
    progress = (iteration - warmup) / max(1, training.iterations - warmup)
    floor = training.final_lr_fraction
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


class MethodUpdater:
    """Implements `brx.pipeline.engine.Updater` for the configured method.

    Args:
        config: the run; its section `optimizer` selects the method.
        stages: the stages of this device.
        make_graph: makes CUDA graphs of basis rotation's steps; None: the steps run as they are.

    Raises:
        UserError: the method is a user's own and cannot be used, or its forecast does not go
            together with the section `pipeline`.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[StageVersions],
        make_graph: GraphMaker | None = None,
    ) -> None:
        self.config = config
        self._stages = list(stages)
        self.method = find_method(config)
        with user_code(config, "optimizers", UserError):
            self.optimizers = self.method.optimizers(stages)
            check_each_parameter_once(self.optimizers, stages)
        begin_training(self.optimizers, config)
        if self.method.forecasts:
            _check_forecast(config)
            for stage in stages:
                stage.forecast_by(self._forecast)
        device_type = stages[0].device.type
        # For each optimizer its step, and the peak learning rate of each of its groups.
        self._steps: list[Step] = []
        self._peak_lrs: list[list[float]] = []
        for optimizer in self.optimizers:
            self._peak_lrs.append([group["lr"] for group in optimizer.param_groups])
            if make_graph is not None and isinstance(optimizer, BasisRotation):
                self._steps.append(GraphedSteps(optimizer, make_graph, device_type).step)
            else:
                self._steps.append(optimizer.step)
        # The state of the gradient rule, by stage and parameter name.
        self._corrections: dict[int, dict[str, dict[str, Any]]] = {}
        for stage in stages:
            self._corrections[stage.index] = {name: {} for name in stage.newest}

    def wrap_steps(self, wrap: Callable[[Optimizer, Step], Step]) -> None:
        """Replace each optimizer's step by `wrap(optimizer, step)`, to count or time steps."""
        columns = zip(self.optimizers, self._steps, strict=True)
        self._steps = [wrap(optimizer, step) for optimizer, step in columns]

    def lr(self, iteration: int) -> float:
        """The learning rate of a stage without delay."""
        return self.config.optimizer.lr * lr_factor(iteration, self.config.training)

    @torch.no_grad()
    def correct_gradients(self, stage: StageVersions, micro_batch: int) -> None:
        """Let the method's gradient rule change the gradients that a micro-batch left in a stage's
        newest weights."""
        if not self.method.corrects_gradients:
            return
        if stage.delay.tau == 0 or stage.stash == "none":
            # The backward pass saw the newest weights: there is nothing to correct.
            return
        kept = self._corrections[stage.index]
        gradients: list[Tensor] = []
        newest: list[Tensor] = []
        used: list[Tensor] = []
        state: ParameterStates = []
        columns = zip(stage.newest.items(), stage.seen_by_backward(), strict=True)
        for (name, weight), used_weight in columns:
            if weight.grad is None:
                continue
            gradients.append(weight.grad)
            newest.append(weight)
            used.append(used_weight)
            state.append(kept[name])
        update = stage.delay.update_of(micro_batch)
        with user_code(self.config, "correct_gradients", RunError, update):
            self.method.correct_gradients(gradients, newest, used, state)

    def step(self, iteration: int) -> None:
        """Update all stages by the gradients in their newest weights, which keep their addresses.

        Raises:
            DivergedError: a gradient is not finite.
            RunError: the step fails in another way, or gives a weight another form.
        """
        for optimizer, peak_lrs in zip(self.optimizers, self._peak_lrs, strict=True):
            self._set_lrs(optimizer, peak_lrs, iteration)
        for take_step in self._steps:
            with user_code(self.config, "step", RunError, iteration):
                self._take(take_step, iteration)
        with user_code(self.config, "step", RunError, iteration):
            for stage in self._stages:
                stage.take_back()

    @contextmanager
    def evaluation(self, iteration: int) -> Iterator[None]:
        """A context in which the newest weights are the ones that the optimizers want evaluated.

        Schedule-free optimizers take their gradients at another point. They have `eval` and
        `train`, which move the weights from one to the other. Afterwards the weights are exactly
        what they were, so that the trajectory does not depend on validations.
        """
        moving = [optimizer for optimizer in self.optimizers if moves_weights(optimizer)]
        if not moving:
            yield
            return
        weights = [weight for stage in self._stages for weight in stage.newest.values()]
        kept = [weight.detach().clone() for weight in weights]
        self._move(moving, "eval", iteration)
        try:
            yield
        finally:
            self._move(moving, "train", iteration)
            copy_tensors(weights, kept)

    def _move(
        self, optimizers: Sequence[Optimizer], to: Literal["eval", "train"], iteration: int
    ) -> None:
        with user_code(self.config, to, RunError, iteration):
            for optimizer in optimizers:
                getattr(optimizer, to)()
            for stage in self._stages:
                stage.take_back()
                stage.newest_were_written()

    def _set_lrs(self, optimizer: Optimizer, peak_lrs: Sequence[float], iteration: int) -> None:
        factor = lr_factor(iteration, self.config.training)
        for group, peak_lr in zip(optimizer.param_groups, peak_lrs, strict=True):
            group["lr"] = peak_lr * factor / self.lr_divisor(group["delay"], iteration)

    def _take(self, take_step: Step, iteration: int) -> None:
        """Take an optimizer's step; its errors become the run's."""
        try:
            take_step()
        except BadGradientError as error:
            # The engine has not looked at this gradient: it would make a GPU wait.
            raise DivergedError(
                f"iteration {iteration}: {error}; try a lower optimizer.lr"
            ) from None
        except MovingGradientsError as error:
            raise RunError(
                f"iteration {iteration}: runtime.graphs: {error}; set it to false"
            ) from None
        except ValueError as error:
            if isinstance(self.config.optimizer, CustomConfig):
                raise
            raise RunError(f"iteration {iteration}: {error}") from None

    def lr_divisor(self, tau_updates: float, iteration: int) -> float:
        """The number by which the method divides the learning rate of a stage with the delay
        `tau_updates`.

        Raises:
            RunError: it is not a number above 0.
        """
        with user_code(self.config, "lr_divisor", RunError, iteration):
            divisor = float(
                self.method.lr_divisor(tau_updates, iteration, self.config.training.iterations)
            )
            if not 0 < divisor < math.inf:
                where = f"tau_updates {tau_updates:g}, t {iteration}"
                raise ValueError(f"must be a number above 0, got {divisor:g} ({where})")
            return divisor

    def _forecast(
        self, newest: list[Tensor], update: list[Tensor], tau_updates: float, state: ParameterStates
    ) -> list[Tensor]:
        with user_code(self.config, "forecast", RunError):
            forecast = list(self.method.forecast(newest, update, tau_updates, state))
            if [weight.shape for weight in forecast] != [weight.shape for weight in newest]:
                raise ValueError(
                    "must return one tensor for each parameter, of the parameter's shape"
                )
            return forecast

    @property
    def num_failed_refreshes(self) -> int:
        """How often a basis has stayed as it was because its decomposition failed; waits for a
        GPU."""
        return sum(o.num_failed_refreshes for o in self.optimizers if isinstance(o, BasisRotation))

    def tell_first_bases(self, tell: Callable[[int, int], None]) -> None:
        """Call `tell` while basis rotation computes its first bases, because large ones take
        seconds each. Its arguments are how many bases are done, and how many there are."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, BasisRotation):
                optimizer.on_first_bases = tell

    def stage_state(self, stage: StageVersions) -> dict[str, Any]:
        """The optimizers' state of one stage and the gradient rule's, as copies on the CPU."""
        saved: dict[str, Any] = {
            "optimizer": [_saved(optimizer, stage.index) for optimizer in self.optimizers]
        }
        correction = {}
        for name, own in self._corrections[stage.index].items():
            if own:
                correction[name] = copied_to("cpu", own)
        if correction:
            saved["correction"] = correction
        return saved

    def check_saved(self, stage: StageVersions) -> None:
        """Check that a checkpoint can hold what the method keeps for a stage.

        Raises:
            UserError: it has values of a type that `torch.load(weights_only=True)` refuses.
        """
        problem = _unreadable(self.stage_state(stage))
        if problem is not None:
            raise UserError(
                f"optimizer.method {self.config.optimizer.method}: keeps what no checkpoint can "
                f"hold ({problem}); tensors, numbers, strings, lists, tuples and dicts are possible"
            )

    def load_stage_states(self, states: dict[int, dict[str, Any]], device: torch.device) -> None:
        """Continue from what `stage_state` returned for each stage of this device, by stage."""
        for stage, state in states.items():
            for name, own in state.get("correction", {}).items():
                self._corrections[stage][name] = copied_to(device, own)
        for index, optimizer in enumerate(self.optimizers):
            saved = {stage: state["optimizer"][index] for stage, state in states.items()}
            optimizer.load_state_dict(_packed(optimizer, saved))
            _restore_types(optimizer, saved)


def _packed(optimizer: Optimizer, saved: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A state dict of torch's form, in which numbers stand for parameters, filled with the saved
    state and options by the parameters' names.

    Args:
        saved: what `_saved` returned for each stage, by stage.
    """
    packed = optimizer.state_dict()
    if "param_groups" not in packed:
        raise ValueError("state_dict() must have torch's form, with state and param_groups")
    packed["state"] = {}
    for name_in_stage, group in _named_groups(packed["param_groups"]):
        entry = saved[group["stage"]]
        group.update(entry["groups"][name_in_stage])
        for name, number in zip(group["param_names"], group["params"], strict=True):
            if name in entry["state"]:
                packed["state"][number] = entry["state"][name]
    _add_common(packed, saved[min(saved)])
    return packed


def _restore_types(optimizer: Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Give the loaded state the data types in which it was saved; `saved` as in `_packed`."""
    for group in optimizer.param_groups:
        state_by_name = saved[group["stage"]]["state"]
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key, as_saved in state_by_name.get(name, {}).items():
                loaded = optimizer.state[parameter]
                if key in loaded:
                    loaded[key] = _with_saved_types(loaded[key], as_saved)


def _with_saved_types(loaded: Any, saved: Any) -> Any:
    """What an optimizer has loaded, with every tensor in the data type in which it was saved.

    torch converts all tensors but `step` to the parameter's type: an index would become a float,
    and a float64 average would be rounded.
    """
    leaves, structure = tree_flatten(loaded)
    saved_leaves, saved_structure = tree_flatten(saved)
    if structure != saved_structure:  # the optimizer has changed its form while loading
        return loaded
    for index, (leaf, as_saved) in enumerate(zip(leaves, saved_leaves, strict=True)):
        if isinstance(leaf, Tensor) and leaf.dtype != as_saved.dtype:
            leaves[index] = as_saved.to(leaf.device)
    return tree_unflatten(leaves, structure)


def _unreadable(kept: Any, name: str = "state") -> str | None:
    """The name and type of a value that `torch.load` with `weights_only` refuses; None if there is
    none."""
    file = io.BytesIO()
    try:
        torch.save(kept, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # of pickle, or of what is pickled
        parts: list[tuple[str, Any]] = []
        if type(kept) is dict:
            parts = [(str(key), part) for key, part in kept.items()]
        elif type(kept) in (list, tuple):
            parts = [(name, part) for part in kept]
        for part_name, part in parts:
            problem = _unreadable(part, part_name)
            if problem is not None:
                return problem
        return f"{name}: {type(kept).__name__}"
    return None


def _check_forecast(config: RunConfig) -> None:
    """Raise UserError for settings that do not go with a method's own forecast."""
    pipeline, name = config.pipeline, config.optimizer.method
    if pipeline.forecast is not None:
        raise UserError(f"pipeline.forecast: {name} has its own prediction; leave it null")
    if pipeline.stash != "exact":
        raise UserError(
            f"pipeline.stash: the prediction of {name} needs exact (got {pipeline.stash})"
        )


def _saved(optimizer: Optimizer, stage: int) -> dict[str, dict[str, Any]]:
    """An optimizer's state of one stage: `state` by parameter name, the options of its `groups` by
    the groups' names in the stage, and what it keeps for all stages together (`_common`)."""
    state: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for name_in_stage, group in _named_groups(optimizer.param_groups):
        if group["stage"] != stage:
            continue
        options = {}
        for key, value in group.items():
            if key not in NOT_OPTIONS and not isinstance(value, CODE):
                options[key] = _plain(value)
        # An option may be a tensor: a learning rate, for example.
        groups[name_in_stage] = copied_to("cpu", options)
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter in optimizer.state:
                state[name] = copied_to("cpu", optimizer.state[parameter])
    return {"state": state, "groups": groups, **_common(optimizer)}


def _plain(option: Any) -> Any:
    """An option that a checkpoint can hold: a number or string where it is an enumeration's, or
    NumPy's."""
    for kind in (bool, int, float, str):
        if isinstance(option, kind):
            return option.value if isinstance(option, Enum) else kind(option)
    return option


def _common(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """What an optimizer keeps for all its parameters together: `common_state` under keys that are
    no parameters (MADGRAD's `k`), and `further` entries of a state dict of its own (StableSPAM's
    `total_step`). Each is left out where there is none."""
    state = {key: kept for key, kept in optimizer.state.items() if not isinstance(key, Tensor)}
    further = {}
    if type(optimizer).state_dict not in (Optimizer.state_dict, BasisRotation.state_dict):
        for key, kept in optimizer.state_dict().items():
            if key not in ("state", "param_groups"):
                further[key] = kept
    common = {"common_state": state, "further": further}
    return {name: copied_to("cpu", kept) for name, kept in common.items() if kept}


def _add_common(packed: dict[str, Any], saved: dict[str, Any]) -> None:
    """Add what `_common` has saved to a state dict. Tensors stay on the CPU: the optimizers that
    keep such tensors count in them.

    Args:
        saved: of any one stage. Several devices have an optimizer each, which count alike.
    """
    packed["state"].update(copied_to("cpu", saved.get("common_state", {})))
    packed.update(copied_to("cpu", saved.get("further", {})))


def _named_groups(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """An optimizer's groups, each with a name that is unique in its stage: its `kind`, and from the
    second group of the kind on a number."""
    seen: Counter[tuple[int, str]] = Counter()
    for group in groups:
        kind = str(group.get("kind", "all"))
        key = group["stage"], kind
        seen[key] += 1
        number = seen[key]
        yield kind if number == 1 else f"{kind} {number}", group
