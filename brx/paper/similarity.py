"""The study of similarity (docs/protocol.md, section 7): which dimensionless numbers decide the
cost of delay.

Each setting changes one or two factors of the preset `laptop`, and has a target loss of its own.
"""

import math
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from brx.config.loading import preset_with
from brx.errors import UserError, counted
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import LADDER_METHODS, OURS
from brx.paper.study_runs import load_study_runs
from brx.plot.style import look_of, new_figure, save
from brx.runs.comparison import common_target, concat, reductions, slowdowns
from brx.runs.experiments import at_best_rates
from brx.runs.frames import DEPTH
from brx.runs.slowdown import Reached, iteration_ratio
from brx.runs.tables import slowdown_text
from brx.runs.trajectory import RATE, SEED
from brx.sweep.conditions import value_at

RUNS = Path("results/similarity")
SWEEPS = "configs/sweeps/similarity/*.yaml"
COMMON_RATE = 1e-3
WARMUP = "training.warmup_fraction"
BATCH = "training.batch_size"
WIDTH = "model.width"
# Warm-ups of 31 tau and 97 tau, as shares of 8,000 iterations.
SHORT_WARMUP = {WARMUP: 0.120125}
LONG_WARMUP = {WARMUP: 0.375875}

PRESET = "laptop preset"
SETTINGS: dict[str, Mapping[str, Any]] = {
    PRESET: {},
    "each side's best rate": {},
    "warm-up 31 tau": SHORT_WARMUP,
    "warm-up 97 tau": LONG_WARMUP,
    "beta2 0.99": {"optimizer.beta2": 0.99},
    "512 tokens per iteration": {BATCH: 16},
    "weight decay 0.3125": {"optimizer.weight_decay": 0.3125},
    "width 64, 32,000 iterations": {WIDTH: 64, "training.iterations": 32_000},
    "width 128, 128,000 iterations": {WIDTH: 128, "training.iterations": 128_000},
    "31 tau, 512 tokens": {**SHORT_WARMUP, BATCH: 16},
    "97 tau, 512 tokens": {**LONG_WARMUP, BATCH: 16},
    "31 tau, 2,048 tokens": {**SHORT_WARMUP, BATCH: 64},
    "97 tau, 2,048 tokens": {**LONG_WARMUP, BATCH: 64},
}
"""The values of each setting that differ from the preset `laptop`."""
CHOSEN_RATES = "each side's best rate"
CAPTION = (
    "Which numbers decide what delay costs: the laptop preset with one factor changed at a time, "
    "slowdown under the delays of 32 stages to each setting's own target (bars: 95 % where there "
    "are two seeds, arrows: lower bounds), and iterations that basis rotation saves; dashed: the "
    f"paper's numbers. Repeat: brx sweep {SWEEPS}, brx plot similarity."
)


