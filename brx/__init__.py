"""brx: train GPT, Llama or your own model under asynchronous pipeline parallelism, with basis
rotation against gradient delay.

`from brx import delayed, record` trains any model in any loop under delay (docs/own-model.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brx.pipeline.delayed import delayed as delayed
    from brx.train.own_loop import record as record

__all__ = ["delayed", "record"]

__version__ = "0.1.0"

_MODULE_OF = {"delayed": "brx.pipeline.delayed", "record": "brx.train.own_loop"}


def __getattr__(name: str) -> Any:
    # Import on first use: `import brx` alone loads no other package, and `delayed` only torch.
    if name in _MODULE_OF:
        import importlib

        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'brx' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Also the names that are not imported yet, for completion and `help(brx)`."""
    return [*globals(), *__all__]
