"""Measures the activations that a block keeps for its backward pass and the operations that it
takes, by a forward pass on the meta device, where tensors have no values.

This module adds what a real device does differently: autocast's casts (torch has none for meta
tensors), and kernels that keep less than their definition says.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Functions that autocast runs in bf16, and in fp32 on CUDA, by name (torch's "Autocast Op
# Reference"; of the operators of Tensor, those that blocks use). Any other function computes in the
# dtype of its inputs.
IN_BF16 = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"}
IN_BF16 |= {"einsum", "conv1d", "conv2d", "conv3d", "chain_matmul", "multi_dot", "bilinear"}
IN_BF16 |= {"scaled_dot_product_attention"}
IN_FP32_ON_CUDA = {"layer_norm", "group_norm", "softmax", "log_softmax", "softplus", "cumsum"}
IN_FP32_ON_CUDA |= {"cumprod", "prod", "sum", "norm", "pow", "__pow__", "rsqrt", "reciprocal"}
IN_FP32_ON_CUDA |= {"exp", "expm1", "log", "log1p", "cross_entropy", "nll_loss"}


@dataclass(frozen=True)
class Trace:
    """What a module's forward pass costs."""

    kept_bytes: int
    """Activations that are kept for the backward pass."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention: two per
    multiply-add."""


def trace(
    module: nn.Module, inputs: Sequence[Tensor], *, bf16: bool, device_type: str
) -> tuple[Any, Trace]:
    """Run a module without numbers, and measure its forward pass.

    Args:
        module: the module, with its weights on the meta device.
        inputs: meta tensors.
        bf16: whether autocast to bf16 is on.
        device_type: the type of the device that is planned for.

    Returns:
        The module's output, and the trace.

    Raises:
        RandomNumbersError: the module draws random numbers.
        WrittenWeightError: the module changes a weight.
    """
    names = _by_address(module)
    weights = set(names)
    # Bytes by the address of a storage: a tensor that two operations keep counts once.
    kept: dict[int, int] = {}
    alive = []  # keeps the storages, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    device = _Device(weights, bf16=bf16, device_type=device_type)
    keeping = saved_tensors_hooks(keep, lambda tensor: tensor)
    with following_autocast(), keeping, _Counter(names) as counter, device:
        output = module(*inputs)
    return output, Trace(sum(kept.values()), counter.flops + device.flops)


