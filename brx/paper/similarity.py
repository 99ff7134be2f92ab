"""The study of similarity (docs/protocol.md, section 7): which dimensionless numbers decide what
delay costs.

One factor of the laptop preset is changed at a time; each setting has a target of its own.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from brx.config.loading import preset_with
from brx.errors import UserError
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import LADDER_METHODS
from brx.plot.style import look_of, new_figure, save
from brx.runs.comparison import common_target, concat, reductions, slowdowns
from brx.runs.experiments import at_best_rates
from brx.runs.frames import DEPTH, RATE, SEED, load
from brx.runs.slowdown import Reached, iteration_ratio
from brx.runs.tables import slowdown_text
from brx.sweep.spec import value_at

RUNS = Path("results/similarity")
COMMON_RATE = 1e-3
WARMUP, BATCH, WIDTH = "training.warmup_fraction", "training.batch_size", "model.width"
# 31 and 97 tau, as shares of 8,000 iterations.
SHORT_WARMUP, LONG_WARMUP = (
    {WARMUP: 0.120125},
    {WARMUP: 0.375875},
)

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
"""By name, how a setting differs from the preset `laptop`."""
CHOSEN_RATES = "each side's best rate"
CAPTION = (
    "Which numbers decide what delay costs: the laptop preset with one factor changed at a time, "
    "slowdown under"
    " the delays of 32 stages to each setting's own target (bars: 95 % where there are two seeds, "
    "arrows: lower"
    " bounds), and iterations that basis rotation saves; dashed: the paper's numbers. Repeat:"
    " brx sweep configs/sweeps/similarity/*.yaml, brx plot similarity."
)


def study(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per setting and method with runs at both ends: the columns of `slowdowns`, and the
    share of iterations saved.

    Further columns: `setting`, `seeds` (the least on a side), `val_loss` and `reference_val_loss`
    (means over seeds), `saved` by basis rotation over the better baseline under delay, with
    `saved_low` and `saved_high`; `is_changed` where the setting, seed by seed, surely has another
    slowdown than the preset."""
    preset = preset_with("laptop", {}).model_dump(mode="json")
    unchanged = {key: value_at(preset, key) for changed in SETTINGS.values() for key in changed}
    frames = []
    for setting, changed in SETTINGS.items():
        alike = runs
        for key, value in {**unchanged, **changed}.items():
            alike = alike[alike[key] == value]
        if setting != CHOSEN_RATES:
            alike = alike[alike[RATE] == COMMON_RATE]
        elif not (alike[RATE] != COMMON_RATE).any():
            continue
        chosen = at_best_rates(alike) if len(alike) else alike
        of_method = chosen.groupby("method")[DEPTH]
        chosen = chosen[(of_method.transform("nunique") == 2) & (of_method.transform("min") == 1)]
        if len(chosen):
            frames.append(_compared(chosen).assign(setting=setting))
    if not frames:
        raise UserError(
            "no method has runs at P = 1 and at another P, at the settings of the study"
        )
    rows = concat(frames)
    usual = {row["method"]: row for row in rows.to_dict("records") if row["setting"] == PRESET}
    return rows.assign(
        is_changed=[_is_changed(row, usual.get(row["method"])) for row in rows.to_dict("records")]
    )


def _is_changed(row: Mapping[str, Any], usual: Mapping[str, Any] | None) -> bool:
    """Whether the slowdowns of a setting and of the usual one differ by more than their 95 %
    interval over seeds."""
    if usual is None or row["is_censored"] or usual["is_censored"]:
        return False
    by_seed = [
        {seed: Reached(own / reference, True) for seed, own, reference in zip(*counts, strict=True)}
        for counts in (
            (of["shared_seeds"], of["iterations"], of["reference_iterations"])
            for of in (row, usual)
        )
        if counts[0]
    ]
    ratio = iteration_ratio(*by_seed) if len(by_seed) == 2 else None
    return (
        ratio is not None
        and ratio.low is not None
        and ratio.high is not None
        and not ratio.low <= 1 <= ratio.high
    )


def _compared(chosen: pd.DataFrame) -> pd.DataFrame:
    """The columns of `study` but the setting, which is left out of the variants' names."""
    deepest, chosen = chosen[DEPTH].max(), chosen.assign(variant=chosen["method"])
    rows, saved = (
        slowdowns(chosen, common_target(chosen)),
        reductions(chosen[chosen[DEPTH] == deepest]),
    )
    by_depth = chosen.groupby(["method", DEPTH])
    losses = by_depth["val_loss"].mean().unstack().loc[rows["method"]]
    seeds = by_depth[SEED].nunique().unstack().min(axis="columns").loc[rows["method"]]
    share, low, high = saved[["share", "low", "high"]].iloc[0] if len(saved) else [math.nan] * 3
    return rows.assign(
        seeds=seeds.to_numpy(),
        val_loss=losses[deepest].to_numpy(),
        reference_val_loss=losses[1].to_numpy(),
        saved=share,
        saved_low=low,
        saved_high=high,
    )


