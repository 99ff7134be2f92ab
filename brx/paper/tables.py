"""The paper's tables, from the runs of a scale; each a frame of texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from brx.curvature.norm_result import NORM_TITLE, measured_norms, norm_table
from brx.errors import UserError
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import claim_table, judge, number_text
from brx.paper.ladder import (
    LEAST_LENGTHS,
    SAVING,
    SLOWDOWN,
    Length,
    complete_lengths,
    ladder_savings,
    ladder_slowdowns,
)
from brx.paper.measured_evidence import llama_overhead
from brx.paper.printed import DEVICES_GB, LLAMAS, SAVED, SLOWDOWNS
from brx.paper.scales import BASELINES_AND_STRATEGIES, LADDER_METHODS, MAIN, VARIANTS, Experiments
from brx.paper.similarity import load_study, study_table
from brx.planning.stage_count import stage_count_table
from brx.runs.comparison import reductions, slowdowns
from brx.runs.folder import find_runs
from brx.runs.frames import SEED, load
from brx.runs.tables import (
    experiment_table,
    final_loss_text,
    rate_table,
    rate_text,
    reduction_table,
    saved_text,
    seeds_text,
    slowdown_text,
)

CLAIMS_LEGEND = """\
Losses are final validation losses in nats, unless a row says otherwise; `basis-rotation` is 2nd/bilateral, the best
baseline the lowest of `pipedream`, `pipedream-lr` and `nesterov`; brackets are 95 % intervals over seeds. A method's
slowdown differs between rows that take other seeds (those that all methods of the row have) or another target
(`teaser-slowdown`). *One seed*: some experiment of the row has only one. *Runs*: trainings that were read;
measurements at checkpoints are not counted. The rules are in docs/protocol.md, sections 5 and 6."""
PRECONDITIONED_TABLE = ("pipedream-lr", "nesterov", "muon", "scion", "soap", "basis-rotation")


@dataclass(frozen=True)
class PaperTable:
    """One table: its name on the command line, its place in the paper, if any, and what it shows.

    `make` makes it, a frame of texts, which is empty where none of its experiments are there.
    """

    name: str
    place: str
    title: str
    make: Callable[[Experiments], pd.DataFrame]
    legend: str = ""


def paper_slowdowns(experiments: Experiments, methods: Sequence[str]) -> pd.DataFrame:
    """Slowdown of methods at the deepest pipeline, to the target of the scale."""
    deepest, target = experiments.scale.deepest, experiments.slowdown_target()
    rows = []
    for method in methods:
        ends = experiments.find_ends(method)
        if target is None or ends is None:
            continue
        (slowdown,) = slowdowns(ends, target).to_dict("records")
        row = {"method": method, f"slowdown at P = {deepest}": slowdown_text(slowdown), "seeds": seeds_text(slowdown)}
        row |= _rates(slowdown, f"lr at P = {deepest}")
        rows.append(row | {"the paper's": number_text(SLOWDOWNS[method], "times"), "target loss": f"{target:.3f}"})
    return pd.DataFrame(rows)


def _rates(slowdown: Mapping[str, Any], heading: str) -> dict[str, str]:
    pairs = {"lr at P = 1": "reference_lr", heading: "lr"}
    return {title: rate_text(slowdown[key], at_edge=slowdown[f"{key}_at_edge"]) for title, key in pairs.items()}


def final_losses(experiments: Experiments) -> pd.DataFrame:
    """Final training loss of every method at every number of stages: mean, and range over seeds."""
    rows = []
    for method, seeds in _plain_runs(experiments).items():
        if any(runs is not None for runs in seeds.values()):
            cells = {f"P = {depth}": "" if runs is None else final_loss_text(runs) for depth, runs in seeds.items()}
            rows.append({"method": method, **cells})
    return pd.DataFrame(rows)


def chosen_rates(experiments: Experiments) -> pd.DataFrame:
    """The chosen learning rates with the final validation loss of every one tried."""
    present = [runs for seeds in _plain_runs(experiments).values() for runs in seeds.values() if runs is not None]
    if not present:
        return pd.DataFrame()
    return rate_table(experiments.runs, pd.concat(present)).drop(columns="model")


def _plain_runs(experiments: Experiments) -> dict[str, dict[int, pd.DataFrame | None]]:
    """The plain runs of every method but delay compensation, by number of stages."""
    methods = [method for method in VARIANTS if method != "delay-compensation"]
    return {method: {P: experiments.find(method, P) for P in experiments.scale.depths} for method in methods}


def wider_rates(experiments: Experiments) -> pd.DataFrame:
    """The main comparison's ends once with the paper's rates and once with higher ones, too; seed 0 in both.

    The latter's runs lie in FOLDER-rates, and are mixed with the others nowhere else (docs/protocol.md, 3).

    Raises:
        UserError: there are none.
    """
    folder = experiments.folder
    wider = folder.with_name(f"{folder.name}-rates")
    if not wider.is_dir():
        raise UserError(f"{wider}: no such folder, for rates beyond the paper's (brx sweep laptop/rates)")
    ends = [f"P = {P}" for P in experiments.scale.ends]
    tables = []
    grids = {"the paper's": (experiments.runs, folder), "wider": (load([folder, wider]), wider)}
    for grid, (runs, place) in grids.items():
        asked = Experiments(experiments.scale, runs[runs[SEED] == 0], place)
        table = paper_slowdowns(asked, MAIN)
        if table.empty:
            raise UserError(f"{place}: no method has seed 0 both without delay and at the deepest pipeline")
        losses = final_losses(asked)[["method", *ends]]
        tables.append(losses.merge(table.drop(columns=["seeds", "the paper's"]), on="method").assign(rates=grid))
    return pd.concat(tables).rename(columns={end: f"final training loss at {end}" for end in ends})


def paper_reductions(experiments: Experiments) -> pd.DataFrame:
    """Iterations that basis rotation saves over the best baseline, as the paper's headline numbers put it."""
    tables = []
    for model in experiments.scale.models:
        present = experiments.find_all(*((method, None) for method in MAIN), model=model)
        saved = reductions(pd.concat(present)) if present else pd.DataFrame()
        if len(saved):
            table = reduction_table(saved).assign(model=model)
            tables.append(table.assign(**{"the paper's": number_text(SAVED[model], "percent")}))
    shown = ["model", "P", "method", "best baseline", "iterations saved", "the paper's"]
    return pd.concat(tables)[shown] if tables else pd.DataFrame()


