"""Hooks on a user's model: what becomes of them in a copy of the model, and when a pass ends.

Needs torch alone.
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import _WrappedHook
from torch.utils._pytree import tree_leaves

CALL = "_call_impl"
"""The function of `nn.Module` in which hooks and forward pass run."""
STATE_DICT = "state_dict"
"""The function of `nn.Module` that makes the state, and calls itself for the modules within."""
STEP = "wrapper"
"""The function that `torch.optim.Optimizer` puts around each `step`."""


class Hook:
    """Calls `action`. A copy of the model, or the model in a file, has `no_hook` in its place: it
    is a plain model.

    Args:
        action: called with the hook's arguments.
        before_copy: called with the memo of `copy.deepcopy` (empty for pickle) before the copy goes
            on. It may return a function, which is called when the copy is complete.
    """

    def __init__(
        self,
        action: Callable[..., Any],
        before_copy: Callable[[dict[int, Any]], Callable[[], None] | None],
    ) -> None:
        self._action = action
        self._before_copy = before_copy

    def __call__(self, *args: Any) -> None:
        self._action(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        after_copy = self._before_copy(memo)
        if after_copy is not None:
            at_end = AtEnd(after_copy)
            memo[id(at_end)] = at_end  # `deepcopy` drops its memo, and `at_end`, when it is done
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        after_copy = self._before_copy({})
        if after_copy is None:
            return _make_no_hook, ()
        # A pickler keeps what it has saved, and `torch.save` the pickler until the file is written.
        return _make_no_hook, (AtEnd(after_copy),)


def no_hook(*args: Any) -> None:
    """A hook that does nothing."""


def _make_no_hook(at_end: Any = None) -> Callable[..., None]:
    return no_hook


# A loop may load its whole model with `weights_only=True`, and name the classes of the model as
# safe. It does not know of these two. Torch itself puts hooks of `load_state_dict` into the second.
torch.serialization.add_safe_globals([_make_no_hook, _WrappedHook])


class AtEnd:
    """Runs an action once: when it is called, or else when the last reference to it goes. Pickled,
    it becomes `no_hook`."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._actions = [action]

    # Autograd calls it. If the program has compiled its whole training step, the compiler would
    # trace into it. `torch.compiler.disable` does the same, but loads the compiler on import.
    @_disable_dynamo
    def __call__(self) -> None:
        while self._actions:
            self._actions.pop()()

    __del__ = __call__

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_no_hook, ()


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call `action` when the backward pass that is running now ends."""
    torch.autograd.Variable._execution_engine.queue_callback(AtEnd(action))


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a bound method for as long as its object lives.

    For hooks of tensors. Python's garbage collector does not see what they refer to, so a hook that
    refers to an owner of its tensor would keep both alive for good. A compiled training step does
    not trace into the function.
    """
    reference = WeakMethod(method)

    @_disable_dynamo
    def call(*args: Any) -> None:
        living = reference()
        if living is not None:
            living(*args)

    return call


def current_task() -> int:
    """Autograd's number of the backward pass that is running in this thread; -1 if there is
    none."""
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return current_task() != -1


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` has made a module."""
    is_wrapper = hasattr(module, "_orig_mod")
    return is_wrapper or module._compiled_call_impl is not None


def has_saved_tensor_hooks() -> bool:
    """Whether what autograd saves goes through hooks now: activation checkpointing or `save_on_cpu`
    is around this pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_in_autograd_function() -> bool:
    """Whether a `torch.autograd.Function` that will have a backward pass is running its forward
    pass. Reentrant activation checkpointing is one: it runs without gradients, and the pass comes
    again in the backward pass."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward":
            contexts = [
                value for value in frame.f_locals.values() if isinstance(value, BackwardCFunction)
            ]
            # If gradients are off around the function, its context leads to no other function.
            if any(context.next_functions for context in contexts):
                return True
        frame = frame.f_back
    return False


def num_running(function: str, owner: object, thread: int | None = None) -> int:
    """How many calls of a method are on a thread's stack.

    Args:
        function: the method's name in the code.
        owner: the object whose method it is.
        thread: the thread's identifier; None: this thread.
    """
    count = 0
    frame: FrameType | None = inspect.currentframe()
    if thread is not None:
        frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_locals.get("self") is owner:
            count += 1
        frame = frame.f_back
    return count


def has_nonzero(gradient: Tensor) -> bool:
    """Whether a gradient, dense or sparse, has an element other than 0."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return bool(gradient.any())


def tensors_with_gradient(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward pass may begin at, wherever they are in
    nested lists, dictionaries and objects."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [output]
    while waiting:
        for leaf in tree_leaves(waiting.pop()):
            if isinstance(leaf, Tensor):
                if leaf.requires_grad:
                    tensors.append(leaf)
            elif id(leaf) not in seen:
                seen.add(id(leaf))
                waiting += fields(leaf)
    return tensors


def fields(value: Any) -> list[Any]:
    """The values of an object's attributes, including those in `__slots__`; none for a module of
    torch or Python, or a class: they hold much, and nothing that the pass has made."""
    if isinstance(value, torch.nn.Module | ModuleType | type):
        return []
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found.append(getattr(value, name))
    return found


def warn_user(message: str) -> None:
    """A warning that names the line of the user's program that led here."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(f"delayed: {message}", UserWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("brx", "torch", "copy", "contextlib")
