"""Basis rotation's leads in the main comparison, each split into the lead without delay and the
part that delay adds (docs/protocol.md, section 10)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from brx.errors import UserError
from brx.paper import strict
from brx.paper.evidence import losses_by_seed, runs_of
from brx.paper.scales import DEEPEST, OURS, PRECONDITIONED, Experiments
from brx.plot.style import finish_panel, look_of
from brx.runs.comparison import BASELINES, best_by_seed, saved_ratio, shared_seeds

BEST_BASELINE = "best baseline"
RIVALS = (BEST_BASELINE, *BASELINES, *PRECONDITIONED)


class Saved(NamedTuple):
    """A share of a rival's iterations that ours saves."""

    share: float  # NaN if it is not known
    is_upper_bound: bool = False  # ours never gets there on some seed


@dataclass(frozen=True)
class LeadParts:
    """Basis rotation's lead over a rival and its two parts, in nats of final validation loss, by
    seed.

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


def lead_parts(experiments: Experiments, rivals: Sequence[str] = RIVALS) -> list[LeadParts]:
    """The lead over each rival that has runs both without delay and at the deepest pipeline.

    A lead takes only the seeds that both methods have at both of these ends."""
    parts = []
    for rival in rivals:
        try:
            ours, theirs, ours_delayed, theirs_delayed = shared_seeds(
                runs_of(experiments, OURS, 1),
                _rival_runs(experiments, rival, 1),
                runs_of(experiments, OURS, DEEPEST),
                _rival_runs(experiments, rival, DEEPEST),
            )
        except UserError:  # `experiments.missing` now names the missing runs
            continue
        lead = LeadParts(
            rival,
            without_delay=_lead(ours, theirs),
            total=_lead(ours_delayed, theirs_delayed),
            saved_without_delay=_share_saved(ours, theirs),
            saved=_share_saved(ours_delayed, theirs_delayed),
        )
        parts.append(lead)
    return parts


def _rival_runs(experiments: Experiments, rival: str, stages: int) -> pd.DataFrame:
    """The runs of a method; for the best baseline, the run that ends lowest on each seed."""
    if rival != BEST_BASELINE:
        return runs_of(experiments, rival, stages)
    baselines = shared_seeds(*(runs_of(experiments, name, stages) for name in BASELINES))
    return best_by_seed(baselines, "val_loss")


def _lead(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.Series:
    """How many nats ours ends below theirs, by seed."""
    return losses_by_seed(theirs) - losses_by_seed(ours)


def _share_saved(ours: pd.DataFrame, theirs: pd.DataFrame) -> Saved:
    """The share of the rival's iterations that ours saves on the way to the rival's final training
    loss; NaN if it is unknown."""
    ratio = saved_ratio(ours, theirs)
    if ratio is None:
        return Saved(np.nan)
    return Saved(1 - ratio.ratio, is_upper_bound=ratio.is_lower_bound)


def lead_table(experiments: Experiments) -> pd.DataFrame:
    """A row per rival: the lead with delay, its two parts, and the iterations saved; all cells are
    texts."""
    rows = []
    for parts in lead_parts(experiments):
        rows.append(
            {
                "rival": parts.rival,
                "seeds": str(len(parts.total)),
                f"lead at P = {DEEPEST}": _nats(parts.total),
                "of it without delay": _nats(parts.without_delay),
                "from delay": _nats(parts.from_delay),
                f"at P = {DEEPEST}": _finding(parts.total),
                "iterations saved at P = 1": _percent(parts.saved_without_delay),
                f"iterations saved at P = {DEEPEST}": _percent(parts.saved),
            }
        )
    return pd.DataFrame(rows)


def _percent(saved: Saved) -> str:
    if np.isnan(saved.share):
        return ""
    return f"{'< ' if saved.is_upper_bound else ''}{saved.share:.1%}"


def _nats(by_seed: pd.Series) -> str:
    """A mean with its interval (`strict.mean_text`), over the seeds that did not diverge on both
    sides."""
    return strict.mean_text(by_seed.dropna().tolist())


def _finding(by_seed: pd.Series) -> str:
    """Whether a lead is larger than chance. If a run diverged, all seeds have to have the same sign
    (`strict.direction`)."""
    known = by_seed.dropna().tolist()
    if len(known) < strict.FEWEST_SEEDS:
        return "too few seeds"
    return {"yes": "ahead", "no": "behind", "open": "within chance"}[strict.direction(known)]


def draw_leads(experiments: Experiments, axes: Axes, rivals: Sequence[str] = RIVALS) -> None:
    """Draw a panel with a bar per rival: the lead without delay, and stacked on it the part from
    delay, which is hatched if it is negative. A black line is the 95 % interval of the whole lead.
    If a run diverged, its rival has no bar, because no mean exists.

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
    ys = np.arange(len(parts))[::-1]
    is_finite = np.array([np.isfinite(each.from_delay).all() for each in parts])
    without = np.array([each.without_delay.mean() for each in parts])
    from_delay = np.array([each.from_delay.mean() for each in parts])
    without[~is_finite] = np.nan
    from_delay[~is_finite] = np.nan
    axes.barh(ys, without, color="0.7", label="without delay")
    color = look_of(OURS).color
    # A negative part lies on the bar of the lead without delay. Filled, it would look like a gain.
    is_taken = from_delay < 0
    gained: dict[str, Any] = {"color": color, "label": "from delay"}
    taken = {"facecolor": "white", "edgecolor": color, "hatch": "////", "label": "lost to delay"}
    for chosen, looks in ((~is_taken, gained), (is_taken, taken)):
        if chosen.any():
            axes.barh(ys[chosen], from_delay[chosen], left=without[chosen], **looks)
    for y, each in zip(ys, parts, strict=True):
        interval = strict.interval_over_seeds(each.total.tolist())
        if interval is not None:
            axes.plot([interval.low, interval.high], [y, y], color="black", linewidth=1.0)
    axes.axvline(0.0, color="black", linewidth=0.6)
    labels = []
    for each, is_drawn in zip(parts, is_finite, strict=True):
        labels.append(_label(each.rival) + ("" if is_drawn else " (diverged)"))
    axes.set_yticks(ys, labels)
    ahead = [each for each in parts if _finding(each.total) == "ahead"]
    title = (
        f"lead of {look_of(OURS).label} at P = {DEEPEST}\n"
        f"surely ahead of {len(ahead)} of {len(parts)}"
    )
    finish_panel(axes, "nats of final validation loss", "", title)


def _label(rival: str) -> str:
    """A rival's name in the figure."""
    return rival if rival == BEST_BASELINE else look_of(rival).label
