"""The paper's tables, from the runs of a scale; each a frame of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from brx.config.loading import Settings
from brx.curvature.norm_result import measured_norms
from brx.curvature.norm_tables import NORM_TITLE, norm_table
from brx.errors import UserError
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import claim_table, judge, number_text
from brx.paper.ladder import (
    LEAST_RUNGS,
    Rung,
    at_the_papers_delay,
    ladder_savings,
    ladder_slowdowns,
    rungs,
    saving_law,
    slowdown_law,
)
from brx.paper.llama import DEVICES_GB, LLAMA_3_8B, LLAMAS
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import LADDER_METHODS, MAIN, SEVEN, VARIANTS, Experiments, sweep_of
from brx.planning.stage_count import stage_count_table
from brx.planning.strategy_overhead import overhead_texts
from brx.runs.comparison import reductions, slowdowns
from brx.runs.frames import SEED, find_runs
from brx.runs.tables import (
    experiment_table,
    final_loss_text,
    rate_table,
    rate_text,
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
PRECONDITIONED = ("pipedream-lr", "nesterov", "muon", "scion", "soap", "basis-rotation")


@dataclass(frozen=True)
class PaperTable:
    """One table.

    Attributes:
        name: on the command line and of the files.
        place: in the paper, such as `Table 3`; empty where it has only a sentence.
        title: what it shows.
        make: makes it, a frame of texts; empty where none of its experiments are there.
        legend: what a reader of the table has to know.
    """

    name: str
    place: str
    title: str
    make: Callable[[Experiments], pd.DataFrame]
    legend: str = ""


def paper_slowdowns(methods: Sequence[str], experiments: Experiments) -> pd.DataFrame:
    """Slowdown of methods at the deepest pipeline, to the target of the scale."""
    deepest = experiments.scale.deepest
    rows = []
    target = experiments.slowdown_target()
    for method in methods:
        pair = [experiments.find(method, P, sweep_of(method)) for P in experiments.ends]
        present = [seeds for seeds in pair if seeds is not None]
        if target is None or len(present) < len(pair):
            continue
        (slowdown,) = slowdowns(pd.concat(present), target).to_dict("records")
        rows.append(
            {
                "method": method,
                f"slowdown at P = {deepest}": slowdown_text(slowdown),
                "seeds": seeds_text(slowdown),
                "lr at P = 1": rate_text(slowdown["reference_lr"], at_edge=slowdown["reference_lr_at_edge"]),
                f"lr at P = {deepest}": rate_text(slowdown["lr"], at_edge=slowdown["lr_at_edge"]),
                "the paper's": number_text(SLOWDOWNS[method], "times"),
                "target loss": f"{target:.3f}",
            }
        )
    return pd.DataFrame(rows)


def final_losses(experiments: Experiments) -> pd.DataFrame:
    """Final training loss of every method at every number of stages: mean, and range over seeds."""
    rows = []
    for method, seeds in _main_and_others(experiments).items():
        if any(runs is not None for runs in seeds.values()):
            cells = {f"P = {depth}": "" if runs is None else final_loss_text(runs) for depth, runs in seeds.items()}
            rows.append({"method": method, **cells})
    return pd.DataFrame(rows)


def chosen_rates(experiments: Experiments) -> pd.DataFrame:
    """The chosen learning rates with the final validation loss of every one tried."""
    present = [runs for seeds in _main_and_others(experiments).values() for runs in seeds.values() if runs is not None]
    if not present:
        return pd.DataFrame()
    return rate_table(experiments.runs, pd.concat(present)).drop(columns="model")


def wider_rates(experiments: Experiments) -> pd.DataFrame:
    """The main comparison's ends once with the paper's rates and once with higher ones, too; seed 0 in both.

    Raises:
        UserError: there are no runs with higher ones.
    """
    wider = experiments.with_wider_rates()
    paper = Experiments(wider.scale, experiments.runs[experiments.runs[SEED] == 0], experiments.folder)
    ends = [f"P = {P}" for P in experiments.ends]
    tables = []
    for grid, asked in (("the paper's", paper), ("wider", wider)):
        table = paper_slowdowns(MAIN, asked)
        if table.empty:
            raise UserError(f"{asked.folder}: no method has seed 0 both without delay and at the deepest pipeline")
        losses = final_losses(asked)[["method", *ends]]
        tables.append(losses.merge(table.drop(columns=["seeds", "the paper's"]), on="method").assign(rates=grid))
    return pd.concat(tables).rename(columns={end: f"final training loss at {end}" for end in ends})


def _main_and_others(experiments: Experiments) -> dict[str, dict[int, pd.DataFrame | None]]:
    """The plain runs of every method but delay compensation, by number of stages."""
    depths = experiments.scale.depths
    return {
        method: {P: experiments.find(method, P, sweep_of(method)) for P in depths}
        for method in VARIANTS
        if method != "delay-compensation"
    }


def paper_reductions(experiments: Experiments) -> pd.DataFrame:
    """Iterations that basis rotation saves over the best baseline, as the paper's headline numbers put it."""
    scale = experiments.scale
    cases: list[tuple[str, int, str, str | None, Settings]] = [
        ("main", scale.deepest, "main", None, {}),
        ("smaller", 24, "width", None, scale.narrow),
        ("larger", 24, "width", scale.wide_preset, scale.wide),
        ("mixture of experts", scale.deepest, "moe", scale.moe_preset, {}),
    ]
    rows = []
    for model, stages, sweep, preset, settings in cases:
        asked = [experiments.find(method, stages, sweep, preset=preset, settings=settings) for method in MAIN]
        present = [seeds for seeds in asked if seeds is not None]
        for reduction in reductions(pd.concat(present)).to_dict("records") if present else []:
            rows.append(
                {
                    "model": model,
                    "P": str(stages),
                    "method": reduction["method"],
                    "best baseline": reduction["baseline"],
                    "iterations saved": saved_text(reduction),
                    "the paper's": number_text(SAVED[model], "percent"),
                }
            )
    return pd.DataFrame(rows)


