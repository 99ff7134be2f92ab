"""Does delay cost Llama's blocks as much as GPT's, and do the paper's conclusions hold for them?
The study of docs/protocol.md, section 15: five methods without delay and under the delays of 32
stages, both models with the same search of settings. For comparison, there are also GPT's runs of
section 9, for which learning rates alone were searched.

The *cost* of delay is the final validation loss at P = 32 minus the one at P = 1, seed by seed, in
nats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from brx.errors import UserError
from brx.paper import strict
from brx.paper.evidence import (
    Evidence,
    beats_baselines,
    lead_grows,
    losses_by_seed,
    margin,
    runs_of,
    slows_down_less,
)
from brx.paper.leads import BEST_BASELINE, draw_leads
from brx.paper.scales import DEEPEST, ENDS, OURS, SCALES, Experiments
from brx.plot.style import Look, finish_panel, look_of, new_figure, save, say_not_run
from brx.runs.comparison import BASELINES, slowdowns
from brx.runs.folder import has_runs
from brx.runs.tables import slowdown_text

METHODS = (*BASELINES, "muon", OURS)
RIVALS = (BEST_BASELINE, *BASELINES, "muon")
RATES_ALONE, GPT, LLAMA = "GPT, rates alone", "GPT", "Llama"
SCALE_OF = {RATES_ALONE: SCALES["similar"], GPT: SCALES["tuned"], LLAMA: SCALES["llama"]}
RUNS = SCALE_OF[LLAMA].runs
NOT_RUN: Literal["not run"] = "not run"

StrictOrNotRun = strict.Strict | Literal["not run"]


class Study:
    """The runs of the architectures, the keys of `SCALE_OF`.

    Attributes:
        experiments: by architecture; one that has no reported runs yet is not in it.
    """

    def __init__(self, experiments: Mapping[str, Experiments]) -> None:
        self.experiments = dict(experiments)

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read Llama's runs in a folder, and GPT's from the scales that `SCALE_OF` names.

        Raises:
            UserError: there are no runs at all.
        """
        experiments = {}
        for architecture, scale in SCALE_OF.items():
            place = folder if architecture == LLAMA else scale.runs
            if not has_runs(place):
                continue
            loaded = Experiments.load(scale, place)
            if not loaded.chosen.empty:  # runs for tuning alone report nothing
                experiments[architecture] = loaded
        if not experiments:
            sweeps = " ".join(scale.sweep("main") for scale in SCALE_OF.values())
            raise UserError(
                f"neither {folder} nor the folders of GPT have reported runs yet; make them with "
                f"brx sweep {sweeps}"
            )
        return cls(experiments)

    def final_losses(self, architecture: str, method: str, stages: int) -> pd.Series | None:
        """The final validation losses by seed, infinite where a run diverged; None without runs."""
        experiments = self.experiments.get(architecture)
        if experiments is None:
            return None
        try:
            return losses_by_seed(runs_of(experiments, method, stages))
        except UserError:
            return None

    def cost(self, architecture: str, method: str) -> pd.Series:
        """The cost of delay for a method, in nats, by seed; empty if there are no runs at one of
        the two ends. A seed on which the run without delay diverged is left out."""
        without, delayed = ((method, P) for P in ENDS)
        costs = self._difference(architecture, without, delayed)
        return costs[costs > -np.inf]

    def above_ours(self, architecture: str, method: str, stages: int) -> pd.Series:
        """How far a method ends above basis rotation at a number of stages, in nats, by seed; empty
        if one of the two has no runs there."""
        return self._difference(architecture, (OURS, stages), (method, stages))

    def _difference(
        self, architecture: str, lower: tuple[str, int], upper: tuple[str, int]
    ) -> pd.Series:
        """Final validation loss of `upper` minus `lower`, both a method and its number of stages,
        by seed; empty without runs of one of them."""
        experiments = self.experiments.get(architecture)
        if experiments is None:
            return pd.Series(dtype=float)
        try:
            runs = (runs_of(experiments, method, stages) for method, stages in (lower, upper))
            return margin(*runs).by_seed
        except UserError:
            return pd.Series(dtype=float)


def architecture_table(study: Study) -> pd.DataFrame:
    """A row of texts per architecture and method: losses at both ends, how far above basis
    rotation's they are, what delay costs, and what is still to run."""
    rows = []
    for architecture in SCALE_OF:
        for method in METHODS:
            rows.append(_row(study, architecture, method))
    return pd.DataFrame(rows)


def _row(study: Study, architecture: str, method: str) -> dict[str, str]:
    losses = {P: study.final_losses(architecture, method, P) for P in ENDS}
    means = {}
    above = {}
    to_run = []
    for P, by_seed in losses.items():
        means[f"P = {P}"] = "" if by_seed is None else _mean(by_seed)
        if by_seed is None:
            to_run.append(f"P = {P}")
        leads = [] if method == OURS else study.above_ours(architecture, method, P).tolist()
        above[f"above {OURS}, P = {P}"] = strict.mean_text(leads)
    costs = study.cost(architecture, method).tolist()
    difference = ""
    if architecture == LLAMA:
        difference = _difference_text(costs, study.cost(GPT, method).tolist())
    return {
        "model": architecture,
        "method": method,
        "seeds": _seeds_text(losses.values()),
        **means,
        **above,
        "cost of delay": strict.mean_text(costs),
        f"{LLAMA}'s minus {GPT}'s": difference,
        "slowdown": _slowdown(study, architecture, method),
        "to run": ", ".join(to_run),
    }


