"""Damaged files of every format that brx reads: each gives a value or an error of one line.

    python -m benchmarks.flipped_files --count 3000

For each format, an intact file is damaged `--count` times (case N is always the same): one to eight
bits are flipped, the end is cut off, or a stretch is written twice. The reader of that format must
return a value or raise the error that it promises, with one line. The table is
benchmarks/results/flipped_files.md.
"""

import io
import json
import random
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import RESULTS, parser_of
from brx.config.parsing import dump_yaml, parse_yaml
from brx.errors import UserError
from brx.readers import Damaged, parse_json, read_arrays, read_json, read_tensors

MOST_MEMORY = 512 * 2**20
"""Bytes that reading one damaged file may take."""


class Format(NamedTuple):
    """A file format: an intact file, and the reader of the format."""

    name: str
    content: bytes
    read: Callable[[Path], Any]


def _records() -> bytes:
    records = [{"iteration": t, "train_loss": 5 / t, "seconds": 0.1 * t} for t in range(1, 60)]
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _arrays() -> bytes:
    file = io.BytesIO()
    losses = np.linspace(4, 3, 300)
    np.savez_compressed(file, steps=np.ones(300, np.int32), train_loss=losses, val_loss=losses[:3])
    return file.getvalue()


def _tensors() -> bytes:
    file = io.BytesIO()
    torch.save({"weights": torch.ones(40, 3), "step": 7, "names": ["a", "b"]}, file)
    return file.getvalue()


def _read_lines(path: Path) -> list[Any]:
    return [parse_json(line) for line in path.read_text(errors="replace").splitlines()]


def _read_yaml(path: Path) -> Any:
    return parse_yaml(path.read_text(errors="replace"), str(path))


MANIFEST = {"iteration": 7, "settings": {"model": {"width": 8}}, "stages": [{"sha256": "ab" * 32}]}
CONFIG = {"model": {"blocks": 2}, "optimizer": {"lr": 1e-3, "method": "basis-rotation"}}
FORMATS = (
    Format("json (summary, manifest)", json.dumps(MANIFEST, indent=2).encode(), read_json),
    Format("jsonl (metrics)", _records(), _read_lines),
    Format("yaml (config)", dump_yaml(CONFIG).encode(), _read_yaml),
    Format("npz (curves)", _arrays(), read_arrays),
    Format("pt (checkpoint)", _tensors(), read_tensors),
)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with some bits flipped, its end cut off, or a stretch of it twice."""
    kind = rng.choice(("flip", "flip", "flip", "cut", "twice"))
    place = rng.randrange(len(content))
    if kind == "cut":
        return content[:place]
    if kind == "twice":
        return content[: place + rng.randrange(200)] + content[place:]
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def outcome(read: Callable[[Path], Any], path: Path) -> str:
    """The outcome of reading one file: `read`, `refused`, or the problem."""
    try:
        read(path)
    except (Damaged, UserError) as error:
        return "refused" if len(str(error).splitlines()) == 1 else "more than a line"
    except Exception as error:
        return f"uncaught {type(error).__name__}"
    return "read"


def tried(file_format: Format, count: int) -> tuple[Counter[str], int]:
    """The outcomes of `count` damaged files, and the most bytes that reading one of them took."""
    outcomes: Counter[str] = Counter()
    most = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for number in range(count):
            rng = random.Random(f"{file_format.name} {number}")
            path.write_bytes(damaged(file_format.content, rng))
            tracemalloc.reset_peak()
            outcomes[outcome(file_format.read, path)] += 1
            most = max(most, tracemalloc.get_traced_memory()[1])
    return outcomes, most


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=3000, help="damaged files per format")
    count = parser.parse_args().count
    lines = [
        "# Damaged files",
        "",
        f"{count} damaged files per format. None may raise anything but the one line that its "
        f"reader promises, or take more than {MOST_MEMORY // 2**20} MiB.",
        "",
        "| format | read | refused in one line | problems | most memory (MiB) |",
        "|---|---|---|---|---|",
    ]
    problems = 0
    tracemalloc.start()
    for file_format in FORMATS:
        outcomes, most = tried(file_format, count)
        wrong = count - outcomes["read"] - outcomes["refused"] + (most > MOST_MEMORY)
        problems += wrong
        print(file_format.name, dict(outcomes), f"{most / 2**20:.1f} MiB")
        lines.append(
            f"| {file_format.name} | {outcomes['read']} | {outcomes['refused']} | {wrong} "
            f"| {most / 2**20:.1f} |"
        )
    (RESULTS / "flipped_files.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if problems:
        raise SystemExit(f"{problems} problems")


if __name__ == "__main__":
    main()
