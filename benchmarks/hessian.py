"""Time and memory of a Hessian-vector product, compared with one gradient of the same batch.

The gradient is computed as in training, with fused attention. Time: all variants take turns in one
process; CPU time is measured, because other processes disturb it less than wall-clock time. Memory:
the growth of a fresh process's peak resident size.

    python -m benchmarks.hessian [--threads 1] [--rounds 9]
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.func import grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.report import Table, parser_of, ratio, take_turns
from brx.config.loading import load_config
from brx.config.schema import GPTConfig
from brx.curvature.hessian import gradient, hessian_vector_product, training_loss
from brx.model.stage import whole_model

VOCABULARY = 256
SHAPES = {
    "quick": (load_config("quick").model, 8),
    "32 blocks, d 32, sequence 64": (
        GPTConfig(blocks=32, width=32, heads=2, sequence_length=64),
        8,
    ),
    "4 blocks, d 256, sequence 256": (
        GPTConfig(blocks=4, width=256, heads=4, sequence_length=256),
        8,
    ),
}


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, threads=1, rounds=9)
    parser.add_argument(
        "--memory-of", nargs=2, metavar=("SHAPE", "VARIANT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(peak_growth(*options.memory_of))
        return

    table = Table(
        "hessian",
        [
            "model",
            "variant",
            "CPU ms (median)",
            "time / gradient",
            "peak memory MiB",
            "memory / gradient",
        ],
    )
    for shape in SHAPES:
        variants = variants_of(shape)
        once = {name: lambda _, run=run: run() for name, run in variants.items()}  # type: ignore[misc]
        times = take_turns(once, options.rounds, clock=time.process_time)
        memory = {name: memory_in_fresh_process(shape, name, options.threads) for name in variants}
        for name in variants:
            table.add(
                shape,
                name,
                f"{1e3 * statistics.median(times[name]):.1f}",
                f"{ratio(times[name], times['gradient']):.2f}",
                f"{memory[name] / 2**20:.0f}",
                f"{memory[name] / memory['gradient']:.2f}",
            )
    table.write(f"Hessian-vector products, batch of 8 sequences, fp32, {options.threads} thread(s)")


def variants_of(shape: str) -> dict[str, Callable[[], object]]:
    """The computations that are compared, by name."""
    config, batch_size = SHAPES[shape]
    model = whole_model(config, VOCABULARY, seed=0)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    vector = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}
    inputs, targets = torch.randint(VOCABULARY, (2, batch_size, config.sequence_length))
    batch = (inputs, targets)

    def forward_over_reverse() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(grad(lambda at: training_loss(model, at, batch)), (parameters,), (vector,))

    return {
        "gradient": lambda: gradient(model, parameters, batch),
        "product (brx)": lambda: hessian_vector_product(model, parameters, batch, vector),
        "product (torch.func)": forward_over_reverse,
    }


def peak_growth(shape: str, variant: str) -> int:
    """Bytes by which one call raises this process's resident size at its peak (Linux)."""
    run = variants_of(shape)[variant]
    warm_up = SHAPES["quick"]
    SHAPES["warm-up"] = (
        warm_up[0].model_copy(update={"blocks": 1, "width": 16, "sequence_length": 8}),
        1,
    )
    variants_of("warm-up")[variant]()  # loads what only the first call of its kind loads
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """This process's resident size now (VmRSS), or at its peak (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_in_fresh_process(shape: str, variant: str, threads: int) -> int:
    """`peak_growth` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.hessian",
        "--memory-of",
        shape,
        variant,
        "--threads",
        str(threads),
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout)


if __name__ == "__main__":
    main()
