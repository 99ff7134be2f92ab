"""The dimensionless numbers of a training: a small run speaks for a large one where they agree."""

import math

import pandas as pd

from brx.config.schema import RunConfig
from brx.methods.updater import num_warmup_iterations
from brx.model.sizes import count_parameters
from brx.pipeline.delay import depth, stage_delays

APART = 3.0  # by what factor two numbers may differ and still count as alike
CRITICAL_BATCH_EXPONENT = (
    0.47  # it grows about as (tokens seen)^0.47, whatever the model's size (arXiv:2410.21676)
)


def dimensionless(config: RunConfig) -> dict[str, float | None]:
    """The numbers that decide whether two trainings are alike; tau is in updates; None for what a
    run lacks."""
    model, training, optimizer = config.model, config.training, config.optimizer
    iterations, lr = training.iterations, optimizer.lr
    per_iteration = training.batch_size * model.sequence_length * config.pipeline.accumulation
    tokens = per_iteration * iterations
    num_parameters, in_blocks = count_parameters(model, config.data.vocabulary_size)
    # Scion has no second moment; an optimizer of the user's own does not say what it has.
    memory = 1 / (1 - getattr(optimizer, "beta2", math.nan))
    decay = getattr(optimizer, "weight_decay", math.nan)
    tau = (
        max(delay.tau_updates for delay in stage_delays(config.pipeline, training.seed)) or math.nan
    )
    numbers = {
        "P, stages of the pipeline with these delays": depth(config.pipeline),
        "P / blocks": depth(config.pipeline) / model.blocks,
        "tokens / parameter of the blocks": tokens / in_blocks,
        "tokens / parameter": tokens / num_parameters,
        "tokens per iteration": per_iteration,
        f"batch / critical batch, as tokens^{CRITICAL_BATCH_EXPONENT}": per_iteration
        / tokens**CRITICAL_BATCH_EXPONENT,
        "lr x width": lr * model.width,
        "lr x weight decay x T": lr * decay * iterations,
        "second moment's memory, 1 / (1 - beta2), / T": memory / iterations,
        "second moment's memory / tau": memory / tau,
        "warm-up / T": num_warmup_iterations(training) / iterations,
        "warm-up / tau": num_warmup_iterations(training) / tau,
        "tau / T": tau / iterations,
    }
    annealing = getattr(optimizer, "annealing_fraction", None)  # T_c of pipedream-lr
    if annealing is not None:
        numbers["T_c / tau"] = annealing * iterations / tau
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


def similarity_table(config: RunConfig, like: RunConfig, names: tuple[str, str]) -> pd.DataFrame:
    """A row per number: its value in both configurations, the ratio, and a mark where that is
    beyond `APART`."""
    ours, theirs = dimensionless(config), dimensionless(like)
    rows = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        ratio = a / b if a and b else None
        is_apart = not 1 / APART <= ratio <= APART if ratio else None not in (a, b) and a != b
        rows.append(
            [
                name,
                _text(a),
                _text(b),
                "-" if ratio is None else f"{ratio:.3g}",
                "<-" if is_apart else "",
            ]
        )
    return pd.DataFrame(rows, columns=["", *names, "ratio", f"> {APART:g} x"])


def _text(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
