"""The dimensionless numbers of a training. A small run tells something about a large one if these
numbers agree."""

import math

import pandas as pd

from brx.config.schema import RunConfig
from brx.methods.updater import num_warmup_iterations
from brx.model.sizes import count_parameters
from brx.pipeline.delay import depth, stage_delays

APART = 3.0
"""Two numbers count as alike if they differ by at most this factor."""

CRITICAL_BATCH_EXPONENT = 0.47
"""The critical batch grows about as (tokens seen)^0.47, whatever the size of the model
(arXiv:2410.21676)."""


def dimensionless(config: RunConfig) -> dict[str, float | None]:
    """The numbers that decide whether two trainings are alike, by name; None where a run lacks
    one. The delay tau is in updates."""
    model, training, optimizer = config.model, config.training, config.optimizer
    iterations = training.iterations
    batch = config.tokens_per_update
    tokens = batch * iterations
    num_parameters, num_in_blocks = count_parameters(model, config.data.vocabulary_size)
    num_warmup = num_warmup_iterations(training)
    num_stages = depth(config.pipeline)
    # Scion has no second moment; a user's own optimizer does not say what it has.
    memory = 1 / (1 - getattr(optimizer, "beta2", math.nan))
    decay = getattr(optimizer, "weight_decay", math.nan)
    taus = [delay.tau_updates for delay in stage_delays(config.pipeline, training.seed)]
    tau = max(taus) or math.nan
    critical_batch = tokens**CRITICAL_BATCH_EXPONENT  # up to a factor that all trainings share
    numbers = {
        "P, stages of the pipeline with these delays": num_stages,
        "P / blocks": num_stages / model.blocks,
        "tokens / parameter of the blocks": tokens / num_in_blocks,
        "tokens / parameter": tokens / num_parameters,
        "tokens per iteration": batch,
        f"batch / critical batch, as tokens^{CRITICAL_BATCH_EXPONENT}": batch / critical_batch,
        "lr x width": optimizer.lr * model.width,
        "lr x weight decay x T": optimizer.lr * decay * iterations,
        "second moment's memory, 1 / (1 - beta2), / T": memory / iterations,
        "second moment's memory / tau": memory / tau,
        "warm-up / T": num_warmup / iterations,
        "warm-up / tau": num_warmup / tau,
        "tau / T": tau / iterations,
    }
    annealing = getattr(optimizer, "annealing_fraction", None)  # T_c / T of pipedream-lr
    if annealing is not None:
        numbers["T_c / tau"] = annealing * iterations / tau
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


def similarity_table(config: RunConfig, like: RunConfig, names: tuple[str, str]) -> pd.DataFrame:
    """A table with a row per number: its values in both configurations, their ratio, and a mark if
    they differ by more than a factor of `APART`. All cells are texts."""
    ours, theirs = dimensionless(config), dimensionless(like)
    rows = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        ratio = a / b if a and b else None
        shown = "-" if ratio is None else f"{ratio:.3g}"
        mark = "<-" if _is_apart(a, b) else ""
        rows.append([name, _text(a), _text(b), shown, mark])
    return pd.DataFrame(rows, columns=["", *names, "ratio", f"> {APART:g} x"])


def _is_apart(a: float | None, b: float | None) -> bool:
    """Whether two numbers differ by more than a factor of `APART`; False if one is missing."""
    if a is None or b is None:
        return False
    if a == 0 or b == 0:
        return a != b
    return not 1 / APART <= a / b <= APART


def _text(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
