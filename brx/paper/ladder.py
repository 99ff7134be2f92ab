"""The ladder: what delay costs against the relative delay tau / T, from trainings of several
lengths T.

A laptop cannot train as long as the paper, but it can show how the cost falls with the length, and
extrapolate: a power law in the relative delay, fitted to slowdown - 1 and to the share of the best
baseline's iterations that are left. Where the model grows with the training (docs/protocol.md,
section 9), it is fitted to the slowdown, and to each seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray
from scipy.special import stdtrit

from brx.config.loading import Settings
from brx.errors import UserError
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import (
    DEEPEST,
    ENDS,
    LADDER_METHODS,
    PRECONDITIONED,
    SCALES,
    STRATEGY_NAMES,
    Experiments,
)
from brx.plot.style import draw_points, look_of
from brx.runs.comparison import (
    common_target,
    concat,
    reductions,
    shared_seeds,
    slowdowns,
    with_diverged,
)
from brx.runs.experiments import by_experiment
from brx.runs.frames import DEPTH, RATE, SEED
from brx.runs.slowdown import CONFIDENCE
from brx.runs.tables import final_loss_text, rate_text, saved_text, slowdown_text

PAPER_RELATIVE_DELAY = 31 / 244_000
"""The paper's largest delay over its training: 1 B tokens at 4,096 per iteration."""
LEAST_LENGTHS = 3  # for a law
MOST = 100  # ends of intervals above it are not worth their digits
SIDEWAYS = (
    1.03  # factor between neighbouring methods' points: their intervals must not cover each other
)
TICKS = [digit * 10.0**power for power in range(-5, 0) for digit in (1, 3)]  # the relative delay


class Ladder(NamedTuple):
    """Results of the complete lengths, shortest first. A length is complete if every method has its
    runs at P = 1 and 32. Rows of both frames have `iterations_of_training`, `relative_delay` (tau /
    T), the length's least `num_seeds`, and `of_seeds`, a text. Where the model grows, each seed has
    its own."""

    # Rows of `brx.runs.comparison`; `finals` are final training losses at P = 1 and 32, as texts.
    slowdowns: pd.DataFrame
    savings: pd.DataFrame  # rows of `reductions` at P = 32
    slowdown: Quantity  # what the law of the first is about


def read_ladder(experiments: Experiments) -> Ladder:
    """Slowdowns at each length, to the target of the ladder's methods. Other methods are included
    if they were trained as long."""
    scale = experiments.scale
    if not scale.ladder:
        raise UserError(
            "the ladder: only at the scale of a laptop: brx sweep configs/sweeps/laptop/ladder.yaml"
        )
    slowed, saved = [], []
    for T, further in scale.ladder.items():
        runs = _runs_of_length(experiments, {"training.iterations": T, **further})
        if runs is None:
            continue
        target = common_target(runs[runs["variant"].isin(LADDER_METHODS)])
        of_seeds = (
            pd.concat(shared_seeds(*by_experiment(of_seed))) for _, of_seed in runs.groupby(SEED)
        )
        for alike in of_seeds if scale.grows else [runs]:
            finals = {
                end: final_loss_text(seeds) for end, seeds in alike.groupby(["variant", DEPTH])
            }
            of_ladder = alike[alike["variant"].isin(LADDER_METHODS)]
            labels = {
                "iterations_of_training": T,
                "relative_delay": (DEEPEST - 1) / T,
                "num_seeds": int(of_ladder.groupby("experiment")[SEED].nunique().min()),
                "of_seeds": ", ".join(map(str, sorted(alike[SEED].unique()))),
            }
            rows = slowdowns(alike, target).assign(**labels)
            slowed.append(
                rows.assign(finals=[[finals[method, P] for P in ENDS] for method in rows["method"]])
            )
            saved.append(reductions(of_ladder[of_ladder[DEPTH] == DEEPEST]).assign(**labels))
    return Ladder(
        concat(slowed), concat(saved), SLOWDOWN._replace(shift=0) if scale.grows else SLOWDOWN
    )


