"""A benchmark's table: printed, and kept as Markdown and JSON under benchmarks/results/ with the machine it is from."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = Path(__file__).parent / "results"


class Table:
    """Rows of text under named columns.

    Args:
        name: of the files.
        columns: their headings.
    """

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
        (folder / f"{self.name}.md").write_text(f"{title}\n\n{body}\n\n{machine['summary']}\n", encoding="utf-8")
        content = {"title": title, "machine": machine, "columns": self.columns, "rows": self.rows, "notes": notes}
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def describe_machine() -> dict[str, str | int]:
    """Cores, processor or GPU, versions, date."""
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = os.cpu_count() or 1
    date = time.strftime("%Y-%m-%d")
    summary = f"{cores} cores, {processor}, torch {torch.__version__}, Python {platform.python_version()}, {date}"
    return {"cores": cores, "processor": processor, "torch": torch.__version__, "date": date, "summary": summary}
