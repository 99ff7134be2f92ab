"""Basis rotation's leads in the main comparison, each split into the lead without delay and the
part that delay adds (docs/protocol.md, section 10)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from brx.errors import UserError
from brx.paper import strict
from brx.paper.evidence import losses_by_seed, runs_of
from brx.paper.scales import DEEPEST, OURS, PRECONDITIONED, Experiments
from brx.plot.style import finish_panel, look_of
from brx.runs.comparison import (
    BASELINES,
    best_by_seed,
    saved_ratio,
    seeds_in_common,
    shared_seeds,
)

BEST_BASELINE = "best baseline"
RIVALS = (BEST_BASELINE, *BASELINES, *PRECONDITIONED)


class Saved(NamedTuple):
    """A share of a rival's iterations that ours saves."""

    share: float  # NaN if it is not known
    is_upper_bound: bool = False  # ours never gets there on some seed


@dataclass(frozen=True)
class LeadParts:
    """Basis rotation's lead over a rival and its two parts, in nats of a final loss, by seed.

    With L(method, P) the loss at P stages on a seed:

        total         = L(rival, 32) - L(ours, 32)
        without_delay = L(rival, 1) - L(ours, 1)
        from_delay    = total - without_delay"""

    rival: str
    without_delay: pd.Series  # index: seed
    total: pd.Series  # index: seed
    # The share of the rival's iterations that ours saves to the rival's final training loss.
    saved_without_delay: Saved
    saved: Saved  # the same at 32 stages

    @property
    def from_delay(self) -> pd.Series:
        """The part of the lead that delay adds, by seed."""
        return self.total - self.without_delay


def lead_parts(
    experiments: Experiments, rivals: Sequence[str] = RIVALS, loss: str = "val_loss"
) -> list[LeadParts]:
    """The lead over each rival that has runs both without delay and at the deepest pipeline.

    A lead takes only the seeds that both methods have at both of these ends.

    Args:
        experiments: the runs.
        rivals: names in `RIVALS`.
        loss: the column that is compared. Learning rates are chosen by the validation loss all the
            same.
    """
    parts = []
    for rival in rivals:
        try:
            without_delay = _sides(experiments, rival, 1)
            delayed = _sides(experiments, rival, DEEPEST)
        except UserError:  # `experiments.missing` now names the missing runs
            continue
        parts.append(_parts(rival, without_delay, delayed, loss))
    return parts


def _sides(experiments: Experiments, rival: str, stages: int) -> list[pd.DataFrame]:
    """Basis rotation's runs and a rival's; for the best baseline, the runs of every baseline.

    UserError if one of these experiments has no runs."""
    rivals = BASELINES if rival == BEST_BASELINE else (rival,)
    return [runs_of(experiments, method, stages) for method in (OURS, *rivals)]


def _parts(
    rival: str,
    without_delay: Sequence[pd.DataFrame],
    delayed: Sequence[pd.DataFrame],
    loss: str,
) -> LeadParts:
    """The lead over a rival, from what `_sides` returns at both ends. Without a seed that all sides
    have, both parts are empty."""
    sides = [*without_delay, *delayed]
    if not seeds_in_common(sides):
        nothing = pd.Series(dtype=float)
        return LeadParts(rival, nothing, nothing, Saved(np.nan), Saved(np.nan))
    sides = shared_seeds(*sides)
    ours, *theirs = sides[: len(without_delay)]
    ours_delayed, *theirs_delayed = sides[len(without_delay) :]
    best = best_by_seed(theirs, loss)
    best_delayed = best_by_seed(theirs_delayed, loss)
    return LeadParts(
        rival,
        without_delay=_lead(ours, best, loss),
        total=_lead(ours_delayed, best_delayed, loss),
        saved_without_delay=_share_saved(ours, best),
        saved=_share_saved(ours_delayed, best_delayed),
    )


def _lead(ours: pd.DataFrame, theirs: pd.DataFrame, loss: str) -> pd.Series:
    """How many nats ours ends below theirs, by seed."""
    return losses_by_seed(theirs, loss) - losses_by_seed(ours, loss)


def _share_saved(ours: pd.DataFrame, theirs: pd.DataFrame) -> Saved:
    """The share of the rival's iterations that ours saves on the way to the rival's final training
    loss; NaN if it is unknown."""
    ratio = saved_ratio(ours, theirs)
    if ratio is None:
        return Saved(np.nan)
    return Saved(1 - ratio.ratio, is_upper_bound=ratio.is_lower_bound)


