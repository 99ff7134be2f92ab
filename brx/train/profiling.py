"""`brx train --profile`: a few iterations as a torch profiler trace, and the data loader's share of the time."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# Iterations that are left out (allocators, kernel choices), that warm the profiler up, and that are recorded.
WAIT, WARMUP, ACTIVE = 5, 2, 5


class IterationProfiler:
    """Records iterations 8 to 12 of a session into FOLDER/rank-R.json (open it in Perfetto or chrome://tracing).

    Named ranges: the schedule's actions (`0F8`: rank 0, forward pass of micro-batch 8; B: backward; U: update) and the
    stages within a forward pass.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.path)),
        )

    def step(self) -> None:
        """An iteration is over."""
        self._profile.step()

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.stop()
