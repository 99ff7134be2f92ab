"""Packet B, first part: the rates that bound everything else on a device.

    python -m benchmarks.gpu.ceilings [--size 8192] [--device cuda] --out results/gpu

They are products of square matrices, by precision, and a copy, whose bytes are counted as read and
as written. Each product also has its relative error against float64.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Table, parser_of, synchronize

REPEATS = 10
PRECISIONS = ("fp64", "fp32", "tf32", "bf16")


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, size=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    table = Table("ceilings", ["what", "rate", "relative error"])
    source = torch.randn(16 * options.size**2 // 4, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), device)
    table.add("copy", f"{2 * source.nbytes / seconds / 1e12:.2f} TB/s", "")
    left, right = torch.randn(2, options.size, options.size, device=device)
    exact = left[:256].double() @ right.double()
    for precision in PRECISIONS:
        seconds, result = product(left, right, precision, device)
        error = (result[:256].double() - exact).norm() / exact.norm()
        rate = 2 * options.size**3 / seconds / 1e12
        table.add(f"product, {precision}", f"{rate:.1f} TFLOP/s", f"{float(error):.1e}")
    table.write(f"Ceilings of the device, matrices of {options.size}", folder=options.out)


def product(
    left: Tensor,  # (n, n), fp32
    right: Tensor,  # (n, n), fp32
    precision: str,
    device: torch.device,
) -> tuple[float, Tensor]:
    """Seconds of a product, and the product."""
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    a, b = left.to(dtype), right.to(dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return timed(lambda: a @ b, device), a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the work: the mean of `REPEATS` calls after a warm-up."""
    work()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(REPEATS):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / REPEATS


if __name__ == "__main__":
    main()
