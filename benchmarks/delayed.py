"""What `delayed` costs: a loop with the delays of a pipeline against the same loop without them, at
width 768, with few tokens per update, and with 4 and 16 times as many.

Parameters that never change their addresses cost three copies of the delayed stages' weights per
update: the new version is stored, the old one is copied in, and the newest is copied back (twice
under `none`). Apart from these copies, the hooks should cost nothing. The plain loop, the delayed
loops and a copy take turns in one process, so that the ratios hold when the machine's speed drifts.

    python -m benchmarks.delayed [--threads 1] [--rounds 9] [--iterations 2] [--device cpu]
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.report import Table, parser_of, ratio, synchronize, take_turns
from brx import delayed

BLOCKS, WIDTH, HEADS, SEQUENCE, STAGES = 4, 768, 12, 128, 4
BATCHES = (2, 8, 32)  # examples per update: with more, the passes cost more, the copies do not


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, threads=1, rounds=9, iterations=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)

    table = Table(
        "delayed",
        [
            "variant",
            "tokens per update",
            "ms / update (median)",
            "ratio to plain loop",
            "ratio without its copies",
        ],
    )
    shares = [measure(table, batch, device, options) for batch in BATCHES]
    table.write(
        f"{BLOCKS} blocks, d {WIDTH}, sequence {SEQUENCE}, fp32, AdamW, {options.threads} "
        f"thread(s), on {options.device}; ratios are medians over {options.rounds} turns; rings "
        f"held / formula {shares[-1]:.3f}"
    )


def measure(table: Table, batch: int, device: torch.device, options: argparse.Namespace) -> float:
    """Add the rows of a batch size to the table; returns the measured bytes of the rings, divided
    by their formula."""
    plain, _ = loop(device, batch)
    variants: dict[str, Callable[[int], None]] = {"plain loop": plain}
    for stash in ("exact", "none"):
        variants[f"delayed, P = {STAGES}, {stash}"], ring = loop(device, batch, stash)
    held, formula = ring()
    # A source and a target for each delayed stage. The formula counts tau + 1 = 2 to P versions of
    # equally large stages; divided by their sum and 4 bytes, that is a stage's number of weights.
    copied = [
        torch.empty(formula // (4 * sum(range(2, STAGES + 1))), device=device)
        for _ in range(2 * (STAGES - 1))
    ]
    variants["a copy of the delayed weights"] = lambda count: [
        torch._foreach_copy_(copied[::2], copied[1::2]) for _ in range(count)
    ]
    # The first two turns warm up, and make the rings.
    times = take_turns(
        variants, options.rounds, options.iterations, warm_up=2, wait=lambda: synchronize(device)
    )
    base, copy = times["plain loop"], times["a copy of the delayed weights"]
    for name, series in times.items():
        copies = {"exact": 3, "none": 4}.get(name.rpartition(", ")[2], 0)  # by stash mode
        net = [one - copies * each for one, each in zip(series, copy, strict=True)]
        table.add(
            name,
            f"{batch * SEQUENCE:,}",
            f"{1e3 * statistics.median(series):.1f}",
            f"{ratio(series, base):.3f}",
            f"{ratio(net, base):.3f}",
        )
    return held / formula


def loop(
    device: torch.device, batch: int, stash: str | None = None
) -> tuple[Callable[[int], None], Callable[[], tuple[int, int]]]:
    """Two functions: `run(n)` makes n updates, and `rings()` returns the bytes of the rings,
    measured and by the formula. Without `stash`, the loop has no delay and no rings."""
    torch.manual_seed(0)
    layer = {
        "nhead": HEADS,
        "dropout": 0.0,
        "activation": "gelu",
        "batch_first": True,
        "norm_first": True,
    }
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, **layer) for _ in range(BLOCKS))).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pipeline = (
        None if stash is None else delayed(model, optimizer, STAGES, stash=stash, accumulation=1)
    )
    x = torch.randn(batch, SEQUENCE, WIDTH, device=device)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def rings() -> tuple[int, int]:
        assert pipeline is not None
        run(2)
        history = pipeline._windows.versions.history
        assert history is not None
        held = formula = 0
        for stage in history.stages:
            size = sum(weight.nbytes for weight in stage.parameters)
            formula += (stage.delay.tau + 1) * size
            held += stage.slots.nbytes
        return held, formula

    return run, rings


if __name__ == "__main__":
    main()
