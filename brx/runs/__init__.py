"""What a run leaves on disk, and how it is read: folder, metrics, checkpoints, and many runs as pandas frames.

import brx.runs
runs = brx.runs.load("results/cpu")    # a DataFrame: a row per run
brx.runs.curves(runs)                  # a DataFrame: a row per run and iteration
"""

from brx.runs.frames import curves, load

__all__ = ["curves", "load"]
