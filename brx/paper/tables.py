"""The paper's tables, from the runs of a scale; each gives headings and rows of texts, and what was missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from brx.curvature.norm_result import measured_norms
from brx.curvature.norm_tables import NORM_TITLE, norm_rows
from brx.errors import UserError
from brx.paper.scales import CURVATURE, MAIN, METHODS, SEVEN, Experiments, Settings
from brx.planning.optimizer_memory import LLAMA_3_8B, overhead_rows
from brx.planning.stage_count import DEVICES_GB, LLAMAS, stage_count_rows
from brx.runs.experiments import Group, find_runs
from brx.runs.slowdown import reductions, slowdowns, slowest_final
from brx.runs.tables import Rows, model_text, rate_text, seeds_text

PRECONDITIONED = ("pipedream-lr", "nesterov", "muon", "scion", "soap", "basis-rotation")

# What the paper prints, at its own scale (its tables of slowdown, and figure "Performance of different methods").
PAPER_SLOWDOWNS = {
    "pipedream-lr": "5.43 or 4.24",
    "nesterov": "4.24",
    "basis-rotation 1st/unilateral": "2.55",
    "basis-rotation 1st/bilateral": "1.77",
    "basis-rotation 2nd/unilateral": "1.66",
    "basis-rotation": "1.27",
    "muon": "1.53",
    "scion": "2.10",
    "soap": "1.34",
}


@dataclass(frozen=True)
class PaperTable:
    """One table.

    Attributes:
        name: on the command line and of the files.
        label: in the paper's source; empty where the paper has only a sentence.
        title: what it shows.
        rows: makes it.
    """

    name: str
    label: str
    title: str
    rows: Callable[[Experiments], Rows]


def slowdown_table(methods: Sequence[str], experiments: Experiments) -> Rows:
    """Slowdown of methods at the deepest pipeline, to the target of the scale."""
    deepest = experiments.scale.deepest
    groups = []
    for method in methods:
        pair = [experiments.find(method, P, experiments.sweep_of(method)) for P in experiments.ends]
        groups += [group for group in pair if group is not None and None not in pair]
    target = experiments.slowdown_target()
    columns = ["method", f"slowdown at P = {deepest}", "seeds", "lr at P = 1", f"lr at P = {deepest}", "the paper's"]
    if not groups or target is None:
        return columns, []
    columns.append("target loss")
    rows = [
        [
            found.group.method,
            found.text,
            seeds_text(found),
            rate_text(found.reference),
            rate_text(found.group),
            PAPER_SLOWDOWNS.get(found.group.method, ""),
            f"{found.target:.3f}",
        ]
        for found in slowdowns(groups, target)
    ]
    order = list(methods)
    return columns, sorted(rows, key=lambda row: order.index(row[0]))


def final_loss_table(experiments: Experiments) -> Rows:
    """Final training loss of every method at every number of stages: mean, and range over seeds."""
    depths = experiments.scale.depths
    columns = ["method", *(f"P = {depth}" for depth in depths)]
    rows = []
    for method in METHODS:
        if method == "delay-compensation":
            continue
        groups = [experiments.find(method, depth, experiments.sweep_of(method)) for depth in depths]
        if any(groups):
            rows.append([method, *("" if group is None else final_loss_text(group) for group in groups)])
    return columns, rows


def reduction_table(experiments: Experiments) -> Rows:
    """Iterations that basis rotation saves over the best baseline, as the paper's headline numbers put it."""
    columns = ["model", "P", "method", "best baseline", "iterations saved", "the paper's"]
    scale = experiments.scale
    cases: list[tuple[str, int, str, str | None, Settings, str]] = [
        ("main", scale.deepest, "main", None, {}, "71.6%"),
        ("smaller", 24, "width", None, scale.narrow, "62.4%"),
        ("larger", 24, "width", scale.wide_preset, scale.wide, "76.8%"),
        ("mixture of experts", scale.deepest, "moe", scale.moe_preset, {}, "46.8%"),
    ]
    rows = []
    for model, stages, sweep, preset, settings, printed in cases:
        found = [experiments.find(m, stages, sweep, preset=preset, settings=settings) for m in MAIN]
        for one in reductions([group for group in found if group is not None]):
            saved = "never gets there" if one.share is None else f"{one.share:.1%}"
            rows.append([model, str(stages), one.group.variant, one.baseline.variant, saved, printed])
    return columns, rows


