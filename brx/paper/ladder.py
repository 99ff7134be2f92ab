"""The ladder: how the cost of delay depends on the relative delay tau / T, from trainings of
several lengths T.

A laptop cannot train as long as the paper did, but it can show how the cost falls with the length,
and extrapolate. Power laws in the relative delay are fitted to slowdown - 1, and to the share of
the best baseline's iterations that basis rotation needs. If the model grows with the training
(docs/protocol.md, section 9), the first law is fitted to the slowdown itself, and each seed is a
point of its own in both fits."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray
from scipy.special import stdtrit

from brx.config.loading import Settings
from brx.errors import UserError, counted
from brx.paper.printed import SAVED, SLOWDOWNS
from brx.paper.scales import (
    DEEPEST,
    ENDS,
    LADDER_METHODS,
    OURS,
    PRECONDITIONED,
    SCALES,
    STRATEGY_NAMES,
    Experiments,
)
from brx.plot.style import Look, draw_points, look_of
from brx.runs.comparison import (
    common_target,
    concat,
    reductions,
    shared_seeds,
    slowdowns,
    with_diverged,
)
from brx.runs.experiments import by_experiment
from brx.runs.folder import has_runs
from brx.runs.frames import DEPTH
from brx.runs.slowdown import CONFIDENCE
from brx.runs.tables import final_loss_text, rate_text, saved_text, slowdown_text
from brx.runs.trajectory import RATE, SEED

PAPER_RELATIVE_DELAY = 31 / 244_000
"""The paper's largest delay over its training: 1 B tokens at 4,096 per iteration."""
EXTRAPOLATED = "244000, extrapolated"
"""The length of the training in rows at PAPER_RELATIVE_DELAY."""
LEAST_LENGTHS = 3  # a law needs at least so many lengths
LARGEST_END = 100  # a larger end of an interval is printed as "> 100"
# Factor between the x of neighbouring methods, so that their intervals do not cover each other.
SIDEWAYS = 1.03
# Ticks of the relative delay: 0.001 % to 30 %.
TICKS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


class Ladder(NamedTuple):
    """Results of the complete lengths, shortest first.

    A length is complete if every method of the ladder has runs at P = 1 and 32. If the model grows,
    each seed has its own rows. Both frames have these columns:

    - `iterations_of_training`: T;
    - `relative_delay`: tau / T;
    - `num_seeds`: the number of seeds of the method that has the fewest at this length;
    - `of_seeds`: the seeds, as a text."""

    # Rows of `brx.runs.comparison.slowdowns`. The column `finals` has the final training losses at
    # P = 1 and 32, as texts.
    slowdowns: pd.DataFrame
    savings: pd.DataFrame  # rows of `brx.runs.comparison.reductions` at P = 32
    slowdown: Quantity  # the law of `slowdowns`

    def up_to(self, longest: int) -> Ladder:
        """Only the lengths of at most `longest` iterations."""
        slowed = self.slowdowns
        saved = self.savings
        if len(slowed):
            slowed = slowed[slowed["iterations_of_training"] <= longest]
        if len(saved):
            saved = saved[saved["iterations_of_training"] <= longest]
        return Ladder(slowed, saved, self.slowdown)


def read_ladder(experiments: Experiments) -> Ladder:
    """Slowdowns and iterations saved at each length.

    Each length has a target of its own, the lowest loss that all of the ladder's methods reach.
    Other methods also have slowdowns if they were trained for as many iterations.

    Raises:
        UserError: the scale has no ladder.
    """
    scale = experiments.scale
    if not scale.ladder:
        raise UserError(
            "the ladder: only at the scale of a laptop: brx sweep configs/sweeps/laptop/ladder.yaml"
        )
    slowed = []
    saved = []
    for T, further in scale.ladder.items():
        runs = _runs_of_length(experiments, {"training.iterations": T, **further})
        if runs is None:
            continue
        target = common_target(_ladder_methods_only(runs))
        samples = list(_each_seed(runs)) if scale.grows else [runs]
        for compared in samples:
            ladder_runs = _ladder_methods_only(compared)
            labels = {
                "iterations_of_training": T,
                # tau is the delay of the first stage, P - 1.
                "relative_delay": (DEEPEST - 1) / T,
                "num_seeds": int(ladder_runs.groupby("experiment")[SEED].nunique().min()),
                "of_seeds": ", ".join(map(str, sorted(compared[SEED].unique()))),
            }
            slowed.append(_with_finals(slowdowns(compared, target), compared).assign(**labels))
            at_deepest = ladder_runs[ladder_runs[DEPTH] == DEEPEST]
            saved.append(reductions(at_deepest).assign(**labels))
    slowdown = SLOWDOWN_OF_GROWING if scale.grows else SLOWDOWN
    return Ladder(concat(slowed), concat(saved), slowdown)