def _seeds_text(losses_at_ends: Iterable[pd.Series | None]) -> str:
    """How many seeds the means have: one number if it is the same at both ends, else one for each.
    Empty without runs."""
    counts = [0 if losses is None else len(losses) for losses in losses_at_ends]
    distinct = dict.fromkeys(counts)
    return " and ".join(map(str, distinct)) if any(counts) else ""


def _mean(losses: pd.Series) -> str:
    return f"{losses.mean():.3f}"


def _difference_text(llama_costs: Sequence[float], gpt_costs: Sequence[float]) -> str:
    """How much more delay costs Llama than GPT, and whether that is more than chance (Welch's t);
    empty with fewer than three seeds, or if a run diverged."""
    fewest = min(len(llama_costs), len(gpt_costs))
    if fewest < strict.FEWEST_SEEDS or not np.isfinite([*llama_costs, *gpt_costs]).all():
        return ""
    interval = strict.welch_interval(llama_costs, gpt_costs)
    finding = {1: "more", -1: "less", 0: "within chance"}[interval.sign]
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}], {finding}"


def _slowdown(study: Study, architecture: str, method: str) -> str:
    """A method's slowdown as a text; empty if it is unknown. The target is one training loss for
    all methods of the architecture."""
    experiments = study.experiments.get(architecture)
    if experiments is None:
        return ""
    target = experiments.slowdown_target()
    ends = experiments.find_ends(method)
    if target is None or ends is None:
        return ""
    (row,) = slowdowns(ends, target).to_dict("records")
    return slowdown_text(row)


# Whether the paper's conclusions hold for Llama.


@dataclass(frozen=True)
class Statement:
    """One conclusion of the paper; `evidence` raises UserError where runs are missing."""

    text: str
    evidence: Callable[[Experiments], Evidence]


STATEMENTS = (
    Statement("basis rotation ends below every baseline at P = 32", beats_baselines),
    Statement(
        "delay widens its lead over the best baseline",
        lambda experiments: lead_grows(experiments, OURS, BASELINES, from_stages=1),
    ),
    Statement(
        "delay slows it down less than every baseline",
        lambda experiments: slows_down_less(experiments, [(OURS, name) for name in BASELINES]),
    ),
)
CONCLUSION = "all of these: the paper's conclusion"


def verdict_table(study: Study) -> pd.DataFrame:
    """A row of texts per conclusion of the paper, with the strict verdict for each architecture;
    the last row is their conjunction."""
    rows: list[dict[str, str]] = []
    verdicts: dict[str, list[StrictOrNotRun]] = {architecture: [] for architecture in SCALE_OF}
    for statement in STATEMENTS:
        row = {"statement": statement.text}
        for architecture in SCALE_OF:
            verdict, text = _judged(study, architecture, statement)
            verdicts[architecture].append(verdict)
            row |= {architecture: verdict, f"{architecture}, here": text}
        rows.append(row)
    last: dict[str, str] = {"statement": CONCLUSION}
    for architecture, its_verdicts in verdicts.items():
        last |= {architecture: conjunction(its_verdicts), f"{architecture}, here": ""}
    return pd.DataFrame([*rows, last])


def _judged(study: Study, architecture: str, statement: Statement) -> tuple[StrictOrNotRun, str]:
    """The strict verdict on a statement, and a text: our numbers, or why there is no verdict."""
    experiments = study.experiments.get(architecture)
    if experiments is None:
        return NOT_RUN, _sweep_of(architecture)
    try:
        evidence = statement.evidence(experiments)
    except UserError as error:
        return NOT_RUN, str(error)
    assert evidence.strict is not None, "a direction has a strict verdict"
    return evidence.strict, evidence.text


def _sweep_of(architecture: str) -> str:
    """The command that makes an architecture's runs."""
    return f"brx sweep {SCALE_OF[architecture].sweep('main')}"


def conjunction(verdicts: Sequence[StrictOrNotRun]) -> StrictOrNotRun:
    """The verdict on all statements together: the first of *no*, *not run* and *open* that is among
    the verdicts; *yes* if none of them is."""
    order: tuple[StrictOrNotRun, ...] = ("no", NOT_RUN, "open")
    return next((verdict for verdict in order if verdict in verdicts), "yes")


# The figure.

CAPTION = (
    "Does delay cost Llama's blocks as much as GPT's? *Rates alone*: the runs of the claims, for "
    "which no second setting was searched. Above: final validation loss without delay "
    "(hollow) and under the delays of 32 stages (filled); bars: range over seeds. Below: how far "
    "basis rotation ends below each rival under these delays, and the part that is there without "
    "delay; lines: 95 % intervals of the whole."
)