def lead_table(experiments: Experiments, loss: str = "val_loss") -> pd.DataFrame:
    """A row per rival: the lead with delay, its two parts, and the iterations saved; all cells are
    texts. `loss` is the column that is compared."""
    rows = []
    for parts in lead_parts(experiments, loss=loss):
        row = lead_row(parts)
        row["iterations saved at P = 1"] = _percent(parts.saved_without_delay)
        row[f"iterations saved at P = {DEEPEST}"] = _percent(parts.saved)
        rows.append(row)
    return pd.DataFrame(rows)


def lead_row(parts: LeadParts) -> dict[str, str]:
    """The texts of a row about a rival: the lead with delay, its two parts, and whether it is
    larger than chance."""
    return {
        "rival": parts.rival,
        "seeds": str(len(parts.total)),
        f"lead at P = {DEEPEST}": _nats(parts.total),
        "of it without delay": _nats(parts.without_delay),
        "from delay": _nats(parts.from_delay),
        f"at P = {DEEPEST}": lead_finding(parts.total),
    }


def _percent(saved: Saved) -> str:
    if np.isnan(saved.share):
        return ""
    return f"{'< ' if saved.is_upper_bound else ''}{saved.share:.1%}"


def _nats(by_seed: pd.Series) -> str:
    """A mean with its interval (`strict.mean_text`), over the seeds that did not diverge on both
    sides."""
    return strict.mean_text(by_seed.dropna().tolist())


def lead_finding(by_seed: pd.Series) -> str:
    """Whether a lead is larger than chance. If a run diverged, all seeds have to have the same sign
    (`strict.direction`)."""
    if by_seed.empty:
        return "no seed in common"
    known = by_seed.dropna().tolist()
    if len(known) < strict.FEWEST_SEEDS:
        return "too few seeds"
    return {"yes": "ahead", "no": "behind", "open": "within chance"}[strict.direction(known)]


def draw_leads(experiments: Experiments, axes: Axes, rivals: Sequence[str] = RIVALS) -> None:
    """Draw a panel with a bar per rival: the lead without delay, and stacked on it the part from
    delay, which is hatched if it is negative. A black line is the 95 % interval of the whole lead.
    If a run diverged, or if the runs share no seed, the rival has no bar, because no mean exists.

    Args:
        experiments: the runs.
        axes: the panel.
        rivals: names in `RIVALS`; ones without runs are left out.

    Raises:
        UserError: no rival has runs at both ends.
    """
    parts = lead_parts(experiments, rivals)
    if not parts:
        raise UserError(f"no rival of {OURS} has runs at both ends")
    ys = np.arange(len(parts))[::-1]  # the first rival is at the top
    _draw_bars(axes, ys, parts)
    for y, each in zip(ys, parts, strict=True):
        interval = strict.interval_over_seeds(each.total.tolist())
        if interval is not None:
            axes.plot([interval.low, interval.high], [y, y], color="black", linewidth=1.0)
    axes.axvline(0.0, color="black", linewidth=0.6)
    axes.set_yticks(ys, [_label(each) for each in parts])
    ahead = [each for each in parts if lead_finding(each.total) == "ahead"]
    title = (
        f"lead of {look_of(OURS).label} at P = {DEEPEST}\n"
        f"ahead of {len(ahead)} of {len(parts)} by more than chance"
    )
    finish_panel(axes, "nats of final validation loss", "", title)


def _draw_bars(axes: Axes, ys: NDArray[np.int_], parts: Sequence[LeadParts]) -> None:
    """Draw the two parts of each lead, the part from delay at the end of the other one."""
    without = np.full(len(parts), np.nan)
    from_delay = np.full(len(parts), np.nan)
    for index, each in enumerate(parts):
        if _has_means(each):
            without[index] = each.without_delay.mean()
            from_delay[index] = each.from_delay.mean()
    axes.barh(ys, without, color="0.7", label="without delay")
    color = look_of(OURS).color
    # A negative part lies on the bar of the lead without delay. Filled, it would look like a gain.
    is_taken = from_delay < 0
    gained: dict[str, Any] = {"color": color, "label": "from delay"}
    taken = {"facecolor": "white", "edgecolor": color, "hatch": "////", "label": "lost to delay"}
    for chosen, looks in ((~is_taken, gained), (is_taken, taken)):
        if chosen.any():
            axes.barh(ys[chosen], from_delay[chosen], left=without[chosen], **looks)


def _has_means(parts: LeadParts) -> bool:
    """Whether the parts of a lead have means: they have seeds, and no run of them diverged."""
    return not parts.total.empty and bool(np.isfinite(parts.from_delay).all())


def _label(parts: LeadParts) -> str:
    """A rival's name in the figure, and why it has no bar if it has none."""
    name = parts.rival if parts.rival == BEST_BASELINE else look_of(parts.rival).label
    if _has_means(parts):
        return name
    return f"{name} (no seed in common)" if parts.total.empty else f"{name} (diverged)"