def _runs_of_length(experiments: Experiments, settings: Settings) -> pd.DataFrame | None:
    """The runs of one length: None where one of the ladder's is not there; of others those that
    are."""
    at_rate = experiments.at_rate(settings[RATE]) if RATE in settings else experiments
    runs = at_rate.find_ends(*LADDER_METHODS, sweep="ladder", settings=settings)
    if runs is None:
        return None
    # Compare seed by seed, with the seeds that all methods have.
    if experiments.scale.grows:
        sides = [
            with_diverged(seeds.assign(variant=seeds["method"])) for seeds in by_experiment(runs)
        ]
        with suppress(UserError):
            return pd.concat(shared_seeds(*sides))
        return None
    quietly = at_rate.fresh()
    others = [
        quietly.find_ends(name, settings=settings)
        for name in (*STRATEGY_NAMES[1:], *PRECONDITIONED)
    ]
    return pd.concat([runs, *(pair for pair in others if pair is not None)])


class PowerLaw(NamedTuple):
    """log y = intercept + slope log x, by least squares."""

    intercept: float
    slope: float
    deviation: float  # of the points from it, with n - 2 degrees of freedom
    log_x: NDArray[np.float64]  # (n,)

    def at(self, x: float) -> tuple[float, float, float]:
        """y at x, and the ends of the 95 % prediction interval of one more point there."""
        n, from_centre = len(self.log_x), math.log(x) - float(self.log_x.mean())
        value = self.intercept + self.slope * math.log(x)
        leverage = 1 + 1 / n + from_centre**2 / float(((self.log_x - self.log_x.mean()) ** 2).sum())
        width = float(stdtrit(n - 2, (1 + CONFIDENCE) / 2)) * self.deviation * math.sqrt(leverage)
        return math.exp(value), math.exp(value - width), math.exp(value + width)


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """The power law through some points; None for fewer than three x, or where y is not above zero:
    there is none."""
    if len(set(x)) < LEAST_LENGTHS or min(y) <= 0:
        return None
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    slope = float((centred * log_y).sum() / float((centred**2).sum()))
    intercept = float(log_y.mean() - slope * log_x.mean())
    residuals = log_y - intercept - slope * log_x
    return PowerLaw(intercept, slope, math.sqrt(float((residuals**2).sum()) / (len(x) - 2)), log_x)


class Quantity(NamedTuple):
    """What the ladder measures: a column that follows `shift` + `factor` times a power law of the
    relative delay."""

    column: str
    shift: float
    factor: float
    form: str  # of its texts

    def law(self, rows: pd.DataFrame) -> PowerLaw | None:
        """Through the lengths of one method at which it is known and no bound."""
        known = rows[rows[self.column].notna()]
        known = known[~known["is_censored"]] if "is_censored" in known else known
        y = (known[self.column] - self.shift) / self.factor
        return fit_power_law(known["relative_delay"].tolist(), y.tolist())

    def predicted(self, law: PowerLaw, relative_delay: float) -> tuple[float, float, float]:
        value, low, high = (self.shift + self.factor * each for each in law.at(relative_delay))
        return value, low, high

    def prediction_text(
        self, law: PowerLaw | None, relative_delay: float = PAPER_RELATIVE_DELAY
    ) -> str:
        if law is None:
            return "no law"
        value, *ends = self.predicted(law, relative_delay)
        low, high = sorted(ends)
        low_text = f"{low:{self.form}}" if low >= 0 else f"< {0:{self.form}}"
        high_text = f"{high:{self.form}}" if high <= MOST else f"> {MOST}"
        return f"{value:{self.form}} [{low_text}, {high_text}]"


SLOWDOWN = Quantity("ratio", 1, 1, ".2f")
SAVING = Quantity("share", 1, -1, ".0%")