def draw_architectures(folder: Path, path: Path) -> list[Path]:
    """Draw the architectures that have runs next to each other; the caption names what has none.
    Returns the files written."""
    study = Study.load(folder)
    shown = list(study.experiments)
    missing: list[str] = []
    for architecture in SCALE_OF:
        if architecture not in shown:
            missing.append(f"{architecture}, whose runs {_sweep_of(architecture)} makes")
    with new_figure(width=3.5, height=5.4, columns=len(shown)) as figure:
        panels = figure.subplots(2, len(shown), squeeze=False)
        for column, architecture in enumerate(shown):
            losses_axes, leads_axes = panels[:, column]
            missing += _draw_losses(study, architecture, losses_axes)
            _draw_leads(study.experiments[architecture], leads_axes)
        _share_ranges(panels[0])
        _share_ranges(panels[1])
        if not any(axes.lines for axes in panels[0]):
            raise UserError(f"{folder}: no method of the study has runs yet")
        caption = CAPTION
        if missing:
            caption += f"\nWithout runs: {', '.join(missing)}."
        details = {"losses": loss_records(study), "not there": missing}
        return save(figure, path, caption, command="brx plot architectures", details=details)


def _share_ranges(row: Any) -> None:
    """Give one horizontal range to all panels of a row that have data."""
    with_data = [axes for axes in row if axes.lines or axes.patches]
    for axes in with_data[1:]:
        axes.sharex(with_data[0])
        axes.autoscale(axis="x")


def _draw_losses(study: Study, architecture: str, axes: Axes) -> list[str]:
    """Draw a row per method: its losses at both ends, and a line from one to the other. The row's
    label says how many seeds diverged, which are in no mean. Returns texts about the ends that have
    no runs."""
    missing = []
    labels = []
    for y, method in enumerate(reversed(METHODS)):
        label = look_of(method).label
        means: dict[int, float] = {}
        for P in ENDS:
            losses = study.final_losses(architecture, method, P)
            if losses is None:
                missing.append(f"{architecture} {method} at P = {P}")
                continue
            finite = losses[np.isfinite(losses)]
            if len(finite) < len(losses):
                label += f"\n({len(losses) - len(finite)} diverged, P = {P})"
            if len(finite):
                means[P] = float(finite.mean())
                _draw_seeds(axes, finite, y, look_of(method), is_filled=P == DEEPEST)
        if len(means) == len(ENDS):
            line: dict[str, Any] = {"linewidth": 0.8, "zorder": 1}
            axes.plot(list(means.values()), [y, y], color=look_of(method).color, **line)
        labels.append(label)
    if not axes.lines:
        say_not_run(axes, architecture)
        return missing
    axes.set_yticks(range(len(METHODS)), labels)
    axes.set_ylim(-0.5, len(METHODS) - 0.5)
    title = f"{architecture}\n{_least_cost(study, architecture)}".strip()
    finish_panel(axes, "final validation loss (nats)", "", title)
    return missing


def _least_cost(study: Study, architecture: str) -> str:
    """The method to which delay costs least, as the second line of a title; empty unless two
    methods have a cost. The cost of a method with a run that diverged is infinite."""
    costs = {}
    for method in METHODS:
        by_seed = study.cost(architecture, method)
        if len(by_seed):
            costs[method] = by_seed
    if len(costs) < 2:
        return ""
    least, second = sorted(costs, key=lambda method: float(costs[method].mean()))[:2]
    label, cost = look_of(least).label, costs[least].mean()
    # The order of two means may be chance.
    if strict.direction((costs[second] - costs[least]).dropna().tolist()) == "yes":
        return f"delay costs {label} least: {cost:.2f} nats"
    return f"lowest mean cost of delay: {label}, {cost:.2f} nats"


def _draw_leads(experiments: Experiments, axes: Axes) -> None:
    """Draw the leads of basis rotation, or say that runs for them are missing."""
    try:
        draw_leads(experiments, axes, RIVALS)
    except UserError:
        say_not_run(axes, "leads")


def _draw_seeds(axes: Axes, losses: pd.Series, y: float, look: Look, *, is_filled: bool) -> None:
    """Draw the mean of some seeds' losses as a point, and their range as a bar."""
    ends = [losses.min(), losses.max()]
    axes.plot(ends, [y, y], color=look.color, linewidth=3, zorder=2)
    face = look.color if is_filled else "white"
    style: dict[str, Any] = {"color": look.color, "markerfacecolor": face, "zorder": 3}
    axes.plot(float(losses.mean()), y, look.marker, **style)


def loss_records(study: Study) -> list[dict[str, Any]]:
    """The final validation losses by seed."""
    records = []
    for architecture in SCALE_OF:
        for method in METHODS:
            for P in ENDS:
                losses = study.final_losses(architecture, method, P)
                if losses is None:
                    continue
                record = {"model": architecture, "method": method, "P": P}
                records.append(record | {"loss by seed": strict.rounded_by_seed(losses)})
    return records
