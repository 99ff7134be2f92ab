"""Fast products of bf16 matrices on CPUs without instructions for them.

Muon's and Scion's Newton-Schulz iteration runs in bf16. Without AVX-512 (or bf16 instructions on
ARM), torch multiplies bf16 matrices in a plain loop, which takes ten to twenty times as long as a
product in fp32. Such a loop adds up in fp32 and rounds the sum to bf16. A product in fp32 of the
same numbers, rounded afterwards, is the same but for the order of the sum.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    *(torch.mm, torch.bmm, torch.matmul, torch.addmm, torch.baddbmm),
    *(Tensor.mm, Tensor.bmm, Tensor.matmul, Tensor.addmm, Tensor.baddbmm),
    Tensor.__matmul__,  # the operator @
}


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN, torch's library for it, multiplies bf16 matrices on this processor."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fast_bf16_products(parameters: Iterable[Tensor]) -> AbstractContextManager[object]:
    """A context in which a step on these parameters multiplies bf16 matrices fast: `Fp32Products`
    where they are on a CPU that needs it, else one that does nothing."""
    if cpu_multiplies_bf16():
        return nullcontext()
    if not any(parameter.device.type == "cpu" for parameter in parameters):
        return nullcontext()
    return Fp32Products()


class Fp32Products(TorchFunctionMode):
    """Multiply bf16 matrices on the CPU in fp32, and round the results to bf16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func not in PRODUCTS or not all(_is_bf16_on_cpu(arg) for arg in args):
            return func(*args, **options)
        out = options.pop("out", None)
        product = _in_fp32(func, args, options)
        if out is None:
            return product.bfloat16()
        return out.copy_(product)


def _in_fp32(
    multiply: Callable[..., Tensor], matrices: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    in_fp32 = {id(matrix): matrix.float() for matrix in matrices}  # some come twice
    return multiply(*(in_fp32[id(matrix)] for matrix in matrices), **options)


def _is_bf16_on_cpu(argument: Any) -> bool:
    return (
        isinstance(argument, Tensor)
        and argument.dtype == torch.bfloat16
        and argument.device.type == "cpu"
    )


def with_fast_bf16_products(kind: type[Optimizer]) -> type[Optimizer]:
    """A subclass of an optimizer whose steps run in `fast_bf16_products`."""

    class WithFastProducts(kind):  # type: ignore[valid-type, misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            parameters = [weight for group in self.param_groups for weight in group["params"]]
            with fast_bf16_products(parameters):
                return step_without_hooks(kind)(self, closure)

    WithFastProducts.__name__ = WithFastProducts.__qualname__ = kind.__name__
    return WithFastProducts


def step_without_hooks(kind: type[Optimizer]) -> Callable[..., Any]:
    """The `step` of a class of optimizers, for the `step` of a subclass to call.

    torch wraps the `step` of every class to call the hooks. The subclass's is wrapped already, so
    that a second wrapper would call them twice."""
    step: Any = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return cast(Callable[..., Any], step)
