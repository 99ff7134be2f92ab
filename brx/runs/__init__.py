"""What a run leaves on disk, and how it is read: folder, metrics, checkpoints, and many runs as
pandas frames.

import brx.runs
runs = brx.runs.load("results/similar")   # a DataFrame: a row per run
brx.runs.curves(runs)                     # a DataFrame: a row per run and iteration
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brx.runs.frames import curves, load

__all__ = ["curves", "load"]


def __getattr__(name: str) -> Any:
    """Import `curves` and `load` when asked for: what trains imports this package, and should not
    wait for pandas."""
    if name in __all__:
        from brx.runs import frames

        return getattr(frames, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Also the names that are not imported yet, for completion and `help(brx.runs)`."""
    return [*globals(), *__all__]