def load_study(folder: Path) -> pd.DataFrame:
    """`study` of the runs in a folder; UserError where there are none."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder, for the study's runs: brx sweep "
            f"configs/sweeps/similarity/*.yaml"
        )
    return study(load([folder]))


def study_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per setting: slowdown and final validation losses (P = 1, under delay) of each method,
    iterations saved.

    A star stands where the setting is known to change the slowdown.
    """
    table = []
    for setting, of_setting in rows.groupby("setting", sort=False):
        cells = {"setting": str(setting), "seeds": str(of_setting["seeds"].min())}
        for row in of_setting.sort_values("method", ascending=False).to_dict("records"):
            cells[f"slowdown: {row['method']}"] = slowdown_text(row) + (
                " *" if row["is_changed"] else ""
            )
            cells[f"loss: {row['method']}"] = (
                f"{row['reference_val_loss']:.3f}, {row['val_loss']:.3f}"
            )
        saved = of_setting["saved"].iloc[0]
        table.append({**cells, "saved": "-" if pd.isna(saved) else f"{saved:.0%}"})
    return pd.DataFrame(table).fillna("-")


def least_slowed_down(rows: pd.DataFrame) -> str:
    """A title: which method delay slows down least, and in how many of the settings."""
    known = rows.dropna(subset="ratio")
    if known.empty:
        return ""
    least = known.loc[known.groupby("setting")["ratio"].idxmin(), "method"].value_counts()
    label = look_of(str(least.index[0])).label
    num_settings = known["setting"].nunique()
    return f"{label}: least slowed down in {least.iloc[0]} of {num_settings} settings"


def draw_study(folder: Path, path: Path) -> list[Path]:
    """A line per setting: the slowdowns of the three methods, and the iterations saved; dashed: the
    paper's numbers."""
    rows = load_study(folder)
    settings = rows["setting"].unique()
    places = [-place for place in range(len(settings))]
    rows["place"] = rows["setting"].map(dict(zip(settings, places, strict=True))).astype(float)
    with new_figure(width=7.0, height=0.9 + 0.27 * len(settings)) as figure:
        left, right = figure.subplots(1, 2)
        for index, method in enumerate(reversed(LADDER_METHODS)):
            points, color = rows[rows["method"] == method], look_of(method).color
            y, bounds = points["place"] + 0.2 * (1 - index), points["is_censored"]
            left.plot(
                points["ratio"], y, "o", color=color, label=look_of(method).label, markersize=4
            )
            left.hlines(
                y,
                points["low"].clip(lower=0.5),
                points["high"].clip(upper=100),
                color=color,
                linewidth=1,
            )
            left.plot(points["ratio"][bounds] * 1.12, y[bounds], ">", color=color, markersize=3)
            left.axvline(SLOWDOWNS[method], color=color, linestyle="--", linewidth=0.8)
        left.set(xscale="log", xlim=(0.8, 40), xlabel="slowdown", xticks=[1, 2, 5, 10, 20])
        left.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.xaxis.set_minor_locator(NullLocator())
        left.set_yticks(places, settings)
        left.set_ylim(-len(settings) + 0.5, 0.5)
        left.set_title(least_slowed_down(rows))
        left.plot([], [], color="black", linestyle="--", linewidth=0.8, label="the paper")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        # The loop ends with basis rotation, so `color` is its colour.
        saved = rows.drop_duplicates("setting")
        right.plot(saved["saved"], saved["place"], "o", color=color, markersize=4)
        right.hlines(
            saved["place"],
            saved["saved_low"].clip(lower=0),
            saved["saved_high"],
            color=color,
            linewidth=1,
        )
        right.axvline(SAVED["main"], color=color, linestyle="--", linewidth=0.8)
        right.set(xlim=(0, 1), ylim=left.get_ylim(), xlabel="iterations saved")
        right.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        right.set_yticks(places, [])
        if saved["saved"].notna().any():
            low, high = saved["saved"].min(), saved["saved"].max()
            right.set_title(f"Basis rotation saves {low:.0%} to {high:.0%}")
        return save(figure, path, CAPTION)
