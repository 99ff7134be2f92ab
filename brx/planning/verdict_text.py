"""The text of `brx verdict`: the answer with its reasons; with `--verbose` also tables, gaps and
assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from brx.errors import counted
from brx.planning.iterations import by_method
from brx.planning.schedules import Cut, EqualStages
from brx.planning.verdict import Comparison, Option, Verdict
from brx.runs.formats import format_table
from brx.runs.time_to_loss import Measurements

if TYPE_CHECKING:
    from brx.planning.planned_run import PlannedRun

MOST_METHODS = 8  # rows of a table


def verdict_text(
    verdicts: Sequence[Verdict], measurements: Measurements, run: PlannedRun | None
) -> str:
    """The answer and its reasons, one per line.

    Args:
        verdicts: the verdict for the loss that was asked for, and then those for lower losses.
        measurements: the measurements that the verdicts come from.
        run: the planned model, if one was given.
    """
    verdict, *lower = verdicts
    question = verdict.question
    lines = [
        sentence(verdict),
        *_best_of_each_lines(verdict),
        *_reasons(verdict),
        *_too_large_lines(verdict, measurements, run),
    ]
    also_adamw = ", which AdamW reaches, too" if lower else ""
    lines.append(f"To a training loss of {question.loss:g} nats{also_adamw}.")
    for low in lower:
        loss = f"{low.question.loss:g} nats, the lowest of any method"
        lines.append(f"To {loss}: {sentence(low)}")
        lines += _best_of_each_lines(low)
    lines += _split_lines(verdict)
    unless_given = " (where no cost is given)" if question.costs else ""
    source = f"equal stages, updates{unless_given} as they cost in these runs"
    if run is not None:
        source = (
            f"updates{unless_given} and stages as the planned model has them; that it slows down "
            f"like these runs is assumed"
        )
    lines += [
        f"Measured on {measurements.source} ({measurements.model}); {source}.",
        "--verbose: tables, assumptions.",
    ]
    return "\n  ".join(lines)


def _split_lines(verdict: Verdict) -> list[str]:
    examples = verdict.question.devices.examples
    count = verdict.question.num_micro_batches
    if examples % count:
        return []
    micro_batches = counted(count, "micro-batch")
    return [f"{counted(examples, 'example')} per update, {micro_batches} of {examples // count}."]


def sentence(verdict: Verdict) -> str:
    """Which side wins with one method on both sides, and how clearly; a tie if noise could
    decide."""
    missing = _missing(verdict)
    if missing is not None:
        return f"No verdict: {missing}"
    pair = verdict.same_method
    if pair is None:
        return (
            "No verdict on one method: none has runs to this loss both without delay and at "
            f"{_delays(verdict)}."
        )
    method = pair.asynchronous.method
    if pair.is_open:
        return (
            f"No verdict: no asynchronous method reached the loss, the fastest of them {method}; "
            f"ask for a higher --loss."
        )
    schedule = _schedule(pair.synchronous.cut)
    ratio = _times_as_fast(pair)
    if pair.is_tie:
        return (
            f"A tie, within noise: with {method} on both sides, asynchronous training is {ratio} "
            f"as {schedule}."
        )
    if pair.advantage > 1.0:
        return (
            f"Asynchronous wins: with {method} on both sides, it is {ratio} as synchronous "
            f"{schedule}."
        )
    return (
        f"Synchronous wins: with {method} on both sides, {schedule} is {ratio} as asynchronous "
        f"training."
    )


def _best_of_each_lines(verdict: Verdict) -> list[str]:
    """The fastest option of each side, if its method is not the one in the headline."""
    best = verdict.best_of_each
    if best is None or _missing(verdict) is not None:
        return []
    if best == verdict.same_method:
        return [f"No other method is faster on either side ({_measured_counts(verdict)})."]
    asynchronous = f"asynchronous {best.asynchronous.method}"
    synchronous = f"{_schedule(best.synchronous.cut)} with {best.synchronous.method}"
    ratio = _times_as_fast(best)
    if best.is_open:
        text = f"{asynchronous} had not reached the loss when {synchronous} had"
    elif best.is_tie:
        text = f"a tie, within noise: {asynchronous} is {ratio} as {synchronous}"
    elif best.advantage > 1.0:
        text = f"{asynchronous} is {ratio} as {synchronous}"
    else:
        text = f"{synchronous} is {ratio} as {asynchronous}"
    lines = [f"Best of each side: {text}."]
    if best.synchronous.method in verdict.unmeasured:
        lines.append(f"{best.synchronous.method} was not run at such delays.")
    return lines


def _measured_counts(verdict: Verdict) -> str:
    return f"of {len(verdict.asynchronous)} with delay, {len(verdict.synchronous)} without"


def _times_as_fast(pair: Comparison) -> str:
    """For example `1.20 [1.14, 1.26] times as fast`, of the faster side over the slower one; of the
    asynchronous side in a tie."""
    is_asynchronous = pair.is_tie or pair.advantage > 1.0
    ratio = pair.advantage if is_asynchronous else 1 / pair.advantage
    if pair.is_upper_bound:
        return f"more than {ratio:.2f} times as fast"
    seeds = [len(side.iterations.by_seed) for side in (pair.asynchronous, pair.synchronous)]
    if min(seeds) == 1 and not pair.is_tie:
        return f"{ratio:.2f} times as fast (one seed)"
    low = ratio * math.exp(-pair.noise)
    high = ratio * math.exp(pair.noise)
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}] times as fast"


def _reasons(verdict: Verdict) -> list[str]:
    """The slowdown that would make both sides equally fast, and the measured one."""
    if not verdict.asynchronous:
        if verdict.too_large:
            return []
        methods = counted(len(verdict.unmeasured), "method")
        return [f"No slowdown at {_delays(verdict)}: the runs of {methods} have other delays."]
    pair = verdict.same_method
    if pair is None:
        best = verdict.asynchronous[0]
        slowdown = option_slowdown(best)
        return [f"Slowdown of {best.method}: {slowdown}, at {_delays(verdict)}."]
    even = verdict.break_even(pair.asynchronous, pair.synchronous)
    assert even is not None
    needs = "is faster if its slowdown is" if even > 1 else "would need a slowdown"
    slowdown = option_slowdown(pair.asynchronous)
    return [
        f"With {pair.asynchronous.method}, asynchronous training {needs} below {even:.2f}; "
        f"measured: {slowdown}, at {_delays(verdict)}."
    ]


def _too_large_lines(
    verdict: Verdict, measurements: Measurements, run: PlannedRun | None
) -> list[str]:
    """The methods whose asynchronous run does not fit into a device, grouped by what would help."""
    by_remedy: dict[str | None, list[str]] = {}
    experiments = by_method(measurements)
    for method in verdict.too_large:
        remedy = run.remedy(experiments[method][0].settings) if run else None
        by_remedy.setdefault(remedy, []).append(method)
    size = (verdict.question.devices.memory or 0.0) / 1e9
    lines = []
    for remedy, methods in by_remedy.items():
        fits = f" (fits with {remedy})" if remedy else ""
        lines.append(f"Too large for {size:g} GB: {'; '.join(methods)}{fits}.")
    return lines


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


def _missing(verdict: Verdict) -> str | None:
    """Why there is nothing to compare; None if there is."""
    rival = verdict.rival
    nothing_fits = bool(verdict.too_large) and not verdict.asynchronous
    if not verdict.has_cuts and nothing_fits:
        return "no schedule fits into the memory of a device."
    if not verdict.has_cuts:
        return (
            "no synchronous schedule fits into the memory of a device, the asynchronous one does."
        )
    if not verdict.has_runs_without_delay:
        return "none of the runs is without delay; runs with pipeline.stages=1 would measure it."
    if rival is None:
        return "no run without delay reaches this loss; ask for a higher --loss."
    fastest = f"{_schedule(rival.cut)} with {rival.method}"
    if nothing_fits:
        return f"no asynchronous method fits into the memory of a device, {fastest} does."
    if not verdict.asynchronous:
        return (
            f"no run measures a slowdown at {_delays(verdict)}. {fastest} is the fastest without."
        )
    return None


def _delays(verdict: Verdict) -> str:
    return f"delays up to {counted(verdict.question.delay, 'update', '.3g')}"


def _schedule(cut: Cut) -> str:
    split = f" (M = {cut.num_micro_batches})" if cut.num_micro_batches > 1 else ""
    return f"{cut.schedule}{split}"


def long_text(verdict: Verdict, run: PlannedRun | None) -> str:
    """Tables of all options, what is not measured, and what is assumed."""
    tables = [option_table(verdict, kind, run) for kind in COLUMNS]
    shown = [format_table(table, "table") for table in tables if len(table)]
    return "\n".join(["", *shown, *unmeasured_lines(verdict), *assumption_lines(verdict, run)])


# By field of `Verdict`: the headings of its table, with the cells below them. Columns that all
# tables have are not listed.
COLUMNS = {
    "schedules": {"synchronous schedule": "schedule", "M": "M", "idle": "idle"},
    "synchronous": {"synchronous method": "method", "schedule": "schedule", "M": "M"},
    "asynchronous": {
        "asynchronous method": "method",
        "slowdown": "slowdown",
        "break-even": "break-even",
        "at delays": "at delays",
    },
}


def option_table(verdict: Verdict, kind: str, run: PlannedRun | None) -> pd.DataFrame:
    """A row per option of a kind (a key of `COLUMNS`), fastest first. Times and break-evens are
    relative to the fastest synchronous option."""
    options: Sequence[Option] = getattr(verdict, kind)
    return pd.DataFrame([_row(verdict, kind, option, run) for option in options[:MOST_METHODS]])


def _row(verdict: Verdict, kind: str, option: Option, run: PlannedRun | None) -> dict[str, str]:
    cut = option.cut
    bound = "> " if option.iterations.is_lower_bound else ""
    cells = _cells(verdict, option)
    row = {heading: cells[name] for heading, name in COLUMNS[kind].items()}
    row["iterations"] = f"{bound}{option.num_iterations:.0f}"
    seconds = None if run is None else run.seconds(cut)
    if seconds is not None:
        row["s / update"] = f"{seconds:.4g}"
    if cut.memory is not None:
        row["GB"] = f"{cut.memory / 1e9:.2f}"
    unit = verdict.rival.time if verdict.rival else 1.0
    row["time"] = f"{bound}{option.time / unit:.3g}"
    return row


def _cells(verdict: Verdict, option: Option) -> dict[str, str]:
    even = verdict.break_even(option)
    return {
        "method": option.method,
        "schedule": option.cut.schedule,
        "M": str(option.cut.num_micro_batches),
        "idle": f"{option.cut.idle:.1%}",
        "slowdown": option_slowdown(option),
        "break-even": "--" if even is None else f"{even:.2f}",
        "at delays": " to ".join(f"{delay:g}" for delay in option.iterations.delays),
    }


def unmeasured_lines(verdict: Verdict) -> list[str]:
    """Methods without a slowdown at this delay, and the runs that would measure it."""
    if not verdict.unmeasured:
        return []
    by_delays: dict[str, list[str]] = {}
    for method, delays in verdict.unmeasured.items():
        listed = " and ".join(f"{delay:g}" for delay in delays)
        by_delays.setdefault(listed, []).append(method)
    delay = verdict.question.delay
    around = sorted({max(1, math.floor(1 + delay)), math.ceil(1 + delay)})
    stages = " and ".join(f"pipeline.stages={count}" for count in around)
    return [
        f"No run measures these at {_delays(verdict)}; runs of them with {stages} would:",
        *(
            f"  measured only at {delays}: {'; '.join(methods)}"
            for delays, methods in by_delays.items()
        ),
    ]


def assumption_lines(verdict: Verdict, run: PlannedRun | None) -> list[str]:
    """Lines about the assumptions behind the numbers."""
    devices = verdict.question.devices
    asynchronous = verdict.asynchronous[:MOST_METHODS]
    lines = [units_line(run)]
    if run is not None:
        lines += run.cut_lines
    if isinstance(devices, EqualStages):
        lines.append(
            f"The synchronous side may split an update's {counted(devices.examples, 'example')}, "
            f"as many as in these runs, or take M = {verdict.question.num_micro_batches}, too."
        )
    lines.append(_cost_line(verdict, run))
    few = sorted({option.method for option in asynchronous if option.iterations.num_rates == 1})
    if few:
        lines.append(
            f"At some of these delays only one learning rate was tried: {', '.join(few)}: upper "
            f"estimates."
        )
    lines.append("(one seed): the noise between the seeds of the other experiments is assumed.")
    return lines


def _cost_line(verdict: Verdict, run: PlannedRun | None) -> str:
    given = verdict.question.costs
    options = [*verdict.synchronous[:MOST_METHODS], *verdict.asynchronous[:MOST_METHODS]]
    shown: dict[str, str] = {}
    for option in options:
        if option.cost is not None:
            remark = " (given)" if option.method in given else ""
            shown[option.method] = f"{option.method} {option.cost:.0%}{remark}"
    rest = "its FLOPs" if run else "the pace of these runs"
    costs = ", ".join([*shown.values(), f"what is not given by {rest}"])
    return f"What an update costs beyond AdamW's, as a share of the passes: {costs}."


def units_line(run: PlannedRun | None) -> str:
    """The unit of time, and what it leaves out."""
    stages = "equal stages, a device each" if run is None else "stages and updates by their FLOPs"
    has_links = run is not None and run.bandwidth is not None
    transfers = (
        "transfers that overlap with computation" if has_links else "transfers that take no time"
    )
    return (
        "Times to the loss are relative to the fastest synchronous option. Assumed: "
        f"equal examples per update, {stages}, synchronous updates not overlapped with passes, "
        f"{transfers}."
    )
