"""Where the results come from: versions, commits, devices, data and dates, out of the runs' summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import brx
from brx.runs.reading import Run
from brx.runs.tables import model_text
from brx.sweep.display import duration
from brx.train.summary import git_commit

Facts = list[tuple[str, list[str]]]
"""Headings, each with a line a distinct value."""


def provenance(runs: Sequence[Run]) -> Facts:
    """What is known of how the runs were made; values that differ between runs are listed with their numbers."""
    dates = sorted(run.summary["finished_at"] for run in runs if run.summary.get("finished_at"))
    seconds = sum(float(run.seconds[-1]) for run in runs)
    return [
        ("Runs", _counted(runs, status_of)),
        ("Ended", [f"{dates[0]} to {dates[-1]}"] if dates else []),
        ("Training time", [f"{duration(seconds)} in all, without validations and checkpoints"]),
        ("Versions", _counted(runs, _versions)),
        ("Git commits", _counted(runs, lambda run: run.summary.get("git_commit"))),
        ("Devices", _counted(runs, _device)),
        ("Data", _counted(runs, _data)),
        ("Models", _counted(runs, lambda run: model_text(run.config))),
        ("This page", [f"brx {brx.__version__}, git commit {git_commit() or 'unknown'}"]),
    ]


def status_of(run: Run) -> str:
    """What has become of a run."""
    return str(run.summary.get("status", "not ended"))


def _counted(runs: Sequence[Run], value: Callable[[Run], str | None]) -> list[str]:
    counts = Counter(value(run) or "unknown" for run in runs)
    return [f"{text} ({count} {'run' if count == 1 else 'runs'})" for text, count in counts.most_common()]


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items())


def _device(run: Run) -> str:
    device = run.summary.get("device", {})
    return f"{device['type']} ({device['name']}), threads: {device['threads']}" if device else ""


def _data(run: Run) -> str:
    fingerprint = run.summary.get("data_fingerprint", "unknown")
    return f"{run.config.data.source}, tokenizer {run.config.data.tokenizer}, fingerprint {fingerprint}"