def slowdowns_by_length(experiments: Experiments) -> pd.DataFrame:
    """What delay costs, by the length of the training: a target for each length, that the ladder's methods reach.

    The last rows extrapolate to the paper's relative delay, 0.013 %, with 95 % prediction intervals.
    """
    rows = []
    ladder = complete_lengths(experiments)
    slowdowns, savings = ladder_slowdowns(ladder), ladder_savings(ladder)
    for length in ladder:
        slowed, reduced = (
            frame[frame["iterations_of_training"] == length.iterations].to_dict("records")
            for frame in (slowdowns, savings)
        )
        saved = {row["method"]: f"{saved_text(row)} (over {row['baseline']})" for row in reduced}
        for slowdown in slowed:
            method = slowdown["method"]
            rows.append(
                {
                    "method": method,
                    "iterations": str(length.iterations),
                    "P": str(length.num_stages),
                    "final training loss at P = 1": final_loss_text(length.seeds(method, 1)),
                    "at P": final_loss_text(length.seeds(method, length.num_stages)),
                    "slowdown": slowdown_text(slowdown),
                    "target loss": f"{slowdown['target']:.3f}",
                    "iterations saved at P": saved.get(method, ""),
                    **_rates(slowdown, "lr at P"),
                }
            )
    return pd.DataFrame([*rows, *_extrapolated(ladder, slowdowns, savings)]).fillna("")


def _extrapolated(ladder: Sequence[Length], slowdowns: pd.DataFrame, savings: pd.DataFrame) -> list[dict[str, str]]:
    if len(ladder) < LEAST_LENGTHS:
        return []
    rows = []
    for method in sorted(LADDER_METHODS):
        slowed, saved = (frame[frame["method"] == method] for frame in (slowdowns, savings))
        rows.append(
            {
                "method": method,
                "iterations": "244000, extrapolated",
                "P": str(ladder[0].num_stages),
                "slowdown": SLOWDOWN.at_the_papers_delay(SLOWDOWN.law(slowed)),
                "iterations saved at P": SAVING.at_the_papers_delay(SAVING.law(saved)) if len(saved) else "",
            }
        )
    return rows


TABLES = {
    table.name: table
    for table in (
        PaperTable("claims", "", "What the paper states, and what our runs say",
                   lambda experiments: claim_table(judge(experiments, CLAIMS), experiments.scale), CLAIMS_LEGEND),
        PaperTable("final-loss", "Figure 5a", "Final training loss", final_losses),
        PaperTable("slowdown", "Figure 8a", "Slowdown by method and estimation strategy",
                   partial(paper_slowdowns, methods=BASELINES_AND_STRATEGIES)),
        PaperTable("preconditioned", "Table 3", "Slowdown of preconditioned methods",
                   partial(paper_slowdowns, methods=PRECONDITIONED_TABLE)),
        PaperTable("experiments", "", "Final losses of every experiment",
                   lambda experiments: experiment_table(experiments.chosen)),
        PaperTable("reduction", "", "Iterations saved over the best baseline, at its final loss", paper_reductions),
        PaperTable("ladder", "", "What delay costs, by the length of the training", slowdowns_by_length),
        PaperTable("stages", "Table 1", "The least number of stages of large models, by the memory of a device",
                   lambda _: stage_count_table(LLAMAS, DEVICES_GB)),
        PaperTable("memory", "", "Memory beyond Adam's moments, GiB per matrix (fp32)", lambda _: llama_overhead()),
        PaperTable("hessian-norm", "", NORM_TITLE,
                   lambda experiments: norm_table(measured_norms(find_runs([experiments.scale.curvature])))),
        PaperTable("similarity", "", "What delay costs where one number of the laptop preset is another",
                   lambda experiments: study_table(load_study(experiments.scale))),
        PaperTable("wider-rates", "", "Slowdown with learning rates beyond the paper's grid, seed 0", wider_rates),
        PaperTable("learning-rates", "", "Learning rates, chosen by the final validation loss", chosen_rates),
    )
}  # fmt: skip
