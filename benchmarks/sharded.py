"""What FSDP2 saves in a step of BasisRotation: the time with two processes, divided by the time
with one, with one thread per process.

python -m benchmarks.sharded [--blocks 8] [--width 384] [--steps 20]
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.optimizers import FREQUENCY, make_gradients, matrix_shapes
from benchmarks.report import Table, parser_of
from brx.optim import BasisRotation


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, blocks=8, width=384, steps=20).parse_args()
    table = Table("sharded", ["processes", "ms / step (mean)", "over one process"])
    means = {}
    for num_processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (num_processes, options.blocks, options.width, options.steps, folder)
            mp.spawn(measure, arguments, nprocs=num_processes)
            means[num_processes] = statistics.mean(
                map(float, (Path(folder) / "seconds").read_text().split())
            )
        table.add(
            str(num_processes),
            f"{1e3 * means[num_processes]:.1f}",
            f"{means[num_processes] / means[1]:.2f}",
        )
    table.write(
        f"{options.blocks} blocks, d {options.width}, fp32, frequency {FREQUENCY}, FSDP2 over "
        f"gloo, one thread per "
        f"process, mean of {options.steps} steps"
    )


def measure(
    rank: int, num_processes: int, blocks: int, width: int, num_steps: int, folder: str
) -> None:
    """Time the steps of one rank; rank 0 writes them down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes
    )
    shapes = matrix_shapes(blocks, width)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    if num_processes > 1:
        fully_shard(model)
    weights = list(model.parameters())
    optimizer = BasisRotation(weights, frequency=FREQUENCY)
    gradients = make_gradients(shapes, 0, torch.device("cpu"))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient if num_processes == 1 else shard_like(gradient, weight)
    seconds = []
    for step in range(FREQUENCY + num_steps):
        dist.barrier()
        started = time.perf_counter()
        optimizer.step()
        dist.barrier()
        if step >= FREQUENCY:
            seconds.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text("\n".join(map(str, seconds)))
    dist.destroy_process_group()


def shard_like(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient, sharded like its weight, as FSDP2 leaves it after a backward pass."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(gradient, weight.device_mesh, weight.placements)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
