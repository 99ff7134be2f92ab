"""The whole text of `brx plan`, and of `brx memory` for a configuration."""

from dataclasses import dataclass

import pandas as pd

from brx.config.schema import RunConfig
from brx.model.checks import check_model_of
from brx.planning.memory_tables import (
    matrix_counts,
    overhead_texts,
    rank_notes,
    rank_table,
    stage_table,
)
from brx.planning.placement import fit_line
from brx.planning.plan import RankMemory, plan_memory, planned_device_type
from brx.planning.planned_run import PlannedRun, time_lines
from brx.planning.rotation_cost import rotation_lines

Titled = tuple[str, pd.DataFrame]


@dataclass(frozen=True)
class Report:
    """Tables with their titles, and lines below them."""

    tables: list[Titled]
    lines: list[str]


def plan_report(run: PlannedRun) -> Report:
    """Memory by rank, whether it fits, operations and time.

    Raises:
        UserError: the devices cannot run the configured delays, or a model of the user's own cannot
            be trained in a pipeline.
    """
    config = run.config
    ranks = _planned(config)
    lines = rank_notes(config, ranks)
    if run.memory is not None:
        lines.append(fit_line(config, ranks, planned_device_type(config), run.memory))
    lines += [*time_lines(run), *rotation_lines(config)]
    return Report([rank_table(config, ranks, run.memory)], lines)


def memory_report(config: RunConfig) -> Report:
    """Memory beyond Adam's moments by matrix, then all memory by stage and by rank.

    Raises:
        UserError: as for `plan_report`.
    """
    ranks = _planned(config)
    overhead = overhead_texts(matrix_counts(config), {})
    tables = [overhead, stage_table(config, ranks), rank_table(config, ranks)]
    return Report(tables, rank_notes(config, ranks))


def _planned(config: RunConfig) -> list[RankMemory]:
    """The memory of every rank; UserError for a model that training would refuse."""
    check_model_of(config)
    return plan_memory(config, planned_device_type(config))
