"""What the benchmarks share: options, timing in turns, and tables under benchmarks/results/, which
name the machine."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

from brx.optim import refresh
from brx.optim.eigenbasis import Refreshed
from brx.pipeline.engine import Engine, MicroBatch

RESULTS = Path(__file__).parent / "results"
HELP = {
    "rounds": "turns of each variant",
    "iterations": "iterations in a turn",
    "steps": "timed steps",
}


def parser_of(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The options of a benchmark: an option `--NAME`, which takes a number, for each default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=HELP.get(name))
    return parser


def gpu_parser_of(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The options of benchmarks that measure a preset at several P on one device."""
    parser = parser_of(description, **defaults)
    parser.add_argument("config", help="a preset or a file")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 32], metavar="P")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    return parser


def take_turns(
    variants: Mapping[str, Callable[[int], object]],
    rounds: int,
    iterations: int = 1,
    *,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds per iteration of each variant, one number per turn.

    The variants take turns, so that their ratios hold when the machine's speed drifts.

    Args:
        variants: functions that make a number of iterations, by name.
        rounds: timed turns of each variant.
        iterations: iterations in a turn.
        warm_up: further turns before these, which are not timed.
        clock: gives the seconds.
        wait: waits until a variant's work has finished, for work on a GPU or in other processes.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + warm_up):
        # Every other turn in reverse order, so that no variant always follows the same one.
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            wait()
            started = clock()
            variants[name](iterations)
            wait()
            if turn >= warm_up:
                times[name].append((clock() - started) / iterations)
    return times


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median over turns of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def random_tokens(
    batch_size: int, sequence_length: int, vocabulary: int = 256
) -> Callable[[int], MicroBatch]:
    """A function from the number of a micro-batch to its random inputs and targets, each
    (batch_size, sequence_length)."""

    def micro_batch(n: int) -> MicroBatch:
        generator = torch.Generator().manual_seed(n)
        tokens = torch.randint(vocabulary, (batch_size, sequence_length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return micro_batch


@contextmanager
def quick_first_basis() -> Iterator[None]:
    """Inside the block, compute exact eigenvectors for one matrix of each shape and use them for
    all of that shape. They take minutes, but a training computes them only once."""
    decomposed: dict[tuple[torch.Size, torch.dtype], Any] = {}
    eigh = torch.linalg.eigh

    def eigh_of_one(matrices: Tensor) -> Any:
        key = matrices.shape, matrices.dtype
        if key not in decomposed:
            decomposed[key] = eigh(matrices)
        return decomposed[key]

    def of_one(exact: Callable[..., Refreshed]) -> Callable[..., Refreshed]:
        def compute(matrices: Tensor, *options: Any, **named: Any) -> Refreshed:
            one = exact(matrices[:1], *options, **named)
            return Refreshed(*(part.expand(len(matrices), *part.shape[1:]) for part in one))

        return compute

    names = ("exact_eigenbasis", "exact_factor_eigenbasis")
    ours = patch.multiple(refresh, **{name: of_one(getattr(refresh, name)) for name in names})
    with ours, patch.object(torch.linalg, "eigh", eigh_of_one):
        yield


def runner(engine: Engine) -> Callable[[int], Tensor | None]:
    """A function that makes a number of iterations, from where its last call ended, and returns the
    last loss."""
    done = 0

    def run(iterations: int) -> Tensor | None:
        nonlocal done
        first, done = done + 1, done + iterations
        return [result.loss for result in engine.run(first, lambda: done)][-1]

    return run


class Table:
    """Rows of text under named columns. `write` makes NAME.md and NAME.json of them."""

    def __init__(self, name: str, columns: list[str]) -> None:
        self.name = name
        self.columns = columns
        self.rows: list[list[str]] = []

    def add(self, *cells: str) -> None:
        """Add a row."""
        assert len(cells) == len(self.columns)
        self.rows.append(list(cells))

    def show(self, title: str, *notes: str) -> None:
        """Print the table with its notes."""
        shown = RichTable(*self.columns, title=title)
        for row in self.rows:
            shown.add_row(*row)
        console = Console(width=160)
        console.print(shown, *notes, sep="\n", highlight=False)

    def write(self, title: str, *notes: str, folder: Path = RESULTS) -> None:
        """Print the table with its notes and write both to FOLDER/NAME.md and .json."""
        self.show(title, *notes)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [" | ".join(row) for row in [self.columns, ["---"] * len(self.columns), *self.rows]]
        body = "\n\n".join(["\n".join(f"| {line} |" for line in lines), *notes])
        machine = describe_machine()
        (folder / f"{self.name}.md").write_text(
            f"{title}\n\n{body}\n\n{machine['summary']}\n", encoding="utf-8"
        )
        content = {
            "title": title,
            "machine": machine,
            "columns": self.columns,
            "rows": self.rows,
            "notes": notes,
        }
        (folder / f"{self.name}.json").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )


def describe_machine() -> dict[str, str | int]:
    """Cores, processor or GPU, versions, date."""
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = os.cpu_count() or 1
    date = time.strftime("%Y-%m-%d")
    summary = (
        f"{cores} cores, {processor}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date}"
    )
    return {
        "cores": cores,
        "processor": processor,
        "torch": torch.__version__,
        "date": date,
        "summary": summary,
    }