def slowdowns_by_length(experiments: Experiments) -> pd.DataFrame:
    """What delay costs, by the length of the training: a target for each length, that the ladder's methods reach.

    Methods beside the ladder's are there for the lengths that they were trained. The last rows extrapolate to the
    paper's relative delay, 0.013 %.

    Raises:
        UserError: the scale has one length only.
    """
    rows = []
    ladder = rungs(experiments)
    for rung in ladder:
        savings = ladder_savings([rung]).to_dict("records")
        saved = {row["method"]: f"{saved_text(row)} (over {row['baseline']})" for row in savings}
        for slowdown in ladder_slowdowns([rung], with_others=True).to_dict("records"):
            method = slowdown["method"]
            rows.append(
                {
                    "method": method,
                    "iterations": str(rung.iterations),
                    "P": str(rung.num_stages),
                    "final training loss at P = 1": final_loss_text(rung.seeds(method, 1)),
                    "at P": final_loss_text(rung.seeds(method, rung.num_stages)),
                    "slowdown": slowdown_text(slowdown),
                    "target loss": f"{slowdown['target']:.3f}",
                    "iterations saved at P": saved.get(method, ""),
                    "lr at P = 1": rate_text(slowdown["reference_lr"], at_edge=slowdown["reference_lr_at_edge"]),
                    "lr at P": rate_text(slowdown["lr"], at_edge=slowdown["lr_at_edge"]),
                }
            )
    return pd.DataFrame([*rows, *_extrapolated(ladder)]).fillna("")


def _extrapolated(ladder: Sequence[Rung]) -> list[dict[str, str]]:
    """What the ladder's laws say of the paper's relative delay, with 95 % prediction intervals."""
    if len(ladder) < LEAST_RUNGS:
        return []
    slowdowns, savings = ladder_slowdowns(ladder), ladder_savings(ladder)
    rows = []
    for method in sorted(LADDER_METHODS):
        saved = savings[savings["method"] == method]
        rows.append(
            {
                "method": method,
                "iterations": "244000, extrapolated",
                "P": str(ladder[0].num_stages),
                "slowdown": at_the_papers_delay(slowdown_law(slowdowns[slowdowns["method"] == method]), 1, 1, ".2f"),
                "iterations saved at P": at_the_papers_delay(saving_law(saved), 1, -1, ".0%") if len(saved) else "",
            }
        )
    return rows


def all_claims(experiments: Experiments) -> pd.DataFrame:
    """Everything that the paper states, beside our runs."""
    return claim_table(judge(experiments, CLAIMS), experiments.scale)


def memory_overhead(_: Experiments) -> pd.DataFrame:
    """What the strategies of basis rotation add for one matrix of Llama-3-8B's attention and of its MLP."""
    names = {shape: name for name, shape in LLAMA_3_8B.items()}
    return overhead_texts(dict.fromkeys(names, 1), names)[1]


def hessian_norms(experiments: Experiments) -> pd.DataFrame:
    """Norms of the Hessian as far as they have been measured."""
    return norm_table(measured_norms(find_runs([experiments.scale.curvature])))


TABLES = {
    table.name: table
    for table in (
        PaperTable("claims", "", "What the paper states, and what our runs say", all_claims, CLAIMS_LEGEND),
        PaperTable("final-loss", "Figure 5a", "Final training loss", final_losses),
        PaperTable(
            "slowdown", "Figure 8a", "Slowdown by method and estimation strategy",
            lambda experiments: paper_slowdowns(SEVEN, experiments),
        ),
        PaperTable(
            "preconditioned", "Table 3", "Slowdown of preconditioned methods",
            lambda experiments: paper_slowdowns(PRECONDITIONED, experiments),
        ),
        PaperTable("experiments", "", "Final losses of every experiment",
            lambda experiments: experiment_table(experiments.chosen),
        ),
        PaperTable("reduction", "", "Iterations saved over the best baseline, at its final loss", paper_reductions),
        PaperTable("ladder", "", "What delay costs, by the length of the training", slowdowns_by_length),
        PaperTable(
            "stages", "Table 1", "The least number of stages of large models, by the memory of a device",
            lambda _: stage_count_table(LLAMAS, DEVICES_GB),
        ),
        PaperTable("memory", "", "Memory beyond Adam's moments, GiB per matrix (fp32)", memory_overhead),
        PaperTable("hessian-norm", "", NORM_TITLE, hessian_norms),
        PaperTable("wider-rates", "", "Slowdown with learning rates beyond the paper's grid, seed 0", wider_rates),
        PaperTable("learning-rates", "", "Learning rates, chosen by the final validation loss", chosen_rates),
    )
}  # fmt: skip