def budget_table(experiments: Experiments) -> Rows:
    """What delay costs, by the length of the training: a target for each length, that both methods reach.

    Raises:
        UserError: the scale has one length only.
    """
    scale = experiments.scale
    if not scale.budgets:
        raise UserError("table budget: only at the scale of a laptop: brx sweep configs/sweeps/cpu/budget.yaml")
    columns = ["method", "iterations", "P", "final training loss at P = 1", "at P", "slowdown", "target loss"]
    columns += ["lr at P = 1", "lr at P"]
    rows = []
    for iterations in scale.budgets:
        settings = {**scale.budget_model, "training.iterations": iterations}
        stages = scale.budget_model["model.blocks"]
        found = [
            experiments.find(method, P, "budget", settings=settings)
            for method in ("pipedream-lr", "basis-rotation")
            for P in (1, stages)
        ]
        groups = [group for group in found if group is not None]
        if len(groups) < len(found):
            continue
        for one in slowdowns(groups, slowest_final(groups)):
            losses = (final_loss_text(one.reference), final_loss_text(one.group))
            rates = (rate_text(one.reference), rate_text(one.group))
            cells = (*losses, one.text, f"{one.target:.3f}", *rates)
            rows.append([one.group.variant, str(iterations), str(stages), *cells])
    return columns, rows


def rate_table(experiments: Experiments) -> Rows:
    """The chosen learning rates with the final validation loss of every one tried."""
    columns = ["method", "P", "chosen", "seeds", "at the edge", "final validation loss of each"]
    rows = []
    for method in METHODS:
        for depth in experiments.scale.depths:
            group = None
            if method != "delay-compensation":
                group = experiments.find(method, depth, experiments.sweep_of(method))
            if group is not None:
                scores = ", ".join(f"{rate:g}: {score:.3f}" for rate, score in group.scores.items())
                edge = "yes" if group.is_at_edge else ""
                rows.append([method, str(depth), f"{group.lr:g}", str(len(group.runs)), edge, scores])
    return columns, rows


def experiment_table(experiments: Experiments) -> Rows:
    """Every experiment that has finished runs, whichever figure it is for."""
    columns = ["model", "iterations", "method", "P", "lr", "seeds", "final training loss", "final validation loss"]
    rows = [
        [
            model_text(group.config),
            str(group.config.training.last_iteration),
            group.variant,
            str(group.stages),
            rate_text(group),
            str(len(group.runs)),
            final_loss_text(group),
            f"{fmean(run.final_val_loss for run in group.runs):.3f}",
        ]
        for group in sorted(experiments.results.groups, key=_by_size)
    ]
    return columns, rows


def memory_table(_: Experiments) -> Rows:
    """What the strategies of basis rotation add for one matrix of Llama-3-8B's attention and of its MLP."""
    names = {shape: name for name, shape in LLAMA_3_8B.items()}
    _title, columns, rows = overhead_rows(dict.fromkeys(names, 1), names)
    return columns, rows


def norm_table(_: Experiments) -> Rows:
    """Norms of the Hessian as far as they have been measured."""
    return norm_rows(measured_norms(find_runs([CURVATURE])))


def _by_size(group: Group) -> tuple[int, int, int, int, str]:
    model, iterations = group.config.model, group.config.training.last_iteration
    return model.blocks, model.width, iterations, group.stages, group.variant


def final_loss_text(group: Group) -> str:
    """Mean final loss, and its range over seeds where there are several."""
    losses = group.final_losses
    spread = f" [{min(losses):.3f}, {max(losses):.3f}]" if len(losses) > 1 else ""
    return f"{group.final_loss:.3f}{spread}"


TABLES = {
    table.name: table
    for table in (
        PaperTable("final-loss", "fig:result-main-numstages", "Final training loss", final_loss_table),
        PaperTable(
            "slowdown", "tab:result-rotation-slowdown", "Slowdown by method and estimation strategy",
            lambda experiments: slowdown_table(SEVEN, experiments),
        ),
        PaperTable(
            "preconditioned", "tab:result-preconditioned-slowdown", "Slowdown of preconditioned methods",
            lambda experiments: slowdown_table(PRECONDITIONED, experiments),
        ),
        PaperTable("experiments", "", "Final losses of every experiment", experiment_table),
        PaperTable("reduction", "", "Iterations saved over the best baseline, at its final loss", reduction_table),
        PaperTable("budget", "", "What delay costs, by the length of the training", budget_table),
        PaperTable(
            "stages", "tab:stages_s4096", "The least number of stages of large models, by the memory of a device",
            lambda _: stage_count_rows(LLAMAS, DEVICES_GB),
        ),
        PaperTable("memory", "", "Memory beyond Adam's moments, GiB a matrix (fp32)", memory_table),
        PaperTable("hessian-norm", "", NORM_TITLE, norm_table),
        PaperTable("learning-rates", "", "Learning rates, chosen by the final validation loss", rate_table),
    )
}  # fmt: skip
