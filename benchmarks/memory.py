"""Peak memory of short trainings against what `brx plan` says.

On CUDA the measured peak is that of the allocator. On CPUs it is the largest sum of live allocations of torch's CPU
allocator, as torch.profiler records each of them (resident memory would count Python, libraries and malloc's reserves).

    python -m benchmarks.memory [--tiny]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from brx.config.schema import RunConfig
from brx.optim.updater import MethodUpdater
from brx.pipeline.engine import Engine
from brx.train.device import autocast
from brx.train.loop import build_stages


def measured_peak(config: RunConfig, device: torch.device, iterations: int = 3) -> int:
    """Largest number of bytes that tensors held at one time, from building the stages to the last iteration (R = 1)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        _train(config, device, iterations)
        return torch.cuda.max_memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(config, device, iterations)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live: dict[int, int] = {}
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        held += size if size > 0 else -live.pop(address, 0)  # what was there before the profiler is none of ours
        if size > 0:
            live[address] = size
        peak = max(peak, held)
    return peak


def _train(config: RunConfig, device: torch.device, iterations: int) -> None:
    stages = build_stages(config, device, range(config.pipeline.stages))
    shape = (config.training.batch_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.data.vocabulary_size, shape, device=device)
    engine = Engine(
        stages,
        MethodUpdater(config, stages),
        lambda iteration: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        clip=config.training.clip,
        autocast=autocast(config.runtime, device),
        takes_update_norms=lambda iteration: config.logging.update_norms,
    )
    for _ in engine.run(1, lambda: iterations):
        pass
