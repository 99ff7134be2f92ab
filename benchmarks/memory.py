"""The peak memory of short trainings, compared with `brx plan`.

On CUDA, the allocator reports the peak. On a CPU, it is the largest sum of live allocations of
torch's CPU allocator, each of which torch.profiler records (resident memory would count Python,
libraries and malloc's reserves).

    python -m benchmarks.memory paper-95m --stages 1 32 [--set KEY=VALUE ...] [--out results/gpu]
"""

import gc
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Table, gpu_parser_of, quick_first_basis
from brx.config.loading import load_config
from brx.config.schema import RunConfig
from brx.planning.plan import plan_memory
from brx.train.build import assemble
from brx.train.device import choose_device

COMPARED = ("pipedream", "basis-rotation")
RINGS = ("device", "host")


def main() -> None:
    """Measure and print."""
    options = gpu_parser_of(__doc__).parse_args()
    table = Table(
        "memory", ["method", "P", "rings", "planned GB", "measured GB", "planned / measured"]
    )
    for method, stages, rings in itertools.product(COMPARED, options.stages, RINGS):
        chosen = [
            f"optimizer.method={method}",
            f"pipeline.stages={stages}",
            f"pipeline.rings={rings}",
        ]
        config = load_config(options.config, [*options.overrides, *chosen])
        device, _ = choose_device(config.runtime.device)
        if rings == "host" and (stages == 1 or device.type == "cpu"):
            continue  # there are no rings, or the host's memory is the device's
        (planned,) = plan_memory(config, device.type)
        with quick_first_basis():
            measured = measured_peak(config, device)
        numbers = (
            f"{planned.peak / 1e9:.3f}",
            f"{measured / 1e9:.3f}",
            f"{planned.peak / measured:.3f}",
        )
        table.add(method, str(stages), rings, *numbers)
    note = (
        "Planned: the closed forms of brx plan, for uncompiled blocks; compiled ones keep fewer "
        "activations. The first"
        " basis is that of one matrix of each shape; later refreshes are those of all."
    )
    table.write(
        f"Peak memory of {options.config} on one device, 11 iterations", note, folder=options.out
    )


def measured_peak(config: RunConfig, device: torch.device, iterations: int = 11) -> int:
    """The most bytes that tensors held at one time, from building the stages to the last iteration
    (R = 1)."""
    return peak_during(lambda: _train(config, device, iterations), device)


def peak_during(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes that tensors held at one time during the work, beyond those that were there
    before."""
    gc.collect()  # frees what earlier work left
    if device.type == "cuda":
        torch.cuda.init()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [
            event
            for event in json.loads(path.read_text())["traceEvents"]
            if event.get("name") == "[memory]"
        ]
    live: dict[int, int] = {}
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        # Freeing memory that was allocated before the profiler started does not count.
        held += size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
        peak = max(peak, held)
    return peak


def _train(config: RunConfig, device: torch.device, iterations: int) -> None:
    shape = (config.training.batch_size, config.model.sequence_length + 1)
    tokens = torch.randint(config.data.vocabulary_size, shape, device=device)
    # Take the norms of the updates at every iteration.
    training = config.training.model_copy(update={"log_every": 1})
    engine = assemble(
        config.model_copy(update={"training": training}),
        lambda iteration: (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        device=device,
    ).engine
    for _ in engine.run(1, lambda: iterations):
        pass


if __name__ == "__main__":
    main()
