"""Where the results come from: versions, commits, devices, data and dates, out of the runs' summaries."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

import brx
from brx.sweep.display import duration
from brx.train.summary import git_commit

Facts = list[tuple[str, list[str]]]
"""Headings, each with a line per distinct value."""


def provenance(runs: pd.DataFrame) -> Facts:
    """What is known of how the runs were made; values that differ between runs are listed with their numbers."""
    dates = runs["finished_at"].dropna().sort_values().tolist() if "finished_at" in runs else []
    return [
        ("Runs", _counted(runs, lambda run: run["status"])),
        ("Ended", [f"{dates[0]} to {dates[-1]}"] if dates else []),
        ("Training time", [f"{duration(runs['seconds'].sum())} in all, without validations and checkpoints"]),
        ("Versions", _counted(runs, _versions)),
        ("Git commits", _counted(runs, lambda run: run.get("git_commit"))),
        ("Devices", _counted(runs, _device)),
        ("Data", _counted(runs, _data)),
        ("Models", _counted(runs, lambda run: run["architecture"])),
        ("This page", [f"brx {brx.__version__}, git commit {git_commit() or 'unknown'}"]),
    ]


def _counted(runs: pd.DataFrame, text: Callable[[pd.Series], object]) -> list[str]:
    """Lines of the distinct texts, the most frequent first."""
    texts = pd.Series([text(run) for _, run in runs.iterrows()], dtype=object).fillna("unknown").replace("", "unknown")
    return [f"{text} ({count} {'run' if count == 1 else 'runs'})" for text, count in texts.value_counts().items()]


def _versions(run: pd.Series) -> str:
    versions = run.filter(like="versions.").dropna()
    return ", ".join(f"{key.removeprefix('versions.')} {version}" for key, version in versions.items())


def _device(run: pd.Series) -> str:
    if pd.isna(run.get("device.type")):
        return ""
    return f"{run['device.type']} ({run['device.name']}), threads: {run['device.threads']:g}"


def _data(run: pd.Series) -> str:
    fingerprint = "unknown" if pd.isna(run["data_fingerprint"]) else run["data_fingerprint"]
    return f"{run['data.source']}, tokenizer {run['data.tokenizer']}, fingerprint {fingerprint}"