def study(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per setting and method that has runs at P = 1 and at one other P.

    It has the columns of `slowdowns`, and these:

    - `setting`: its name;
    - `seeds`: the number of seeds on the side with fewer;
    - `val_loss`, `reference_val_loss`: final losses with delay and without, means over seeds;
    - `saved`, `saved_low`, `saved_high`: the share of the better baseline's iterations that basis
      rotation saves under delay, and its interval;
    - `is_changed`: whether the slowdown surely differs from the preset's, seed by seed.

    Args:
        runs: rows of `brx.runs.load`.

    Raises:
        UserError: no setting has such runs.
    """
    frames = []
    for setting in SETTINGS:
        chosen = _with_both_ends(_runs_of_setting(runs, setting))
        if len(chosen):
            frames.append(_compared(chosen).assign(setting=setting))
    if not frames:
        raise UserError(
            "no method has runs at P = 1 and at another P, at the settings of the study"
        )
    table = concat(frames)
    rows = table.to_dict("records")
    usual = {row["method"]: row for row in rows if row["setting"] == PRESET}
    return table.assign(is_changed=[_is_changed(row, usual.get(row["method"])) for row in rows])


def _runs_of_setting(runs: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The runs of a setting, which may be none: those at the common learning rate, or for
    `CHOSEN_RATES` those at all rates, if any other rate was tried."""
    alike = runs
    for key, value in {**_preset_values(), **SETTINGS[setting]}.items():
        alike = alike[alike[key] == value]
    if setting != CHOSEN_RATES:
        return alike[alike[RATE] == COMMON_RATE]
    has_other_rates = (alike[RATE] != COMMON_RATE).any()
    return alike if has_other_rates else alike.iloc[:0]


@cache
def _preset_values() -> dict[str, Any]:
    """The preset's values of the keys that any setting changes."""
    preset = preset_with("laptop", {}).model_dump(mode="json")
    keys = dict.fromkeys(chain.from_iterable(SETTINGS.values()))
    return {key: value_at(preset, key) for key in keys}


def _with_both_ends(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs, at their best learning rates, of the methods that have runs at P = 1 and at exactly
    one other P."""
    if runs.empty:
        return runs
    chosen = at_best_rates(runs)
    depths = chosen.groupby("method")[DEPTH]
    has_both = (depths.transform("nunique") == 2) & (depths.transform("min") == 1)
    return chosen[has_both]


def _is_changed(row: Mapping[str, Any], usual: Mapping[str, Any] | None) -> bool:
    """Whether the slowdowns of a setting and of the preset differ by more than chance: the 95 %
    interval of their ratio over seeds does not contain 1. False unless both slowdowns are known."""
    if usual is None:
        return False
    for slowdown in (row, usual):
        # The ratio is NaN on a plateau, and if a run without delay never reached the target.
        is_known = not slowdown["is_censored"] and not pd.isna(slowdown["ratio"])
        if not is_known or not slowdown["shared_seeds"]:
            return False
    ratio = iteration_ratio(_ratios_by_seed(row), _ratios_by_seed(usual))
    if ratio is None or ratio.low is None or ratio.high is None:
        return False
    return not ratio.low <= 1 <= ratio.high


def _ratios_by_seed(row: Mapping[str, Any]) -> dict[int, Reached]:
    """The slowdown of each seed, in the form that `iteration_ratio` takes."""
    ratios = np.divide(row["iterations"], row["reference_iterations"])
    return {
        seed: Reached(float(ratio), True)
        for seed, ratio in zip(row["shared_seeds"], ratios, strict=True)
    }


def _compared(chosen: pd.DataFrame) -> pd.DataFrame:
    """The rows of `study` for one setting, without the columns `setting` and `is_changed`."""
    deepest = chosen[DEPTH].max()
    # All runs have the same setting, so the method alone names a variant.
    chosen = chosen.assign(variant=chosen["method"])
    rows = slowdowns(chosen, common_target(chosen))
    saved = reductions(chosen[chosen[DEPTH] == deepest])
    by_depth = chosen.groupby(["method", DEPTH])
    losses = by_depth["val_loss"].mean().unstack().loc[rows["method"]]
    seeds = by_depth[SEED].nunique().unstack().min(axis="columns").loc[rows["method"]]
    share = low = high = math.nan
    if len(saved):
        share, low, high = saved[["share", "low", "high"]].iloc[0]
    return rows.assign(
        seeds=seeds.to_numpy(),
        val_loss=losses[deepest].to_numpy(),
        reference_val_loss=losses[1].to_numpy(),
        saved=share,
        saved_low=low,
        saved_high=high,
    )


def load_study(folder: Path) -> pd.DataFrame:
    """Read the runs in a folder and return their `study`; UserError if the folder has no runs of
    the study."""
    return study(load_study_runs(folder, SWEEPS))


def study_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per setting: each method's slowdown and final validation losses (at P = 1, with delay),
    and the iterations saved. All cells are texts.

    A star marks slowdowns that the setting surely changes.
    """
    table = []
    for setting, its_rows in rows.groupby("setting", sort=False):
        cells = {"setting": str(setting), "seeds": str(its_rows["seeds"].min())}
        for row in its_rows.sort_values("method", ascending=False).to_dict("records"):
            method = row["method"]
            star = " *" if row["is_changed"] else ""
            losses = f"{row['reference_val_loss']:.3f}, {row['val_loss']:.3f}"
            cells[f"slowdown: {method}"] = slowdown_text(row) + star
            cells[f"loss: {method}"] = losses
        saved = its_rows["saved"].iloc[0]
        cells["saved"] = "-" if pd.isna(saved) else f"{saved:.0%}"
        table.append(cells)
    return pd.DataFrame(table).fillna("-")


def least_slowed_down(rows: pd.DataFrame) -> str:
    """A title: the method that delay slows down least, and in how many of the settings; empty if no
    setting tells."""
    known = rows.dropna(subset="ratio")
    least = known.loc[known.groupby("setting")["ratio"].idxmin()]  # a row per setting
    # If the lowest number is only a lower bound, another method may be slowed down less.
    wins = least.loc[~least["is_censored"], "method"].value_counts()
    if wins.empty:
        return ""
    label = look_of(str(wins.index[0])).label
    settings = counted(len(least), "setting")
    return f"{label}: least slowed down in {wins.iloc[0]} of {settings}"


def draw_similarity(folder: Path, path: Path) -> list[Path]:
    """Draw a row per setting and save the figure; returns the files written.

    Left: the slowdowns of three methods. Right: the iterations saved. Dashed lines are the paper's
    numbers.

    Args:
        folder: the folder of the study's runs.
        path: the figure's path without suffix.

    Raises:
        UserError: there are no runs of the study in the folder.
    """
    rows = load_study(folder)
    settings = rows["setting"].unique()
    places = [-place for place in range(len(settings))]
    rows["place"] = rows["setting"].map(dict(zip(settings, places, strict=True))).astype(float)
    with new_figure(width=7.0, height=0.9 + 0.27 * len(settings)) as figure:
        left, right = figure.subplots(1, 2)
        for index, method in enumerate(reversed(LADDER_METHODS)):
            _draw_slowdowns(left, rows[rows["method"] == method], method, 0.2 * (1 - index))
        left.set(xscale="log", xlim=(0.8, 40), xlabel="slowdown", xticks=[1, 2, 5, 10, 20])
        left.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.xaxis.set_minor_locator(NullLocator())
        left.set_yticks(places, settings)
        left.set_ylim(-len(settings) + 0.5, 0.5)
        left.set_title(least_slowed_down(rows))
        left.plot([], [], color="black", linestyle="--", linewidth=0.8, label="the paper")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        saved = rows.drop_duplicates("setting")
        _draw_saved(right, saved)
        right.set(xlim=(0, 1), ylim=left.get_ylim(), xlabel="iterations saved")
        right.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.set_yticks(places, [])
        shares = saved["saved"].dropna()
        if len(shares):
            right.set_title(f"Basis rotation saves {shares.min():.0%} to {shares.max():.0%}")
        return save(figure, path, CAPTION)


def _draw_slowdowns(axes: Axes, points: pd.DataFrame, method: str, shift: float) -> None:
    """Draw a method's slowdowns, raised by `shift` so that methods do not cover each other; arrows
    are lower bounds."""
    look = look_of(method)
    y = points["place"] + shift
    axes.plot(points["ratio"], y, "o", color=look.color, label=look.label, markersize=4)
    low = points["low"].clip(lower=0.5)
    high = points["high"].clip(upper=100)
    axes.hlines(y, low, high, color=look.color, linewidth=1)
    is_bound = points["is_censored"]
    axes.plot(points["ratio"][is_bound] * 1.12, y[is_bound], ">", color=look.color, markersize=3)
    if method in SLOWDOWNS:
        axes.axvline(SLOWDOWNS[method], color=look.color, linestyle="--", linewidth=0.8)


def _draw_saved(axes: Axes, points: pd.DataFrame) -> None:
    """The iterations that basis rotation saves, a point per setting."""
    color = look_of(OURS).color
    axes.plot(points["saved"], points["place"], "o", color=color, markersize=4)
    low = points["saved_low"].clip(lower=0)
    axes.hlines(points["place"], low, points["saved_high"], color=color, linewidth=1)
    axes.axvline(SAVED["main"], color=color, linestyle="--", linewidth=0.8)
