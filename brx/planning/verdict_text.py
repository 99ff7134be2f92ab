"""What `brx verdict` says: the answer and three lines of reason; with `--verbose` tables, gaps and assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from brx.planning.cuts import EqualStages
from brx.planning.verdict import Option, Verdict
from brx.runs.formats import format_table
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

MOST_METHODS = 8
"""Rows of the asynchronous table."""


def verdict_text(found: Sequence[Verdict], measurements: Measurements, run: PlannedRun | None) -> str:
    """The answer, and why: the slowdown; the loss, and the answer for a lower one; what it rests on.

    Args:
        found: the answer, and that for the lowest loss that any method reaches, if that is another one.
        measurements: what they are from.
        run: the model and its devices, if they were given.
    """
    verdict, *lower = found
    question = verdict.question
    delay = f"at delays up to {question.delay:.3g} updates"
    loss = f"To a training loss of {question.loss:g} nats."
    if lower:
        loss = (
            f"To {question.loss:g} nats, which AdamW reaches {delay}, too. To {lower[0].question.loss:g}, the lowest"
            f" of any method: {sentence(lower[0])}"
        )
    source = "updates and stages as the model has them" if run else "equal stages, updates as they cost in these runs"
    rests = f"Measured on {measurements.source} ({measurements.model}); {source}. --verbose: tables, assumptions."
    return "\n".join([sentence(verdict), f"  {_reason(verdict, delay)}", f"  {loss}", f"  {rests}"])


def _reason(verdict: Verdict, delay: str) -> str:
    if not verdict.asynchronous:
        return f"No slowdown {delay}: {len(verdict.unmeasured)} methods were measured at other delays only."
    best, even = verdict.asynchronous[0], verdict.break_even(verdict.asynchronous[0])
    against = ""
    if verdict.rival is not None and even is not None:
        against = f"; as fast as {_name(verdict.rival)} at {even:.2f}" + (", below any slowdown" if even < 1 else "")
        if verdict.rival.method in verdict.unmeasured:
            against += f" ({verdict.rival.method} itself was not run at such delays)"
    return f"Slowdown of {best.method} {delay}: {slowdown_text(best)}{against}."


def slowdown_text(option: Option) -> str:
    """For example `1.21 [1.10, 1.33]`, `1.21 (one seed)`, `> 3.1`."""
    slowdown = option.slowdown
    if slowdown is None:
        return "no reference"
    if slowdown.is_lower_bound:
        return f"> {slowdown.ratio:.2f}"
    if slowdown.low is None or slowdown.high is None:
        return f"{slowdown.ratio:.2f} (one seed)"
    return f"{slowdown.ratio:.2f} [{slowdown.low:.2f}, {slowdown.high:.2f}]"


def sentence(verdict: Verdict) -> str:
    """Who wins, and by how much; a tie where noise could decide."""
    missing = _missing(verdict)
    if missing is not None:
        return f"No verdict: {missing}"
    best, rival, advantage = verdict.asynchronous[0], verdict.rival, verdict.advantage
    assert advantage is not None
    assert rival is not None
    if best.iterations.is_lower_bound and advantage > 1.0:
        return "No verdict: no asynchronous method reached the loss; ask for a higher --loss."
    if verdict.is_tie:
        low, high = (advantage * math.exp(sign * verdict.noise) for sign in (-1, 1))
        return (
            f"A tie, within noise: asynchronous {best.method} is {advantage:.2f} [{low:.2f}, {high:.2f}] times as fast"
            f" as {_name(rival)}."
        )
    if advantage > 1.0:
        return f"Asynchronous wins: {best.method} is {advantage:.2f} times as fast as {_name(rival)}."
    side = "Synchronous wins" if rival in verdict.synchronous else "Replicas win"
    bound = "more than " if best.iterations.is_lower_bound else ""
    return f"{side}: {_name(rival)} is {bound}{1 / advantage:.2f} times as fast as asynchronous {best.method}."


def _missing(verdict: Verdict) -> str | None:
    """What keeps the sides from being compared, if anything does."""
    too_large = verdict.too_large and not verdict.asynchronous
    if not verdict.has_cuts:
        if too_large:
            return "no schedule fits into the memory of a device."
        if verdict.rival is None:
            return "no synchronous schedule fits into the memory of a device, the asynchronous one does."
    if not verdict.has_runs_without_delay:
        return "none of the runs is without delay; runs with pipeline.stages=1 would measure it."
    if verdict.rival is None:
        return "no run without delay reaches this loss; ask for a higher --loss."
    if too_large:
        return f"no asynchronous method fits into the memory of a device, {_name(verdict.rival)} does."
    if not verdict.asynchronous:
        return (
            f"no run measures a slowdown at delays up to {verdict.question.delay:.3g} updates. {_name(verdict.rival)}"
            " is the fastest without."
        )
    return None


def long_text(verdict: Verdict, run: PlannedRun | None) -> str:
    """The tables, what is not measured, and what is assumed."""
    parts = []
    if verdict.schedules:
        parts += ["", format_table(synchronous_table(verdict, run), "table")]
    if verdict.synchronous:
        parts.append(format_table(method_table(verdict, "synchronous method", run), "table"))
    if verdict.asynchronous:
        parts.append(format_table(method_table(verdict, "asynchronous method", run), "table"))
    if verdict.replicas:
        parts.append(format_table(method_table(verdict, "replicas", run), "table"))
    if verdict.too_large:
        parts.append(f"Asynchronous runs that do not fit into a device: {', '.join(verdict.too_large)}.")
    return "\n".join([*parts, *unmeasured_lines(verdict), *assumption_lines(verdict, run)])


def synchronous_table(verdict: Verdict, run: PlannedRun | None) -> pd.DataFrame:
    """A row per schedule, each by its best number of micro-batches, with the method that is fastest without delay."""
    rows = [
        {
            "synchronous schedule": option.cut.schedule,
            "M": str(option.cut.num_micro_batches),
            "idle": f"{option.cut.idle:.1%}",
            **_numbers(verdict, option, run),
        }
        for option in verdict.schedules
    ]
    return pd.DataFrame(rows)


def method_table(verdict: Verdict, kind: str, run: PlannedRun | None) -> pd.DataFrame:
    """A row per method, fastest first, by its best cut."""
    sides = {"asynchronous method": verdict.asynchronous, "synchronous method": verdict.synchronous}
    rows = []
    for option in sides.get(kind, verdict.replicas)[:MOST_METHODS]:
        row = {kind: option.method}
        if kind == "asynchronous method":
            even = verdict.break_even(option)
            row["slowdown"] = slowdown_text(option)
            row["break-even"] = "--" if even is None else f"{even:.2f}"
            row["at delays"] = " to ".join(f"{delay:g}" for delay in option.iterations.delays)
        elif kind == "synchronous method":
            row["schedule"], row["M"] = option.cut.schedule, str(option.cut.num_micro_batches)
        rows.append(row | _numbers(verdict, option, run))
    return pd.DataFrame(rows)


def _numbers(verdict: Verdict, option: Option, run: PlannedRun | None) -> dict[str, str]:
    """Iterations, time, and with a model what it says."""
    bound = "> " if option.iterations.is_lower_bound else ""
    time = option.time if verdict.rival is None else option.time / verdict.rival.time
    numbers = {"iterations": f"{bound}{option.count:.0f}"}
    if run is not None and (seconds := run.seconds(option.cut)) is not None:
        numbers["s / update"] = f"{seconds:.4g}"
    if option.cut.memory is not None:
        numbers["GB"] = f"{option.cut.memory / 1e9:.2f}"
    return numbers | {"time": f"{bound}{time:.3g}"}


def unmeasured_lines(verdict: Verdict) -> list[str]:
    """Methods without a slowdown at this delay, and the runs that would measure it."""
    if not verdict.unmeasured:
        return []
    delay = verdict.question.delay
    by_delays: dict[str, list[str]] = {}
    for method, delays in verdict.unmeasured.items():
        by_delays.setdefault(" and ".join(f"{delay:g}" for delay in delays), []).append(method)
    around = sorted({max(1, math.floor(1 + delay)), math.ceil(1 + delay)})
    stages = " and ".join(f"pipeline.stages={count}" for count in around)
    lines = [f"  measured only at {delays}: {'; '.join(methods)}" for delays, methods in by_delays.items()]
    return [f"No run measures these at delays up to {delay:.3g} updates; runs of them with {stages} would:", *lines]


def assumption_lines(verdict: Verdict, run: PlannedRun | None) -> list[str]:
    """What the answer rests on."""
    question, shown = verdict.question, [*verdict.synchronous[:MOST_METHODS], *verdict.asynchronous[:MOST_METHODS]]
    lines = [units_line(run), *([run.uneven] if run is not None and run.uneven else [])]
    if isinstance(question.devices, EqualStages):
        lines.append(
            f"The synchronous side may split up an update's {question.devices.examples} examples, those of these runs,"
            f" or take M = {question.num_micro_batches}, too."
        )
    costs = {one.method: f"{one.method} {one.cost:.0%}" for one in shown if one.cost is not None}
    told = [text for method, text in costs.items() if method in question.costs]
    paced = [text for method, text in costs.items() if method not in question.costs]
    silent = ": --cost and --cost-from do not name them" if question.costs else ""
    texts = [f"{', '.join(told)} (by --cost or --cost-from)"] if told else []
    texts += [f"{', '.join(paced)} (from the pace of these runs{silent})"] if paced else []
    texts += ["by their products' FLOPs"] if run is not None and any(one.cost is None for one in shown) else []
    if shown:
        lines.append(f"What a method's update costs beyond AdamW's, as a share of the passes: {'; '.join(texts)}.")
    if question.local is not None:
        lines.append(
            f"Replicas: {question.local.steps} local steps, an averaging takes {question.local.averaging:.3g} times an"
            f" update's passes; {question.local.slowdown:g} times the iterations; each updates the whole model."
        )
    few = sorted({option.method for option in verdict.asynchronous[:MOST_METHODS] if option.iterations.num_rates == 1})
    if few:
        lines.append(f"At some of these delays only one learning rate was tried: {', '.join(few)}: upper estimates.")
    return [*lines, "(one seed): its noise is that between the seeds of the other experiments."]


def units_line(run: PlannedRun | None) -> str:
    """What time is measured in, and what is assumed."""
    stages = "equal stages, a device each" if run is None else "stages and updates by their FLOPs"
    transfers = "transfers beside the computation" if run and run.bandwidth else "transfers that take no time"
    return (
        "Time is that to the loss, over that of the fastest option that is not asynchronous. Assumed: equal examples"
        f" per update, {stages}, synchronous updates not overlapped with passes, {transfers}."
    )


def _name(option: Option | None) -> str:
    assert option is not None
    count = option.cut.num_micro_batches
    cut = f"{option.cut.schedule} (M = {count})" if count > 1 else option.cut.schedule
    return f"{cut} with {option.method}"