def ladder_table(experiments: Experiments) -> pd.DataFrame:
    """What delay costs, by the length of the training: a target for each length, that the ladder's
    methods reach.

    The last rows extrapolate to the paper's relative delay, 0.013 %, with 95 % prediction
    intervals. Where the model grows, those before them say what the shorter lengths predict of the
    longest."""
    ladder, scale = read_ladder(experiments), experiments.scale
    saved = {
        (
            row["method"],
            row["iterations_of_training"],
            row["of_seeds"],
        ): f"{saved_text(row)} (over {row['baseline']})"
        for row in ladder.savings.to_dict("records")
    }
    table = [
        {
            "method": row["method"],
            "iterations": str(row["iterations_of_training"]),
            **({"seed": row["of_seeds"]} if scale.grows else {}),
            "P": str(DEEPEST),
            "final training loss at P = 1": row["finals"][0],
            "at P": row["finals"][1],
            "slowdown": slowdown_text(row),
            "target loss": f"{row['target']:.3f}",
            "iterations saved at P": saved.get(
                (row["method"], row["iterations_of_training"], row["of_seeds"]), ""
            ),
            **rate_texts(row, "lr at P"),
        }
        for row in ladder.slowdowns.to_dict("records")
    ]
    longest = max(scale.ladder)
    predicted = (
        [(f"{longest}, predicted", (DEEPEST - 1) / longest, longest - 1)] if scale.grows else []
    )
    columns = (
        ("slowdown", ladder.slowdown, ladder.slowdowns),
        ("iterations saved at P", SAVING, ladder.savings),
    )
    for label, relative_delay, most in [
        *predicted,
        ("244000, extrapolated", PAPER_RELATIVE_DELAY, longest),
    ]:
        known = [
            (name, what, rows[rows["iterations_of_training"] <= most])
            for name, what, rows in columns
            if len(rows)
        ]
        if not known or known[0][2]["iterations_of_training"].nunique() < LEAST_LENGTHS:
            continue
        for method in sorted(LADDER_METHODS):
            cells = {"method": method, "iterations": label, "P": str(DEEPEST)}
            for heading, quantity, of_lengths in known:
                of_method = of_lengths[of_lengths["method"] == method]
                if len(of_method):
                    cells[heading] = quantity.prediction_text(
                        quantity.law(of_method), relative_delay
                    )
            table.append(cells)
    return pd.DataFrame(table).fillna("")


def rate_texts(slowdown: Mapping[str, Any], heading: str) -> dict[str, str]:
    """The learning rates of both sides, a star where one is at the edge of those tried."""
    pairs = {"lr at P = 1": "reference_lr", heading: "lr"}
    return {
        title: rate_text(slowdown[key], at_edge=slowdown[f"{key}_at_edge"])
        for title, key in pairs.items()
    }


def fill_ladder(experiments: Experiments, figure: Figure) -> None:
    """Slowdown and iterations saved against the relative delay; the legends say what is
    extrapolated."""
    slowed, saved, slowdown = read_ladder(experiments)
    if slowed.empty:
        figure.subplots().set_title("not run", color="grey")
        return
    figure.set_size_inches(7.0, 3.4)
    left, right = figure.subplots(1, 2)
    slowed = slowed[slowed["method"].isin(LADDER_METHODS)]
    highest = 1.3 * max(_fill(left, slowed, slowdown, SLOWDOWNS, ".2f"))
    if experiments.scale.grows and SCALES["laptop"].runs.is_dir():
        of_fixed_width = read_ladder(laptop := Experiments.load(SCALES["laptop"]))
        experiments.used |= laptop.used
        fixed_width = (
            (left, of_fixed_width.slowdowns, "ratio"),
            (right, of_fixed_width.savings, "share"),
        )
        for axes, rows, column in (part for part in fixed_width if len(part[1])):
            points = rows[rows["method"] == "basis-rotation"]
            axes.plot(
                points["relative_delay"],
                points[column],
                ".:",
                color="grey",
                label="Basis rotation, model of fixed width",
            )
    left.set(yscale="log", ylim=(0.93, highest), ylabel=f"slowdown at P = {DEEPEST}")
    left.axhline(1.0, color="black", linewidth=0.5)
    left.set_yticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50) if tick < highest])
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _finish(left, _by_length(slowed, slowdown, "slowdown"))
    lowest = min(_fill(right, saved, SAVING, {"basis-rotation": SAVED["main"]}, ".1%"))
    right.set(ylim=(min(0.0, lowest - 0.05), 1.0), ylabel="saved over the best baseline")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _finish(right, _by_length(saved, SAVING, "saves"))