def tried(module: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """Run a module without numbers, as it is: unlike `trace`, with torch's own kernels, so that a
    backward pass that computes something again gets the same tensors. Returns its output.

    Args and Raises: see `trace`.
    """
    with _Counter(_by_address(module)):
        return module(*inputs)


def _by_address(module: nn.Module) -> dict[int, str]:
    """The names of a module's weights by the addresses of their storages."""
    return {
        parameter.untyped_storage()._cdata: name for name, parameter in module.named_parameters()
    }


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which modules are made with their parameters on the meta device, without memory
    and values. Their buffers are real."""
    stand_ins = _StandIns()

    def on_meta(_module: nn.Module, _name: str, parameter: Any) -> Any:
        return parameter if parameter is None else stand_ins.of(parameter)

    hook = nn.modules.module.register_module_parameter_registration_hook(on_meta)
    try:
        with _WithoutInitialValues():
            yield
    finally:
        hook.remove()


def drop_values(model: nn.Module) -> None:
    """Move a model's parameters to the meta device; its buffers stay. A weight that several modules
    share stays one weight."""
    stand_ins = _StandIns()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, stand_ins.of(parameter))


class _StandIns:
    """Parameters on the meta device, one for each parameter that they stand for."""

    def __init__(self) -> None:
        # By the address of a parameter, itself and what stands for it. The original is kept, so
        # that no address is used twice.
        self._standing_for: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta or is_lazy(parameter):
            return parameter
        if id(parameter) not in self._standing_for:
            stand_in = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            self._standing_for[id(parameter)] = (parameter, stand_in)
        return self._standing_for[id(parameter)][1]


class _WithoutInitialValues(TorchFunctionMode):
    """Skips `torch.nn.init`: on the meta device it has no effect, but imports half of torch
    (2 s)."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else None
        return function(*args, **(kwargs or {}))


class MarkUninitialized(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new memory with NaN, so that a weight that nobody initializes can be told."""

    _EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    _DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        is_empty = getattr(function, "overloadpacket", function).__name__ in self._EMPTY
        if is_empty and output.dtype in self._DTYPES and not output.is_meta:
            output.fill_(math.nan)
        return output


_casting: list[bool] = []
"""Of the autocast contexts within the modules that run here, the innermost last: whether each casts
to bf16."""


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """`torch.autocast(device_type, enabled=False)`, which a trace respects, too."""
    if device_type == "meta":
        return _without_casting()
    return torch.autocast(device_type, enabled=False)


@contextmanager
def _without_casting() -> Iterator[None]:
    _casting.append(False)
    try:
        yield
    finally:
        _casting.pop()


def _is_casting() -> bool:
    """Whether functions run under autocast to bf16 here, if the run does."""
    return not _casting or _casting[-1]


@contextmanager
def following_autocast() -> Iterator[None]:
    """Let a user's module use `torch.autocast` on the meta device, for which torch has none, and
    note what it switches on or off.

    Modules keep a part in fp32 with `torch.autocast(x.device.type, enabled=False)`.
    """
    kind: Any = torch.autocast
    originals = {name: getattr(kind, name) for name in ("__init__", "__enter__", "__exit__")}

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        # The CPU's autocast leaves meta tensors alone.
        there = "cpu" if device_type == "meta" else device_type
        originals["__init__"](self, there, dtype, enabled, cache_enabled)
        self.casts_to_bf16 = enabled and dtype in (None, torch.bfloat16)

    def enter(self: Any) -> Any:
        # A context from before this block (a decorator's) has not noted it.
        _casting.append(getattr(self, "casts_to_bf16", self._enabled))
        return originals["__enter__"](self)

    def leave(self: Any, *error: Any) -> Any:
        _casting.pop()
        return originals["__exit__"](self, *error)

    kind.__init__, kind.__enter__, kind.__exit__ = init, enter, leave
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations as `torch.utils.flop_counter` does, and refuses random numbers
    (RandomNumbersError) and changes of weights (WrittenWeightError).

    Args:
        weights: the names of the weights by the addresses of their storages.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._weights = weights

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        count = flop_registry.get(function.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise RandomNumbersError(function.overloadpacket.__name__)
        self._check_written(function, args, kwargs or {})
        return output

    def _check_written(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """WrittenWeightError if an operation has changed a weight in place."""
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(written):
                if not isinstance(tensor, Tensor):
                    continue
                name = self._weights.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    raise WrittenWeightError(name)


def not_always_cast(module: nn.Module, inputs: Sequence[Tensor]) -> set[str]:
    """The names of the weights that autocast to bf16 does not cast wherever a module's forward pass
    uses them: those that it gives to other functions than `linear`, that it uses where it has
    switched autocast off, or whose use is not seen.

    Args:
        module: its weights are on the meta device.
        inputs: meta tensors.
    """
    uses = _Uses(module)
    with following_autocast(), uses:
        module(*inputs)
    names = {name for name, _ in module.named_parameters()}
    return uses.uncast | (names - uses.cast)


class _Uses(TorchFunctionMode):
    """Sees which weights are used where autocast casts them, and where it does not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.cast: set[str] = set()
        self.uncast: set[str] = set()
        self._names = {id(weight): name for name, weight in module.named_parameters()}

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        uses = self.cast if function is linear and _is_casting() else self.uncast
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._names:
                uses.add(self._names[id(value)])
        return function(*args, **(kwargs or {}))


class RandomNumbersError(Exception):
    """A forward pass draws random numbers, by the operation of this name."""


class WrittenWeightError(Exception):
    """A forward pass changes the weight of this name."""


class _Device(TorchFunctionMode):
    """Does on meta tensors what a device does: autocast's casts, and attention and norms that keep
    what the fused kernels keep.

    Args:
        weights: the addresses of the weights' storages; casts of weights are added.
        bf16: whether autocast to bf16 is on.
        device_type: "cuda", or another device.
    """

    def __init__(self, weights: set[int], *, bf16: bool, device_type: str) -> None:
        super().__init__()
        self.flops = 0  # what attention takes, which `_Counter` does not see
        self._weights = weights
        self._bf16 = bf16
        self._is_cuda = device_type == "cuda"
        self._cast_weights: dict[int, Tensor] = {}
        # The stand-ins for torch's functions, by the functions' names.
        self._kernels: dict[str, Callable[..., Tensor]] = {
            "scaled_dot_product_attention": self._attention
        }
        if self._is_cuda:
            self._kernels["rms_norm"] = _rms_norm

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        kwargs = kwargs or {}
        dtype = self._autocast_dtype(name)
        if dtype is not None:
            args = [self._cast(value, dtype) for value in args]
            kwargs = {key: self._cast(value, dtype) for key, value in kwargs.items()}
        kernel = self._kernels.get(name, function)
        return kernel(*args, **kwargs)

    def _autocast_dtype(self, name: str) -> torch.dtype | None:
        """The dtype to which autocast casts the inputs of a function; None if it leaves them."""
        is_casting = self._bf16 and _is_casting()
        if is_casting and name in IN_BF16:
            return torch.bfloat16
        if is_casting and self._is_cuda and name in IN_FP32_ON_CUDA:
            return torch.float32
        return None

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """An argument as autocast would pass it on."""
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.bfloat16):
            return value
        if value.dtype == dtype:
            return value
        storage = value.untyped_storage()._cdata
        if storage not in self._weights:
            return value.to(dtype)
        # autocast casts a weight once and keeps the copy, which is not an activation.
        if storage not in self._cast_weights:
            cast = value.to(dtype)
            self._cast_weights[storage] = cast
            self._weights.add(cast.untyped_storage()._cdata)
        return self._cast_weights[storage]

    def _attention(
        self,
        query: Tensor,  # (*, H, S, E)
        key: Tensor,  # (*, K, T, E)
        value: Tensor,  # (*, K, T, F)
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **_others: Any,
    ) -> Tensor:
        """Stands for `scaled_dot_product_attention`: (*, H, S, F)."""
        if dropout_p:
            raise RandomNumbersError("scaled_dot_product_attention with dropout")
        # 2 T (E + F) per query, for Q K^T and its product with V: a multiply-add is two. Heads that
        # share keys still compute a product each.
        per_query = 2 * key.shape[-2] * (key.shape[-1] + value.shape[-1])
        self.flops += query.shape[:-1].numel() * per_query
        trained_mask = None  # a bias by the distance, for example
        if attn_mask is not None and attn_mask.requires_grad:
            trained_mask = attn_mask
        return _Attention.apply(query, key, value, trained_mask)  # type: ignore[no-untyped-call, no-any-return]


class _Attention(torch.autograd.Function):
    """Keeps what fused attention keeps: its inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, trained_mask: Tensor | None
    ) -> Tensor:
        *batch, heads, positions, _ = query.shape
        # By position, then head in memory, as the kernels lay it out.
        output = query.new_empty((*batch, positions, heads, value.shape[-1])).transpose(-3, -2)
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        kept = [query, key, value, output, log_sum_exp]
        if trained_mask is not None:
            kept.append(trained_mask)
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, *mask = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value, *mask)]
        return (*gradients, None)[:4]


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Stands for `rms_norm`."""
    weight = x.new_empty(tuple(shape)) if weight is None else weight
    return _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


class _RMSNorm(torch.autograd.Function):
    """Keeps what CUDA's fused kernel keeps: its inputs and a factor per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        factor = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, factor)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
