"""`delayed`: trains any model, in any training loop, under the delay of a pipeline. Needs torch
alone.

It works by hooks. A training forward pass opens a *window*; the end of its backward pass closes it.
In between, the parameters hold the versions that docs/semantics.md names. An example is at the top
of `windows`. The parts:

- `delayed_arguments`: the forms in which arguments may be given;
- `cut`: which parameter belongs to which stage; `model_cut`: when that is known; `use_order`: in
  which order the model uses its parameters;
- `history`: the older versions, and how parameters get one (on the engine's own slots);
- `windows`: when a window opens and closes, and when an update has happened;
- `copy_hooks`: copies of the model and its state dict have the newest weights;
- `self_check`: what the first updates show of a loop; `model_form`: whether the model has changed;
- `saved_versions`: the versions in a checkpoint; `delayed_text`: the text of a pipeline;
- here: what users call, then the hooks, in the order in which a loop runs them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from numbers import Integral
from threading import get_ident
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brx.errors import UserError, some
from brx.pipeline.copy_hooks import CopyHooks
from brx.pipeline.cut import Stages, check_stages, is_known_before_use, stage_map, trained_names
from brx.pipeline.delay import StageDelay
from brx.pipeline.delayed_arguments import (
    check_settings,
    checked_delays,
    has_stepped,
    is_whole,
    optimized,
    optimizers_in,
    without_arrays,
)
from brx.pipeline.delayed_text import overview
from brx.pipeline.forecasts import FORECAST_RULES, Forecast, StashMode
from brx.pipeline.history import History, StageHistory, contents
from brx.pipeline.hooks import (
    CALL,
    Hook,
    has_saved_tensor_hooks,
    is_capturing,
    is_compiled,
    is_in_autograd_function,
    is_in_backward,
    num_running,
    tensors_with_gradient,
    warn_user,
    weakly,
)
from brx.pipeline.model_cut import ModelCut
from brx.pipeline.model_form import (
    ModelForm,
    refuse_inference,
    refuse_lazy,
    refuse_memory_of_processes,
    refuse_shared_memory,
)
from brx.pipeline.saved_versions import load_initial, load_stage, stage_state
from brx.pipeline.self_check import SelfCheck
from brx.pipeline.sharded import drop_gathered, gathers_parameters
from brx.pipeline.use_order import UseOrder, on_meta_device
from brx.pipeline.windows import Window, Windows

# The models that are under delay already. A pipeline holds its model, so a strong reference to it
# would keep the model for good.
_DELAYED: WeakKeyDictionary[nn.Module, ReferenceType["DelayedPipeline"]] = WeakKeyDictionary()

WITH_FULLGRAPH = "delayed: with fullgraph=True, give it the compiled model: torch.compile(model)"
"""The reason that torch gives in its error if a compiled graph would have to contain the hooks."""


class DelayedPipeline:
    """Makes a model train as an asynchronous pipeline of its stages would train it, while the
    training loop stays as it is.

        pipeline = delayed(model, optimizer, stages=32)

    From a training forward pass (training mode, gradients on) to the end of its backward pass, each
    parameter holds the version that its stage would compute with; at all other times, and in
    evaluation, it holds the newest. Version t is what the weights are when the first pass of the
    next update begins. Buffers (running means) are not versioned.

    Args:
        model: called as a whole: `model(batch)`, whatever it takes and returns. DDP, FSDP or
            torch.compile may wrap it. Parts of it are called within `with pipeline.micro_batch():`.
        optimizer: the torch optimizer that trains the model, or a list of them. Wrappers of
            optimizers will do, too.
        stages: P, which cuts the model's blocks (or layers) evenly in the order in which its first
            forward pass uses them; or a mapping from parameter names or their prefixes
            (`blocks.3`), or a function of the name, to the stage, counted from 0
            (docs/own-model.md).
        delay: as in the section `pipeline` of a configuration (docs/semantics.md). A list may be an
            array.
        accumulation: M, the micro-batches (forward and backward passes) per update. All passes
            beyond M use the version of the M-th: with 1, all passes of update t use version
            t - 1 - tau.
        stash: what a backward pass computes with, as in a configuration.
        forecast: both passes compute with expected weights, as in a configuration.
        rings: where older versions are kept: `device`, or `host` memory.
        seed: passed to a delay function.
        example: inputs of a forward pass (a tuple, or a dictionary of keyword arguments). With them
            the order in which the model uses its parameters is known at once, from a pass on the
            meta device.

    `updates` is t, the updates so far. `by_stage` has the names of each stage's parameters.

    Raises:
        UserError: a setting is wrong, parameters cannot be assigned to stages, or the optimizer has
            parameters that are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        stages: Stages,
        delay: Any = "pipeline",
        *,
        accumulation: int = 1,
        stash: StashMode = "exact",
        forecast: Forecast | None = None,
        rings: Literal["device", "host"] = "device",
        seed: int = 0,
        example: Any = None,
    ) -> None:
        _check_model(model)
        check_settings(accumulation, stash, forecast, rings)
        if is_whole(stages):
            stages = int(stages)  # type: ignore[arg-type]
        self.model = model
        self._optimizers = optimizers_in(optimizer)
        names = trained_names(model, optimized(self._optimizers))
        check_stages(model, names, stages)
        named = dict(model.named_parameters())
        self._trained = {name: named[name] for name in names}
        _refuse_shared(self._trained)
        refuse_lazy(self._trained)
        refuse_inference(self._trained)
        self._form = ModelForm(model, self._optimizers)
        self._sharded = [module for module in model.modules() if gathers_parameters(module)]
        self._given_delay = without_arrays(delay)
        self._accumulation = int(accumulation)
        self._stash = stash
        self._forecast = forecast
        self._on_host = rings == "host"

        order = UseOrder(named) if example is None else on_meta_device(model, example)
        self._cut = ModelCut(model, names, stages, order)
        if is_known_before_use(stages) or example is not None:
            self._cut.decide()
        num_stages = stages if isinstance(stages, int) else len(self.by_stage)
        self._delays = checked_delays(self._given_delay, num_stages, self._accumulation, seed)
        self._has_delay = any(delay.tau for delay in self._delays)

        # Parameters that do not train are looked at only if those that train have a delay.
        others = {}
        if self._has_delay:
            others = {name: named[name] for name in named if name not in self._trained}
        self._check = SelfCheck(self._trained, self._accumulation, others)
        self._windows = Windows(
            self._trained, self._accumulation, self._make_history, self._check, self._delayed_among
        )

        # The call of the model that is running now; `_before_forward` sets these.
        self._depth = 0  # how many calls are within each other: the model may call itself
        self._thread = get_ident()  # which thread has made the outermost one
        self._is_training_pass = False  # whether the outermost one is a micro-batch's

        # Modules that hold parameters of a stage with a delay, once the versions are made.
        self._parts_with_delay: set[nn.Module] = set()
        self._copies = CopyHooks(
            self._windows,
            list(self._trained.values()),
            is_in_evaluation=lambda: self._depth > 0 and not self._is_training_pass,
            running_elsewhere=self._running_elsewhere,
        )
        self._hooks: list[Any] = []
        self._gradient_hooks: list[Any] = []
        self._add_hooks()
        _DELAYED[model] = ref(self)

    # What users ask

    @property
    def updates(self) -> int:
        """t, the updates so far."""
        return self._windows.updates

    @property
    def by_stage(self) -> list[list[str]]:
        """The names of each stage's parameters that train; UserError while they are not known
        yet."""
        return self._cut.by_stage

    def delays(self) -> list[StageDelay]:
        """The delay of each stage."""
        return self._delays

    def delay_of(self, parameter: Tensor) -> float:
        """The delay of a parameter's stage, tau in updates, for a learning-rate rule. 0 for a
        parameter that does not train."""
        return self._tau_updates_by_id.get(id(parameter), 0.0)

    @cached_property
    def _tau_updates_by_id(self) -> dict[int, float]:
        """The delay in updates by id of a parameter, for the many calls of a rule."""
        tau_of: dict[int, float] = {}
        for names, delay in zip(self.by_stage, self._delays, strict=True):
            for name in names:
                tau_of[id(self._trained[name])] = delay.tau_updates
        return tau_of

    def _delayed_among(self, names: list[str]) -> list[str]:
        """Those of the given names whose parameters are in a stage with a delay; none while the
        stages are not known."""
        if not self._has_delay or not self._cut.is_known:
            return []
        return [name for name in names if self.delay_of(self._trained[name])]

    def settings(self) -> dict[str, Any]:
        """The pipeline's settings, in the form of the section `pipeline` of a run's
        configuration."""
        settings = {
            "stages": len(self._delays),
            "delay": self._delay_setting(),
            "accumulation": self._accumulation,
            "stash": self._stash,
            "forecast": self._forecast,
        }
        if self._cut.is_known and len(self._delays) > 1:
            prefixes: list[list[str]] = [[] for _ in self._delays]  # by stage
            for prefix, stage in stage_map(self.by_stage).items():
                prefixes[stage].append(prefix)
            settings["cut"] = [" ".join(of_stage) for of_stage in prefixes]
        return settings

    def _delay_setting(self) -> Any:
        given = self._given_delay
        if callable(given) or isinstance(given, list | tuple):
            return [delay.tau for delay in self._delays]  # a function's largest values
        if isinstance(given, Integral):  # numpy's integers, too
            return int(given)
        if isinstance(given, dict):
            return {"like": int(given["like"])}
        return given

    def stage_map(self) -> dict[str, int]:
        """The stage by prefixes of parameter names, as short as they can be. `delayed` takes it as
        `stages`.

        In stages without a parameter that trains, it names the frozen and the tied ones, so that it
        has all stages."""
        return self._cut.stage_map()

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Open a window explicitly, for loops that call parts of the model instead of the whole:

            with pipeline.micro_batch():
                loss = loss_of(model.decode(model.encode(x)))
                loss.backward()
            optimizer.step()

        All passes in this context that are in training mode or have gradients use the versions of
        one micro-batch. So does `functional_call` with the model's weights. Passes that are neither
        (an evaluation) have the newest weights. The window closes at the end of the context, or at
        an optimizer's step."""
        if self._stash != "exact":
            raise UserError(f"delayed: micro_batch() needs stash exact, got {self._stash}")
        if self._windows.is_explicit_open:  # within another one, whose window goes on
            yield
            return
        window = self._open(is_explicit=True)
        try:
            yield
        except BaseException:
            self._windows.break_off(window)
            raise
        self._windows.end(window)
        self._windows.raise_problem()

    def remove(self) -> None:
        """Remove the hooks: from here on the model trains without delay."""
        self._windows.close()
        for hook in (*self._hooks, *self._gradient_hooks):
            hook.remove()
        _DELAYED.pop(self.model, None)

    def state_dict(self) -> dict[str, Any]:
        """The older versions, for a checkpoint next to the model's and the optimizer's states (no
        copies). It may be taken at any moment; in the middle of an update, the parameters'
        gradients have to be saved as well."""
        windows = self._windows
        history = windows.versions.history
        stages = [] if history is None else [stage_state(stage) for stage in history.stages]
        is_pending = windows.is_pending
        if windows.versions.has_begun:
            # The pass that follows would decide it; in a resumed process it would be the first one.
            self._cut.decide_if_known()
        num_windows, num_backward = windows.passes_to_save()
        return {
            "updates": self.updates,
            "is_pending": is_pending,
            **self._settings_in_state(),
            "by_stage": self._cut.decided,
            "stages": stages,
            # After the first update there is no history yet, and no other trace of version 0.
            "initial": windows.versions.initial if is_pending else None,
            "num_windows": num_windows,
            "num_backward": num_backward,
        }

    def _settings_in_state(self) -> dict[str, Any]:
        return {
            "accumulation": self._accumulation,
            "stash": self._stash,
            "forecast": self._forecast,
            "delays": [delay.tau for delay in self._delays],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Load the model's own weights before.

        Raises:
            ValueError: the state is of another model, delay, accumulation, stash mode or forecast,
                or no state of a pipeline at all.
        """
        wanted = ("updates", "is_pending", "accumulation", "by_stage", "stages")
        missing = [key for key in wanted if key not in state]
        if missing:
            raise ValueError(f"no state of a delayed pipeline: {', '.join(missing)} missing")
        self._check_settings_of(state)
        if state["by_stage"] is not None:
            self._cut.take_over(state["by_stage"], len(self._delays))
        is_pending = bool(state["is_pending"])
        recorded = state["updates"]  # as versions
        if is_pending:
            recorded -= 1
        history = initial = None
        if state["stages"] or recorded:
            history = self._load_history(state["stages"])
        elif is_pending:
            now = self._contents_by_name()
            initial = load_initial(state.get("initial"), now, has_delay=self._has_delay)
        self._windows.restart(
            recorded,
            history,
            is_pending=is_pending,
            initial=initial,
            num_windows=state.get("num_windows", 0),
            num_backward=state.get("num_backward", 0),
        )

    def _check_settings_of(self, state: Mapping[str, Any]) -> None:
        """ValueError if a state was saved under other settings: its versions may fit into the slots
        all the same."""
        for name, own in self._settings_in_state().items():
            saved = state.get(name, own)  # earlier versions of brx saved the accumulation alone
            if name == "delays" and len(saved) != len(own):
                continue  # another number of stages, which `ModelCut.take_over` reports
            if saved != own:
                raise ValueError(f"the state is of {name} {saved}, not {own}")

    def _load_history(self, saved: Sequence[Mapping[str, Any]]) -> History:
        """The versions of a saved state."""
        history = self._make_history(self._contents_by_name())
        if len(history.stages) != len(saved):
            raise ValueError("the state comes from a pipeline with other delays")
        for stage, saved_stage in zip(history.stages, saved, strict=True):
            load_stage(stage, saved_stage)
        return history

    def _contents_by_name(self) -> dict[str, Tensor]:
        """What the parameters hold now, by name."""
        return {name: contents(parameter) for name, parameter in self._trained.items()}

    def __deepcopy__(self, memo: object) -> None:
        warn_user("a copy of the model is a plain one, without delay; call delayed on it")

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_pipeline, ()

    def __str__(self) -> str:
        by_stage = self.by_stage if self._cut.is_known else None
        remarks = []
        if self._check.passes_met:
            remarks.append(self._check.summary([delay.tau_updates for delay in self._delays]))
        return overview(self.model, self._trained, self._delays, by_stage, remarks)

    # The versions

    def _make_history(self, initial: Mapping[str, Tensor]) -> History:
        """The stages' versions, all of them `initial`."""
        if self._cut.decided is None:
            self._cut.decide()
        refuse_shared_memory(self._trained, self.by_stage, self._delays)
        refuse_memory_of_processes(self._trained, self.by_stage, self._delays)
        stages = []
        for names, delay in zip(self.by_stage, self._delays, strict=True):
            if names and delay.tau:
                stages.append(self._make_stage_history(names, delay, initial))
        if self._stash != "exact" and stages and any(map(is_compiled, self.model.modules())):
            warn_user(
                f"stash {self._stash} under torch.compile: a compiled graph may compute activations"
                " again in its backward pass, from newer weights; compare with a run without it"
            )
        delayed_ids = {id(weight) for stage in stages for weight in stage.parameters}
        self._parts_with_delay.clear()
        for holder in self._form.holders:
            if id(holder.parameter) in delayed_ids:
                self._parts_with_delay.add(holder.module)
        return History(stages, self._stash, before_move=self._drop_gathered)

    def _make_stage_history(
        self, names: Sequence[str], delay: StageDelay, initial: Mapping[str, Tensor]
    ) -> StageHistory:
        return StageHistory(
            names,
            [self._trained[name] for name in names],
            delay,
            [initial[name] for name in names],
            self._stash,
            None if self._forecast is None else FORECAST_RULES[self._forecast],
            on_host=self._on_host,
        )

    def _drop_gathered(self) -> None:
        """Under FSDP: modules that keep whole parameters after a pass must gather them again."""
        for module in self._sharded:
            drop_gathered(module)

    # Hooks

    def _add_hooks(self) -> None:
        # A compiled model calls the hooks between its graphs.
        disable = partial(torch.compiler.disable, reason=WITH_FULLGRAPH)
        before_copy = self._copies.before_copy

        def hook(action: Callable[..., Any]) -> Hook:
            return Hook(disable(action), before_copy)

        model = self.model
        before, after = hook(self._before_forward), hook(self._after_forward)
        self._hooks.append(model.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(model.register_forward_hook(after, always_call=True))
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no such hooks
                continue
            copies = self._copies
            self._hooks.append(
                module.register_load_state_dict_pre_hook(hook(copies.before_load))  # type: ignore[no-untyped-call]
            )
            self._hooks.append(
                module.register_state_dict_pre_hook(hook(copies.before_state_dict))  # type: ignore[no-untyped-call]
            )
            self._hooks.append(
                module.register_state_dict_post_hook(hook(copies.after_state_dict))  # type: ignore[no-untyped-call]
            )
        if self._stash != "exact" and self._has_delay:
            parts = [holder.module for holder in self._form.holders]
            for module in dict.fromkeys(parts):  # each of them once
                # Not disabled for torch.compile: that would break the graph in every layer.
                before_part = Hook(self._before_part, before_copy)
                self._hooks.append(module.register_forward_pre_hook(before_part))
        self._add_gradient_hooks()
        for each in self._optimizers:
            self._hooks.append(each.register_step_pre_hook(disable(self._before_step)))
            self._hooks.append(each.register_step_post_hook(disable(self._after_step)))

    # A forward pass begins

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if module is not self.model:  # a copy that torch makes has the hooks, too
            if getattr(module, "_is_replica", False):
                raise UserError("delayed: DataParallel computes with copies; use DDP")
            return
        self._refuse_other_threads()
        if self._depth and num_running(CALL, self.model) < 2:
            self._depth = 0  # the last pass was interrupted (Ctrl-C), which no hook sees
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = get_ident()
        self._is_training_pass = self._is_of_micro_batch(module)
        if not self._is_training_pass:
            self._windows.peek()
        elif is_in_backward():
            self._windows.recompute()
        else:
            self._open()

    def _refuse_other_threads(self) -> None:
        """UserError for a pass while another thread is in a pass: it would exchange the weights
        that the other one computes with."""
        running = self._running_elsewhere()
        if running is None:
            return
        self._depth += 1  # `_after_forward` runs even so, and takes it back
        raise UserError(
            f"delayed: the model is called while its {running} pass runs in another thread; take a "
            "lock around both passes, or let the other thread call a copy (copy.deepcopy(model))"
        )

    def _running_elsewhere(self) -> str | None:
        """Which pass of the model is running in another thread, if any."""
        window = self._windows.current
        is_in_forward = self._depth and self._thread != get_ident()
        if is_in_forward and num_running(CALL, self.model, self._thread):
            return "forward"
        if window is not None and window.is_in_backward and not is_in_backward():
            return "backward"
        return None

    def _is_of_micro_batch(self, module: nn.Module) -> bool:
        """Whether a call of the model is a pass of a micro-batch, not an evaluation."""
        has_gradients = torch.is_grad_enabled()
        if self._windows.is_explicit_open:
            # This includes training in eval mode, and passes without gradients that are repeated
            # with gradients later.
            return module.training or has_gradients
        return module.training and (has_gradients or is_in_autograd_function())

    def _open(self, *, is_explicit: bool = False) -> Window:
        """Open the window of a micro-batch, or return the one that is open already."""
        self._drop_gathered()
        # Within `micro_batch()`, functional_call may have put other tensors into the model.
        if not self._windows.is_explicit_open:
            self._form.check()
            self._refuse_autocast()
        self._refuse_capture()
        self._remove_needless_gradient_hooks()
        self._warn_of_lost_versions()
        return self._windows.open(is_explicit=is_explicit)

    def _refuse_autocast(self) -> None:
        """UserError if autocast is on although the stash does not allow it."""
        device = next(iter(self._trained.values())).device.type
        if self._stash != "exact" and torch.is_autocast_enabled(device):
            raise UserError(
                f"delayed: stash {self._stash} needs autocast off: it saves a copy of the weights"
            )

    def _refuse_capture(self) -> None:
        """UserError if a CUDA graph captures a pass. Its replays run no hooks."""
        device = next(iter(self._trained.values())).device
        if self._has_delay and is_capturing(device):
            raise UserError(
                "delayed: a CUDA graph of the training loop would repeat the versions of the pass "
                "that it captures; capture nothing, or the model alone before delayed "
                "(torch.cuda.make_graphed_callables)"
            )

    def _warn_of_lost_versions(self) -> None:
        """Warn if the optimizer has been resumed, but the pipeline starts afresh."""
        # Within its step, LBFGS already has its state when it calls the first forward pass.
        if self._windows.versions.has_begun or self._windows.is_in_step:
            return
        if self._has_delay and any(map(has_stepped, self._optimizers)):
            warn_user(
                "the optimizer has made steps already, but the pipeline is new: it does not know "
                "the older versions, and takes the present weights for them; to continue a run, "
                "also load its pipeline.state_dict()"
            )

    def _before_part(self, module: nn.Module, args: Any) -> None:
        """Under `none` and `predict`: UserError if a part of the model, in a stage with a delay,
        will not have what its forward pass saves in its backward pass.

        Activation checkpointing computes it again, from newer weights. Where a copy of a weight is
        saved (`save_on_cpu`), the backward pass computes with the old one."""
        if torch.compiler.is_compiling():
            return
        window = self._windows.current
        if module not in self._parts_with_delay or window is None or self._windows.is_peeking:
            return
        is_again = window.shows_backward_weights and is_in_backward()
        if is_again or (torch.is_grad_enabled() and has_saved_tensor_hooks()):
            raise UserError(
                f"delayed: stash {self._stash} needs activations and weights as autograd saves "
                "them; turn off activation checkpointing, save_on_cpu and other saved-tensor hooks "
                f"around {type(module).__name__}, or take stash exact"
            )

    # It ends

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.model:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        if self._is_training_pass:
            self._after_training_pass(output)
        else:
            self._after_evaluation(output)

    def _after_training_pass(self, output: Any) -> None:
        """Have the outputs announce the backward pass."""
        tensors = [t for t in tensors_with_gradient(output) if t.grad_fn is not None]
        self._cut.see_output(tensors)
        self._windows.check_forward()
        window = self._windows.current
        if output is None or window is None:
            return
        if not tensors and torch.is_grad_enabled() and self._stash != "exact":
            self._refuse_unknown_output()
        window.announces_backward |= bool(tensors)
        before_backward = weakly(self._before_backward)
        for tensor in tensors:  # whichever is reached first begins the backward pass
            tensor.register_hook(partial(before_backward, window))  # type: ignore[no-untyped-call]

    def _refuse_unknown_output(self) -> None:
        raise UserError(
            f"delayed: stash {self._stash} needs to know where the backward pass begins, but the "
            "model's output holds no tensor with a gradient; return tensors, lists, dicts or data "
            "classes of them"
        )

    def _after_evaluation(self, output: Any) -> None:
        self._windows.end_peek()
        if not self._has_delay or not torch.is_grad_enabled():
            return
        # It may have a backward pass (an attack on the model). That needs the newest weights, even
        # if a window is open by then.
        before_backward = weakly(self._before_backward_of_evaluation)
        for tensor in tensors_with_gradient(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]

    # A backward pass

    def _before_backward(self, window: Window, gradient: Tensor) -> None:
        self._windows.begin_backward(window)

    def _before_backward_of_evaluation(self, gradient: Tensor) -> None:
        self._windows.peek_in_backward()

    def _add_gradient_hooks(self) -> None:
        """Register hooks that see gradients arrive: whether they do so in a window and, during the
        first updates, which ones and in which order."""
        see_gradient = weakly(self._see_gradient)
        for name, parameter in self._trained.items():
            action = partial(see_gradient, name)
            # A frozen parameter may be unfrozen later, but torch takes no hook while it is frozen.
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)
            self._gradient_hooks.append(
                parameter.register_post_accumulate_grad_hook(action)  # type: ignore[no-untyped-call]
            )
            parameter.requires_grad_(requires_grad)

    def _remove_needless_gradient_hooks(self) -> None:
        """Once the first updates are checked, and if no stage has a delay: then it does not matter
        whether a gradient arrives in a window."""
        if self._gradient_hooks and not self._has_delay and not self._check.is_on:
            for hook in self._gradient_hooks:
                hook.remove()
            self._gradient_hooks = []

    def _see_gradient(self, name: str, parameter: Tensor) -> None:
        window = self._windows.current
        if window is not None and not self._windows.is_peeking:
            if self._stash != "exact" and self._has_delay and not window.announces_backward:
                self._refuse_unknown_output()
            self._windows.see_gradient()
        elif self._has_delay:
            self._check.see_stray_gradient(name)
        if self._check.is_on:
            self._check.see_gradient(name)
        self._cut.see_gradient(name)

    # A step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth = 0  # where a forward pass was interrupted
        takes_closure = any(callable(argument) for argument in (*args, *kwargs.values()))
        self._windows.before_step(optimizer, takes_closure=takes_closure)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._windows.after_step(optimizer)


def _refuse_shared(trained: Mapping[str, Tensor]) -> None:
    """UserError for a parameter that another pipeline delays already."""
    for other, reference in _DELAYED.items():
        pipeline = reference()
        if pipeline is None:
            continue
        ids = {id(parameter) for parameter in pipeline._trained.values()}
        shared = [name for name, parameter in trained.items() if id(parameter) in ids]
        if shared:
            raise UserError(
                f"delayed: {some(shared)} under delay already, as part of another model "
                f"({type(other).__name__}); put both models into one module, and call delayed on it"
            )


def _no_pipeline() -> None:
    """What a pickled pipeline becomes: a saved model has none."""


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"delayed: model must be a torch.nn.Module, got {type(model).__name__}")
    if model in _DELAYED:
        raise UserError(
            "delayed: the model is under delay already; call remove() of its pipeline first"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            "delayed: a scripted module takes no hooks; pass nn.Sequential(model), and call it"
        )


delayed = DelayedPipeline