def _ladder_methods_only(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the ladder's methods, without those of other methods."""
    return runs[runs["variant"].isin(LADDER_METHODS)]


def _each_seed(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The runs of one seed after another; every experiment has to have each seed."""
    for _, seed_runs in runs.groupby(SEED):
        yield pd.concat(shared_seeds(*by_experiment(seed_runs)))


def _with_finals(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `slowdowns` with a new column `finals`: the final losses at both ends, as texts."""
    final_losses = {
        place: final_loss_text(seeds) for place, seeds in runs.groupby(["variant", DEPTH])
    }
    finals = []
    for method in rows["method"]:
        finals.append([final_losses[method, P] for P in ENDS])
    return rows.assign(finals=finals)


def _runs_of_length(experiments: Experiments, settings: Settings) -> pd.DataFrame | None:
    """The runs of one length; None if one of the ladder's methods has none."""
    at_rate = experiments.at_rate(settings[RATE]) if RATE in settings else experiments
    runs = at_rate.find_ends(*LADDER_METHODS, sweep="ladder", settings=settings)
    if runs is None:
        return None
    if experiments.scale.grows:
        return _runs_of_shared_seeds(runs)
    parts = [runs]
    # Asks a copy, so that other methods without runs do not count as missing.
    quietly = at_rate.fresh()
    for name in (*STRATEGY_NAMES[1:], *PRECONDITIONED):
        pair = quietly.find_ends(name, settings=settings)
        if pair is not None:
            parts.append(pair)
    return pd.concat(parts)


def _runs_of_shared_seeds(runs: pd.DataFrame) -> pd.DataFrame | None:
    """The runs of the seeds that all experiments have, including diverged ones; None if they share
    no seed."""
    sides = [with_diverged(seeds.assign(variant=seeds["method"])) for seeds in by_experiment(runs)]
    try:
        return pd.concat(shared_seeds(*sides))
    except UserError:
        return None


class Predicted(NamedTuple):
    """A value with its 95 % prediction interval."""

    value: float
    low: float
    high: float


class PowerLaw(NamedTuple):
    """log y = intercept + slope log x, by least squares."""

    intercept: float
    slope: float
    deviation: float  # standard deviation of log y from the line, with n - 2 degrees of freedom
    log_x: NDArray[np.float64]  # (n,)

    def at(self, x: float) -> Predicted:
        """y at x, with the 95 % prediction interval of one more point there.

        The half-width of the interval of log y is t s sqrt(1 + 1/n + (log x - m)^2 / S), where t is
        the quantile of Student's t with n - 2 degrees of freedom, s is `deviation`, m is the mean
        of log x over the n fitted points, and S is the sum of their squared distances from m."""
        n = len(self.log_x)
        m = self.log_x.mean()
        S = float(((self.log_x - m) ** 2).sum())
        t = float(stdtrit(n - 2, (1 + CONFIDENCE) / 2))
        from_mean = math.log(x) - float(m)
        half_width = t * self.deviation * math.sqrt(1 + 1 / n + from_mean**2 / S)
        log_y = self.intercept + self.slope * math.log(x)
        return Predicted(
            math.exp(log_y), math.exp(log_y - half_width), math.exp(log_y + half_width)
        )


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Fit a power law to points (x, y), by least squares in log x and log y.

    None for fewer than LEAST_LENGTHS different x, or if a y is not above zero: such points follow
    no power law. Every x has to be above zero."""
    if len(set(x)) < LEAST_LENGTHS or min(y) <= 0:
        return None
    log_x = np.log(x)
    log_y = np.log(y)
    centred = log_x - log_x.mean()
    slope = float((centred * log_y).sum() / float((centred**2).sum()))
    intercept = float(log_y.mean() - slope * log_x.mean())
    residuals = log_y - intercept - slope * log_x
    variance = float((residuals**2).sum()) / (len(x) - 2)
    return PowerLaw(intercept, slope, math.sqrt(variance), log_x)


class Quantity(NamedTuple):
    """A column of a frame in `Ladder`, and its law: `shift` + `factor` times a power law of the
    relative delay."""

    column: str
    shift: float
    factor: float
    form: str  # format specification of its texts, such as `.2f`

    def law(self, rows: pd.DataFrame) -> PowerLaw | None:
        """Fit the power law to the rows of one method. Rows with only a bound or with an unknown
        value are left out. None if no law can be fitted (`fit_power_law`)."""
        known = rows[rows[self.column].notna()]
        if "is_censored" in known:
            known = known[~known["is_censored"]]
        y = (known[self.column] - self.shift) / self.factor
        return fit_power_law(known["relative_delay"].tolist(), y.tolist())

    def from_law(self, y: float) -> float:
        """The quantity for a value of its power law."""
        return self.shift + self.factor * y

    def predicted(self, law: PowerLaw, relative_delay: float) -> Predicted:
        """The quantity at a relative delay, with its prediction interval."""
        value, *ends = map(self.from_law, law.at(relative_delay))
        # A negative `factor` swaps the ends.
        return Predicted(value, min(ends), max(ends))

    def prediction_text(
        self, rows: pd.DataFrame, relative_delay: float = PAPER_RELATIVE_DELAY
    ) -> str:
        """The prediction by the law of some rows, as a text such as `1.27 [1.21, 1.35]`, or
        `no law`; and how many bounds the law leaves out."""
        text = "no law"
        law = self.law(rows)
        if law is not None:
            value, low, high = self.predicted(law, relative_delay)
            low_text = f"{low:{self.form}}" if low >= 0 else f"< {0:{self.form}}"
            high_text = f"{high:{self.form}}" if high <= LARGEST_END else f"> {LARGEST_END}"
            text = f"{value:{self.form}} [{low_text}, {high_text}]"
        num_bounds = int(rows["is_censored"].sum()) if "is_censored" in rows else 0
        # The slowdowns behind bounds are larger, so the law may be too low.
        return f"{text} (without {counted(num_bounds, 'bound')})" if num_bounds else text


SLOWDOWN = Quantity("ratio", 1, 1, ".2f")  # slowdown - 1 follows a power law
SLOWDOWN_OF_GROWING = Quantity("ratio", 0, 1, ".2f")  # if the model grows, the slowdown itself does
SAVING = Quantity("share", 1, -1, ".0%")  # 1 - share saved follows a power law


def ladder_table(experiments: Experiments) -> pd.DataFrame:
    """Slowdowns and iterations saved by the length of the training; all cells are texts.

    The last rows extrapolate to the paper's relative delay, 0.013 %, with 95 % prediction
    intervals. If the model grows, the rows before them predict the longest length from the shorter
    ones.

    Raises:
        UserError: the scale has no ladder.
    """
    ladder = read_ladder(experiments)
    scale = experiments.scale
    rows = _measured_rows(ladder, with_seed=scale.grows)
    if scale.grows:
        longest = max(scale.ladder)
        shorter = ladder.up_to(longest - 1)
        rows += _predicted_rows(shorter, f"{longest}, predicted", (DEEPEST - 1) / longest)
    rows += _predicted_rows(ladder, EXTRAPOLATED, PAPER_RELATIVE_DELAY)
    return pd.DataFrame(rows).fillna("")


def _measured_rows(ladder: Ladder, *, with_seed: bool) -> list[dict[str, str]]:
    """A row per slowdown, with the iterations that the same runs save."""
    saved = {}
    for saving in ladder.savings.to_dict("records"):
        saved[_method_and_length(saving)] = f"{saved_text(saving)} (over {saving['baseline']})"
    rows = []
    for slowdown in ladder.slowdowns.to_dict("records"):
        row = {
            "method": slowdown["method"],
            "iterations": str(slowdown["iterations_of_training"]),
        }
        if with_seed:
            row["seed"] = slowdown["of_seeds"]
        without_delay, delayed = slowdown["finals"]
        row |= {
            "P": str(DEEPEST),
            "final training loss at P = 1": without_delay,
            "at P": delayed,
            "slowdown": slowdown_text(slowdown),
            "target loss": f"{slowdown['target']:.3f}",
            "iterations saved at P": saved.get(_method_and_length(slowdown), ""),
        }
        rows.append(row | rate_texts(slowdown, "lr at P"))
    return rows


def _method_and_length(row: Mapping[Hashable, Any]) -> tuple[str, int, str]:
    """A key that a slowdown shares with the iterations saved by the same runs."""
    return row["method"], row["iterations_of_training"], row["of_seeds"]


def _predicted_rows(ladder: Ladder, label: str, relative_delay: float) -> list[dict[str, str]]:
    """A row per method with the predictions of its laws at a relative delay; no rows if there are
    too few lengths for a law."""
    columns = []
    if len(ladder.slowdowns):
        columns.append(("slowdown", ladder.slowdown, ladder.slowdowns))
    if len(ladder.savings):
        columns.append(("iterations saved at P", SAVING, ladder.savings))
    if not columns:
        return []
    _, _, measured = columns[0]
    if measured["iterations_of_training"].nunique() < LEAST_LENGTHS:
        return []
    rows = []
    for method in sorted(LADDER_METHODS):
        row = {"method": method, "iterations": label, "P": str(DEEPEST)}
        for heading, quantity, measured_rows in columns:
            method_rows = measured_rows[measured_rows["method"] == method]
            if len(method_rows):
                row[heading] = quantity.prediction_text(method_rows, relative_delay)
        rows.append(row)
    return rows


def rate_texts(slowdown: Mapping[Hashable, Any], heading: str) -> dict[str, str]:
    """The learning rates of both sides, by column; a star marks a rate at the edge of the rates
    tried.

    Args:
        slowdown: a row of `brx.runs.comparison.slowdowns`.
        heading: the name of the column for the rate with delay.
    """
    reference = rate_text(slowdown["reference_lr"], at_edge=slowdown["reference_lr_at_edge"])
    delayed = rate_text(slowdown["lr"], at_edge=slowdown["lr_at_edge"])
    return {"lr at P = 1": reference, heading: delayed}


def fill_ladder(experiments: Experiments, figure: Figure) -> None:
    """Draw slowdown and iterations saved against the relative delay into an empty figure.

    The legends give the extrapolations.

    Raises:
        UserError: the scale has no ladder.
    """
    ladder = read_ladder(experiments)
    if ladder.slowdowns.empty:
        figure.subplots().set_title("not run", color="grey")
        return
    figure.set_size_inches(7.0, 3.4)
    left, right = figure.subplots(1, 2)

    slowed = ladder.slowdowns[ladder.slowdowns["method"].isin(LADDER_METHODS)]
    drawn = _draw_quantity(left, slowed, ladder.slowdown, SLOWDOWNS, ".2f")
    highest = 1.3 * max(drawn)
    if experiments.scale.grows and has_runs(SCALES["laptop"].runs):
        _draw_fixed_width(experiments, left, right)
    left.set(yscale="log", ylim=(0.93, highest), ylabel=f"slowdown at P = {DEEPEST}")
    left.axhline(1.0, color="black", linewidth=0.5)
    left.set_yticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50) if tick < highest])
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _finish(left, _by_length(slowed, ladder.slowdown, "slowdown"))

    drawn = _draw_quantity(right, ladder.savings, SAVING, {OURS: SAVED["main"]}, ".1%")
    lowest = min(drawn)
    right.set(ylim=(min(0.0, lowest - 0.05), 1.0), ylabel="saved over the best baseline")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _finish(right, _by_length(ladder.savings, SAVING, "saves"))


def _draw_fixed_width(experiments: Experiments, left: Axes, right: Axes) -> None:
    """Basis rotation on the ladder of the scale `laptop`, whose model does not grow, in grey.

    Its runs also count as used."""
    laptop = Experiments.load(SCALES["laptop"])
    fixed_width = read_ladder(laptop)
    experiments.used |= laptop.used
    _draw_in_grey(left, fixed_width.slowdowns, "ratio")
    _draw_in_grey(right, fixed_width.savings, "share")


def _draw_in_grey(axes: Axes, rows: pd.DataFrame, column: str) -> None:
    """Basis rotation's points."""
    if rows.empty:
        return
    points = rows[rows["method"] == OURS]
    label = "Basis rotation, model of fixed width"
    axes.plot(points["relative_delay"], points[column], ".:", color="grey", label=label)


def _by_length(rows: pd.DataFrame, quantity: Quantity, verb: str) -> str:
    """A title: basis rotation's number after the shortest and after the longest training."""
    ours = _known(rows, OURS, quantity)
    if ours.empty:
        return ""
    columns = [quantity.column]
    if "is_censored" in ours:
        columns.append("is_censored")
    by_length = ours.groupby("iterations_of_training")[columns].mean()
    texts = []
    for T, row in by_length.iloc[[0, -1]].iterrows():
        # The mean of `is_censored` is above zero if any seed has only a bound.
        bound = "> " if row.get("is_censored") else ""
        texts.append(f"{bound}{row[quantity.column]:{quantity.form}} at {T:,}")
    short, long = texts
    return f"Basis rotation: {verb} {short}\niterations, {long}"


def _known(rows: pd.DataFrame, method: str, quantity: Quantity) -> pd.DataFrame:
    """The rows of a method in which the quantity is known."""
    method_rows = rows[rows["method"] == method]
    return method_rows[method_rows[quantity.column].notna()]


def _draw_quantity(
    axes: Axes, rows: pd.DataFrame, quantity: Quantity, printed: Mapping[str, float], form: str
) -> list[float]:
    """Draw the points of each method, its law down to the paper's delay, and the paper's number.

    Args:
        axes: the panel.
        rows: a frame in `Ladder`.
        quantity: the column to draw, and its law.
        printed: the paper's numbers by method.
        form: the format of their texts.

    Returns:
        all values that are drawn as points or stars.
    """
    methods = rows["method"].unique()
    values = []
    for index, method in enumerate(methods):
        look = look_of(method)
        points = _known(rows, method, quantity)
        values += [printed[method], *points[quantity.column]]
        law = quantity.law(points)
        label = f"{look.label}: {quantity.prediction_text(points)} / {printed[method]:{form}}"
        offset = SIDEWAYS ** (index - (len(methods) - 1) / 2)
        _draw_measured(axes, points, quantity, look, offset, label)
        if law is not None:
            _draw_law(axes, law, quantity, points["relative_delay"].max(), look, offset)
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


def _draw_measured(
    axes: Axes, points: pd.DataFrame, quantity: Quantity, look: Look, offset: float, label: str
) -> None:
    """Points of a method with their intervals, at `offset` times their relative delay.

    A hollow point has one seed. An arrow is a lower bound."""
    for point in points.to_dict("records"):
        draw_points(
            axes,
            point["relative_delay"] * offset,
            point[quantity.column],
            (point["low"], point["high"]),
            look,
            marker=r"$\uparrow$" if point.get("is_censored") else look.marker,
            markerfacecolor="white" if point["num_seeds"] == 1 else look.color,
            markersize=5,
            label=label,
        )
        label = ""  # one entry in the legend


def _draw_law(
    axes: Axes, law: PowerLaw, quantity: Quantity, largest_delay: float, look: Look, offset: float
) -> None:
    """The law from the paper's relative delay to the largest measured one, and its prediction
    interval at the paper's."""
    delays = np.geomspace(PAPER_RELATIVE_DELAY, largest_delay, 60)
    line = [quantity.predicted(law, float(delay)).value for delay in delays]
    axes.plot(delays, line, color=look.color, linewidth=1.0, linestyle=(0, (4, 1.5)))
    _, *ends = map(quantity.from_law, law.at(PAPER_RELATIVE_DELAY))
    left_of_the_star = PAPER_RELATIVE_DELAY / offset**4 / 1.15
    axes.plot([left_of_the_star] * 2, ends, color=look.color, linewidth=2.5, alpha=0.5)


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
        title="stars: the paper; left bars: 95 % of the dashed law\n"
        "at the paper's delay: extrapolated [95 %] / paper",
        title_fontsize=7,
        fontsize=7,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
    )
