"""What `brx verdict` says: tables, the verdict in a sentence, what is not measured, what is assumed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import pandas as pd

from brx.planning.verdict import ASYNCHRONOUS, Option, Verdict
from brx.runs.formats import format_table
from brx.runs.time_to_loss import Measurements

MOST_METHODS = 8
"""Rows of the asynchronous table."""

GB = 1e9


def verdict_text(verdict: Verdict, measurements: Measurements, memory: Mapping[str, float]) -> str:
    """All of it.

    Args:
        verdict: the answer.
        measurements: what it is from.
        memory: bytes of the busiest device by schedule, if a model was given.
    """
    parts = [headline(verdict, measurements)]
    if verdict.synchronous:
        parts.append(format_table(synchronous_table(verdict, memory), "table"))
    if verdict.asynchronous:
        parts.append(format_table(asynchronous_table(verdict, memory), "table"))
    if verdict.question.excluded:
        parts.append(f"Left out, for want of memory: {', '.join(verdict.question.excluded)}.")
    return "\n".join([*parts, sentence(verdict), *unmeasured_lines(verdict), *assumption_lines(verdict)])


def headline(verdict: Verdict, measurements: Measurements) -> str:
    """What is asked, and of which runs."""
    question = verdict.question
    return (
        f"Time to a training loss of {question.loss:g} nats on P = {question.num_stages} devices,"
        f" M = {question.num_micro_batches} micro-batches per update: delays up to {question.delay:.3g} updates."
        f" Measured on: {measurements.source} ({measurements.model})."
    )


def synchronous_table(verdict: Verdict, memory: Mapping[str, float]) -> pd.DataFrame:
    """A row per schedule, each with the method that is fastest without delay."""
    columns = ["synchronous schedule", "idle", "break-even", "best method", "iterations", "time"]
    best: dict[str, Option] = {}
    for option in verdict.synchronous:
        best.setdefault(option.schedule, option)
    rows = [
        [
            schedule,
            f"{option.idle_share:.1%}",
            f"{verdict.schedule_break_even(option):.2f}",
            option.method,
            _count(option),
            f"{option.time:.0f}",
        ]
        for schedule, option in best.items()
    ]
    return _with_memory(columns, rows, [memory.get(schedule) for schedule in best])


def asynchronous_table(verdict: Verdict, memory: Mapping[str, float]) -> pd.DataFrame:
    """A row per method under this delay, fastest first; slowdown and break-even against the best synchronous option."""
    columns = ["asynchronous method", "slowdown", "its break-even", "iterations", "time", "measured at delays"]
    options = verdict.asynchronous[:MOST_METHODS]
    rows = []
    for option in options:
        has_reference = bool(verdict.synchronous)
        bound = "> " if option.iterations.is_lower_bound else ""
        rows.append(
            [
                option.method,
                f"{bound}{verdict.slowdown(option):.2f}" if has_reference else "no reference",
                f"{verdict.break_even(option):.2f}" if has_reference else "no reference",
                _count(option),
                f"{bound}{option.time:.0f}",
                _evidence(option),
            ]
        )
    return _with_memory(columns, rows, [memory.get(ASYNCHRONOUS)] * len(rows))


def sentence(verdict: Verdict) -> str:
    """Who wins, and by how much."""
    missing = _missing(verdict)
    if missing is not None:
        return f"No verdict: {missing}"
    best, advantage = verdict.asynchronous[0], verdict.advantage
    assert advantage is not None
    numbers = f"slowdown {verdict.slowdown(best):.2f}, break-even {verdict.break_even(best):.2f}"
    if best.iterations.is_lower_bound:
        if advantage <= 1.0:
            return f"Synchronous wins: no asynchronous method reached the loss, and already {numbers}."
        return f"No verdict: no asynchronous method reached the loss; so far {numbers}. Ask for a higher --loss."
    if advantage > 1.0:
        return f"Asynchronous wins: {best.method} is {advantage:.2f} times as fast as {_best(verdict)} ({numbers})."
    return f"Synchronous wins: {_best(verdict)} is {1.0 / advantage:.2f} times as fast as {best.method} ({numbers})."


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


def assumption_lines(verdict: Verdict) -> list[str]:
    """What the answer rests on."""
    few = sorted({option.method for option in verdict.asynchronous[:MOST_METHODS] if option.iterations.num_rates == 1})
    lines = [units_line([verdict.question.transfer_time])]
    if verdict.synchronous or verdict.asynchronous:
        lines.append(_costs_line(verdict))
    if few:
        lines.append(f"At some of these delays only one learning rate was tried: {', '.join(few)}: upper estimates.")
    return lines


def _missing(verdict: Verdict) -> str | None:
    """What keeps the two sides from being compared, if anything does."""
    question = verdict.question
    if not question.synchronous_schedules:
        if ASYNCHRONOUS in question.excluded:
            return "no schedule fits into the memory of a device."
        return "no synchronous schedule fits into the memory of a device, the asynchronous one does."
    if not verdict.has_runs_without_delay:
        return "none of the runs is without delay; runs with pipeline.stages=1 would measure it."
    if not verdict.synchronous:
        return "no run without delay reaches this loss; ask for a higher --loss."
    if ASYNCHRONOUS in question.excluded:
        return f"the asynchronous schedule does not fit into the memory of a device, {_best(verdict)} does."
    if not verdict.asynchronous:
        break_even = verdict.schedule_break_even(verdict.synchronous[0])
        return (
            f"no run measures a slowdown at delays up to {question.delay:.3g} updates."
            f" {_best(verdict)} wins unless a slowdown is below {break_even:.2f}."
        )
    return None


def units_line(transfer_times: Collection[float]) -> str:
    """What time is measured in, and what is assumed.

    Args:
        transfer_times: of the questions, in units of a micro-batch's forward pass.
    """
    shortest, longest = f"{min(transfer_times):.2g}", f"{max(transfer_times):.2g}"
    times = shortest if shortest == longest else f"{shortest} to {longest}"
    transfers = "take no time" if longest == "0" else f"of {times} forward passes, beside the computation"
    return (
        "Time is in units of the forward and backward passes of an update. Assumed: equal examples per update, equal"
        f" stages, one per device, updates not overlapped with passes; transfers {transfers}."
    )


def _costs_line(verdict: Verdict) -> str:
    """The costs of the methods that are shown, and where each is from."""
    shown = [*verdict.synchronous[:1], *verdict.asynchronous[:MOST_METHODS]]
    costs = {option.method: f"{option.method} {option.cost:.0%}" for option in shown}
    told = [text for method, text in costs.items() if method in verdict.question.costs]
    paced = [text for method, text in costs.items() if method not in verdict.question.costs]
    silent = ": --cost and --cost-from do not name them" if verdict.question.costs else ""
    parts = [f"{', '.join(told)} (by --cost or --cost-from)"] if told else []
    parts += [f"{', '.join(paced)} (from the pace of these runs{silent})"] if paced else []
    return f"A method's update costs beyond AdamW's, as a share of an iteration: {'; '.join(parts)}."


def _best(verdict: Verdict) -> str:
    best = verdict.synchronous[0]
    return f"{best.schedule} with {best.method}"


def _count(option: Option) -> str:
    return f"{'> ' if option.iterations.is_lower_bound else ''}{option.iterations.count:.0f}"


def _evidence(option: Option) -> str:
    return " to ".join(f"{delay:g}" for delay in option.iterations.delays)


def _with_memory(columns: list[str], rows: list[list[str]], memory: list[float | None]) -> pd.DataFrame:
    """A column more where the memory is known."""
    table = pd.DataFrame(rows, columns=columns)
    if any(memory):
        table["GB of the busiest device"] = ["" if size is None else f"{size / GB:.2f}" for size in memory]
    return table
