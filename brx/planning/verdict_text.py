"""What `brx verdict` says: the answer and the reasons; with `--verbose` tables, gaps and
assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from brx.planning.schedules import EqualStages
from brx.planning.verdict import Option, Verdict, by_method
from brx.runs.formats import format_table
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

MOST_METHODS = 8  # rows of a table


def verdict_text(
    found: Sequence[Verdict], measurements: Measurements, run: PlannedRun | None
) -> str:
    """The answer and what it rests on, a line each; behind it in `found` that for the lowest loss,
    if another."""
    verdict, *lower = found
    question = verdict.question
    examples, count = question.devices.examples, question.num_micro_batches
    lines = _reasons(verdict) + _replicas(verdict) + _too_large(verdict, measurements, run)
    lines.append(
        f"To a training loss of {question.loss:g} "
        f"nats{', which AdamW reaches, too' if lower else ''}."
    )
    lines += [
        f"To {low.question.loss:g} nats, the lowest of any method: {sentence(low)}" for low in lower
    ]
    if examples % count == 0:
        split = f"{count} micro-batch{'' if count == 1 else 'es'} of {examples // count}"
        lines.append(f"{examples} examples per update, {split}.")
    source = "equal stages, updates as they cost in these runs"
    if run:
        source = (
            "updates and stages as the planned model has them; that it slows down as these "
            "runs is assumed"
        )
    lines += [
        f"Measured on {measurements.source} ({measurements.model}); {source}.",
        "--verbose: tables, assumptions.",
    ]
    return "\n  ".join([sentence(verdict), *lines])


def _reasons(verdict: Verdict) -> list[str]:
    delay = f"delays up to {verdict.question.delay:.3g} updates"
    if not verdict.asynchronous:
        if verdict.too_large:
            return []
        return [
            f"No slowdown at {delay}: {len(verdict.unmeasured)} methods were measured at other "
            f"delays only."
        ]
    best, rival = verdict.asynchronous[0], verdict.rival
    even, measured = verdict.break_even(best), f"{option_slowdown(best)}, at {delay}."
    if rival is None or even is None:
        return [f"Slowdown of {best.method}: {measured}"]
    below = f"below {even:.2f}; measured: {measured}"
    lines = [
        f"Asynchronous training "
        f"{'is faster if its slowdown is' if even > 1 else 'would need a slowdown'} {below}"
    ]
    return [
        *lines,
        *(
            [f"{rival.method} was not run at such delays."]
            if rival.method in verdict.unmeasured
            else []
        ),
    ]


def _replicas(verdict: Verdict) -> list[str]:
    """How far replicas are behind, where they were asked for and are not the rival anyway."""
    if verdict.question.local is None or verdict.rival is None or verdict.rival in verdict.replicas:
        return []
    if not verdict.replicas:
        return [
            "No replicas: the examples are no multiple of the devices, or the whole model does not "
            "fit into one."
        ]
    best = verdict.replicas[0]
    ratio = best.time / verdict.rival.time
    return [
        f"Replicas, at best with {best.method}, take {ratio:.2f} times as long as "
        f"{_name(verdict.rival)}."
    ]


def _too_large(verdict: Verdict, measurements: Measurements, run: PlannedRun | None) -> list[str]:
    """The methods whose asynchronous run does not fit into a device, by what would help."""
    by_remedy: dict[str | None, list[str]] = {}
    for method in verdict.too_large:
        remedy = run.remedy(by_method(measurements)[method][0].settings) if run else None
        by_remedy.setdefault(remedy, []).append(method)
    size = f"{(verdict.question.devices.memory or 0.0) / 1e9:g} GB"
    return [
        f"Too large for {size}: {'; '.join(methods)}{f' (fits with {remedy})' if remedy else ''}."
        for remedy, methods in by_remedy.items()
    ]


def option_slowdown(option: Option) -> str:
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
    if verdict.is_open:
        return "No verdict: no asynchronous method reached the loss; ask for a higher --loss."
    is_faster = advantage > 1.0
    ratio = advantage if is_faster or verdict.is_tie else 1 / advantage
    text = (
        f"{ratio:.2f} [{ratio * math.exp(-verdict.noise):.2f}, "
        f"{ratio * math.exp(verdict.noise):.2f}] times as fast"
    )
    if verdict.is_tie:
        return f"A tie, within noise: asynchronous {best.method} is {text} as {_name(rival)}."
    if verdict.is_upper_bound:
        text = f"more than {ratio:.2f} times as fast"
    elif min(len(option.iterations.by_seed) for option in (best, rival)) == 1:
        text = f"{ratio:.2f} times as fast (one seed)"
    if is_faster:
        return f"Asynchronous wins: {best.method} is {text} as {_name(rival)}."
    side = "Synchronous wins" if rival in verdict.synchronous else "Replicas win"
    return f"{side}: {_name(rival)} is {text} as asynchronous {best.method}."


def _missing(verdict: Verdict) -> str | None:
    too_large, rival = verdict.too_large and not verdict.asynchronous, verdict.rival
    if not verdict.has_cuts and too_large:
        return "no schedule fits into the memory of a device."
    if not verdict.has_cuts and rival is None:
        return (
            "no synchronous schedule fits into the memory of a device, the asynchronous one does."
        )
    if not verdict.has_runs_without_delay:
        return "none of the runs is without delay; runs with pipeline.stages=1 would measure it."
    if rival is None:
        return "no run without delay reaches this loss; ask for a higher --loss."
    if too_large:
        return f"no asynchronous method fits into the memory of a device, {_name(rival)} does."
    if not verdict.asynchronous:
        delay = f"delays up to {verdict.question.delay:.3g} updates"
        return f"no run measures a slowdown at {delay}. {_name(rival)} is the fastest without."
    return None


def long_text(verdict: Verdict, run: PlannedRun | None) -> str:
    tables = [option_table(verdict, kind, run) for kind in COLUMNS]
    parts = ["", *(format_table(table, "table") for table in tables if len(table))]
    return "\n".join([*parts, *unmeasured_lines(verdict), *assumption_lines(verdict, run)])


# Of the tables of `Verdict.schedules` and so on: headings and cells, beside those that all have.
COLUMNS = {
    "schedules": {"synchronous schedule": "schedule", "M": "M", "idle": "idle"},
    "synchronous": {"synchronous method": "method", "schedule": "schedule", "M": "M"},
    "asynchronous": {
        "asynchronous method": "method",
        **{name: name for name in ("slowdown", "break-even", "at delays")},
    },
    "replicas": {"replicas": "method"},
}


def option_table(verdict: Verdict, kind: str, run: PlannedRun | None) -> pd.DataFrame:
    """A row per option of a kind (a key of `COLUMNS`), fastest first, each by its best cut."""
    rows = []
    for option in getattr(verdict, kind)[:MOST_METHODS]:
        cut, even, bound = (
            option.cut,
            verdict.break_even(option),
            "> " if option.iterations.is_lower_bound else "",
        )
        cells = {
            "method": option.method,
            "schedule": cut.schedule,
            "M": str(cut.num_micro_batches),
            "idle": f"{cut.idle:.1%}",
            "slowdown": option_slowdown(option),
            "break-even": "--" if even is None else f"{even:.2f}",
            "at delays": " to ".join(f"{delay:g}" for delay in option.iterations.delays),
        }
        row = {heading: cells[name] for heading, name in COLUMNS[kind].items()}
        row["iterations"] = f"{bound}{option.num_iterations:.0f}"
        if run is not None and (seconds := run.seconds(cut)) is not None:
            row["s / update"] = f"{seconds:.4g}"
        if cut.memory is not None:
            row["GB"] = f"{cut.memory / 1e9:.2f}"
        row["time"] = f"{bound}{option.time / (verdict.rival.time if verdict.rival else 1.0):.3g}"
        rows.append(row)
    return pd.DataFrame(rows)


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
    lines = [
        f"  measured only at {delays}: {'; '.join(methods)}"
        for delays, methods in by_delays.items()
    ]
    return [
        f"No run measures these at delays up to {delay:.3g} updates; runs of them with {stages} "
        f"would:",
        *lines,
    ]


def assumption_lines(verdict: Verdict, run: PlannedRun | None) -> list[str]:
    question, asynchronous = verdict.question, verdict.asynchronous[:MOST_METHODS]
    lines = [units_line(run), *([run.uneven] if run is not None and run.uneven else [])]
    if isinstance(question.devices, EqualStages):
        lines.append(
            f"The synchronous side may split up an update's {question.devices.examples} examples, "
            f"those of these runs,"
            f" or take M = {question.num_micro_batches}, too."
        )
    shown = {
        option.method: option.cost
        for option in [*verdict.synchronous[:MOST_METHODS], *asynchronous]
    }
    given = {True: " (given)", False: ""}
    costs = [
        f"{name} {cost:.0%}{given[name in question.costs]}"
        for name, cost in shown.items()
        if cost is not None
    ]
    rest = f"what is not given by {'its FLOPs' if run else 'the pace of these runs'}"
    lines.append(
        f"What an update costs beyond AdamW's, as a share of the passes: "
        f"{', '.join([*costs, rest])}."
    )
    if question.local is not None:
        steps, averaging, slowdown = question.local
        lines.append(
            f"Replicas: {steps} local steps, an averaging takes {averaging:.3g} times an update's "
            f"passes; {slowdown:g}"
            " times the iterations; each updates the whole model."
        )
    few = sorted({option.method for option in asynchronous if option.iterations.num_rates == 1})
    if few:
        lines.append(
            f"At some of these delays only one learning rate was tried: {', '.join(few)}: upper "
            f"estimates."
        )
    return [*lines, "(one seed): its noise is that between the seeds of the other experiments."]


def units_line(run: PlannedRun | None) -> str:
    stages = "equal stages, a device each" if run is None else "stages and updates by their FLOPs"
    transfers = (
        "transfers beside the computation"
        if run and run.bandwidth
        else "transfers that take no time"
    )
    return (
        "Time is that to the loss, over that of the fastest option that is not asynchronous. "
        "Assumed: equal examples"
        f" per update, {stages}, synchronous updates not overlapped with passes, {transfers}."
    )


def _name(option: Option) -> str:
    split = f" (M = {option.cut.num_micro_batches})" if option.cut.num_micro_batches > 1 else ""
    return f"{option.cut.schedule}{split} with {option.method}"
