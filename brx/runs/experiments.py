"""A folder of runs, searchable by settings: which runs are the seeds of one experiment at its chosen learning rate."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from brx.config.loading import find_config, read_mapping, set_values, validate
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.runs.best_value import best_value, is_at_edge
from brx.runs.folder import settings_key
from brx.runs.reading import Run, Series

RATE, SEED = "optimizer.lr", "training.seed"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed, at the learning rate that was chosen for them.

    Attributes:
        runs: by seed.
        scores: final validation loss of every learning rate that was tried, averaged over the seeds they share;
            infinite where a run failed.
    """

    runs: tuple[Run, ...]
    scores: Mapping[float, float]

    @property
    def config(self) -> RunConfig:
        """The configuration of the first seed."""
        return self.runs[0].config

    @property
    def method(self) -> str:
        """The method with what tells its variants apart."""
        return self.runs[0].method

    @property
    def variant(self) -> str:
        """The method, and what else about it differs from its usual form."""
        return self.runs[0].variant

    @property
    def seeds(self) -> set[int]:
        """Of its runs."""
        return {run.config.training.seed for run in self.runs}

    @property
    def stages(self) -> int:
        """P."""
        return self.runs[0].stages

    @property
    def lr(self) -> float:
        """The chosen learning rate."""
        return self.config.optimizer.lr

    @property
    def is_at_edge(self) -> bool:
        """Whether the chosen learning rate is the lowest or highest of those tried."""
        return is_at_edge(self.lr, self.scores)

    @cached_property
    def smoothed(self) -> Series:
        """Smoothed training losses (seeds, iterations), as long as the shortest run."""
        length = min(len(run.smoothed) for run in self.runs)
        return np.stack([run.smoothed[:length] for run in self.runs])

    @property
    def iterations(self) -> Series:
        """Iterations of `smoothed`."""
        first = self.runs[0]
        return first.iterations[first.centres][: self.smoothed.shape[1]]

    @property
    def final_losses(self) -> list[float]:
        """Smoothed training loss of each seed at its end."""
        return [float(run.smoothed[-1]) for run in self.runs]

    @property
    def final_loss(self) -> float:
        """Their mean."""
        return statistics.fmean(self.final_losses)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Sort runs into experiments and choose each one's learning rate: the lowest final validation loss.

    Runs on other data, of another trajectory version or of another length are other experiments. Those still under way
    are left out; those that failed count as tried, and an experiment of which every run failed has no group.

    Raises:
        UserError: two runs have the same settings and seed.
    """
    by_experiment: dict[str, dict[float, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if run.is_finished or run.is_failed:
            by_seed = by_experiment[f"{_settings(run.config)} {run.origin}"][run.config.optimizer.lr]
            if (other := by_seed.setdefault(run.config.training.seed, run)) is not run:
                raise UserError(f"{run.path}: the same run as {other.path}: leave one of them out")
    groups = [_choose(by_rate) for by_rate in by_experiment.values()]
    return [group for group in groups if group.runs]


def _choose(by_rate: Mapping[float, Mapping[int, Run]]) -> Group:
    losses = {
        rate: {seed: run.final_val_loss if run.is_finished else math.inf for seed, run in by_seed.items()}
        for rate, by_seed in by_rate.items()
    }
    best, scores = best_value(losses)
    return Group(tuple(run for _, run in sorted(by_rate[best].items()) if run.is_finished), scores)


def _settings(config: RunConfig) -> str:
    return f"{settings_key(config, without=(RATE, SEED))} {config.training.last_iteration}"


class Results:
    """The groups of one or more folders of runs.

    Args:
        folders: each a run, or a folder that holds runs.

    Attributes:
        runs: all of them.
        groups: see `group_runs`.
        notes: a line for everything that the groups leave out.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.runs = [Run.load(path) for path in find_runs(folders)]
        self.groups = group_runs(self.runs)
        unfinished = [run.path.name for run in self.runs if not run.is_finished]
        origins = Counter(group.runs[0].origin for group in self.groups).most_common()
        self.notes = [f"not finished, left out: {', '.join(unfinished)}"] if unfinished else []
        if len(origins) > 1:
            (fingerprint, version), num_taken = origins[0]
            self.notes.append(
                f"runs on other data or of another trajectory version do not compare: the paper's figures and tables"
                f" take {num_taken} of {len(self.groups)} experiments, on {str(fingerprint)[:8]}, of version {version}"
            )
        self._by_settings = {
            _settings(group.config): group for group in self.groups if group.runs[0].origin == origins[0][0]
        }

    def find(self, base: RunConfig) -> Group | None:
        """The runs of this configuration, whatever their seeds, at their chosen learning rate."""
        return self._by_settings.get(_settings(base))


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among `folders` and directly below them, that have losses.

    Raises:
        UserError: one of them is no folder, or there is no run in any.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        candidates = [folder] if (folder / "config.yaml").is_file() else sorted(folder.iterdir())
        found += [path for path in candidates if _has_losses(path)]
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no run with losses there")
    return found


def preset_with(preset: str, settings: Mapping[str, Any]) -> RunConfig:
    """A preset with dotted keys set."""
    path = find_config(preset)
    return validate(set_values(read_mapping(path), settings, f"{path}:"), RunConfig, str(path))


def _has_losses(path: Path) -> bool:
    files = [path / "metrics.jsonl", path / "curves.npz"]
    return (path / "config.yaml").is_file() and any(file.is_file() and file.stat().st_size for file in files)