def _by_length(rows: pd.DataFrame, quantity: Quantity, what: str) -> str:
    """Basis rotation's number after the shortest training and after the longest."""
    of_ours = rows[(rows["method"] == "basis-rotation") & rows[quantity.column].notna()]
    if of_ours.empty:
        return ""
    columns = [quantity.column, *({"is_censored"} & set(of_ours))]
    ends = of_ours.groupby("iterations_of_training")[columns].mean().iloc[[0, -1]]
    short, long = (
        f"{'> ' if row.get('is_censored') else ''}{row[quantity.column]:{quantity.form}} at {T:,}"
        for T, row in ends.iterrows()
    )
    return f"Basis rotation: {what} {short}\niterations, {long}"


def _fill(
    axes: Axes, rows: pd.DataFrame, quantity: Quantity, printed: Mapping[str, float], form: str
) -> list[float]:
    """Each method's points, its law down to the paper's delay, and the paper's number there; all
    values drawn."""
    methods = rows["method"].unique()
    values = []
    for index, method in enumerate(methods):
        look = look_of(method)
        points = rows[(rows["method"] == method) & rows[quantity.column].notna()]
        values += [printed[method], *points[quantity.column]]
        law = quantity.law(points)
        label = f"{look.label}: {quantity.prediction_text(law)} / {printed[method]:{form}}"
        offset = SIDEWAYS ** (index - (len(methods) - 1) / 2)
        for point in points.to_dict("records"):
            x = point["relative_delay"] * offset
            y = point[quantity.column]
            ends = point["low"], point["high"]
            # Hollow: one seed; an arrow: a lower bound.
            marker = r"$\uparrow$" if point.get("is_censored") else look.marker
            face = "white" if point["num_seeds"] == 1 else look.color
            draw_points(
                axes,
                x,
                y,
                ends,
                look,
                marker=marker,
                markerfacecolor=face,
                markersize=5,
                label=label,
            )
            label = ""  # one entry in the legend
        if law is not None:
            delays = np.geomspace(PAPER_RELATIVE_DELAY, points["relative_delay"].max(), 60)
            line = [quantity.predicted(law, float(delay))[0] for delay in delays]
            axes.plot(delays, line, color=look.color, linewidth=1.0, linestyle=(0, (4, 1.5)))
            # The interval at the paper's delay, beside the star.
            _, low, high = quantity.predicted(law, PAPER_RELATIVE_DELAY)
            beside = PAPER_RELATIVE_DELAY / offset**4 / 1.15
            axes.plot([beside, beside], [low, high], color=look.color, linewidth=2.5, alpha=0.5)
        axes.plot(
            PAPER_RELATIVE_DELAY,
            printed[method],
            "*",
            color=look.color,
            markersize=10,
            markeredgecolor="black",
            markeredgewidth=0.6,
        )
    return values


def _finish(axes: Axes, title: str) -> None:
    """Scale, labels, legend, and a line where the paper is."""
    axes.set(xscale="log", xlabel="relative delay $\\tau / T$", title=title)
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.minorticks_off()
    axes.axvline(PAPER_RELATIVE_DELAY, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        "the paper:\n31 / 244,000",
        (PAPER_RELATIVE_DELAY, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        va="top",
        fontsize=7,
    )
    axes.legend(
        title="at the paper's delay: extrapolated [95 %] / paper",
        title_fontsize=7,
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
    )
