"""Updates along the Hessian's dominant eigenvector and along a random direction, with their variances."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from brx.curvature.oscillation import DIRECTIONS, Oscillation, representative
from brx.plot.style import look_of, new_figure, save
from brx.runs.slowdown import geometric_mean

TITLES = {"dominant": "along the dominant eigenvector", "random": "along a random orthogonal direction"}


def draw_oscillation(results: Sequence[Oscillation], path: Path) -> list[Path]:
    """A row per P: the projections of one checkpoint per method on both directions, and the variances of all.

    The two directions have vertical scales of their own: updates along a random direction are small.
    """
    stages = sorted({result.num_stages for result in results})
    with new_figure(width=2.6, height=0.9 + 1.5 * len(stages), columns=3) as figure:
        rows = figure.subplots(len(stages), 3, squeeze=False, sharey="col", width_ratios=(1, 1, 0.75))
        for row, num_stages in zip(rows, stages, strict=True):
            alike = [result for result in results if result.num_stages == num_stages]
            for axes, direction in zip(row, DIRECTIONS, strict=False):
                _draw_projections(axes, alike, direction)
            _draw_variances(row[2], alike)
            row[0].set_ylabel(f"P = {num_stages}\nprojection of the update")
            eigenvalues = (f"{look_of(one.method).label} {one.eigenvalue:.2g}" for one in _shown(alike))
            row[0].set_title(f"{TITLES['dominant']}\n(eigenvalue: {', '.join(eigenvalues)})")
        rows[0, 1].set_title(TITLES["random"])
        rows[0, 2].set_title("variance (hollow: random)")
        for axes in rows[-1][:2]:
            axes.set_xlabel("iterations after the checkpoint")
        handles, labels = rows[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return save(figure, path, _caption(results))


def _shown(results: Sequence[Oscillation]) -> list[Oscillation]:
    """Of each method, the measurement whose projections are drawn."""
    methods = dict.fromkeys(result.method for result in results)
    return [representative([result for result in results if result.method == method]) for method in methods]


def _draw_projections(axes: Axes, results: Sequence[Oscillation], direction: str) -> None:
    for shown in _shown(results):
        look = look_of(shown.method)
        axes.plot(getattr(shown, direction).projections, color=look.color, linewidth=1.0, label=look.label)
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.ticklabel_format(axis="y", scilimits=(-2, 3))


def _draw_variances(axes: Axes, results: Sequence[Oscillation]) -> None:
    """Filled along the dominant eigenvector, hollow along the random one; a bar at the geometric mean of several."""
    methods = list(dict.fromkeys(result.method for result in results))
    for index, method in enumerate(methods):
        look = look_of(method)
        for direction, face in zip(DIRECTIONS, (look.color, "white"), strict=True):
            variances = [getattr(result, direction).variance for result in results if result.method == method]
            position = index + (-0.15 if direction == "dominant" else 0.15)
            axes.plot([position] * len(variances), variances, look.marker, color=look.color, markerfacecolor=face, ms=5)
            mean = geometric_mean(variances)
            if len(variances) > 1:
                axes.hlines(mean, position - 0.12, position + 0.12, color="black", linewidth=1.2)
            axes.annotate(
                f"{mean:.1e}", (position, max(variances)), xytext=(0, 5), textcoords="offset points", ha="center",
                fontsize=6,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.margins(x=0.3, y=0.2)
    axes.set_xticks(range(len(methods)), [look_of(method).label.replace(" ", "\n") for method in methods])
    axes.grid(visible=False, axis="x")


def _caption(results: Sequence[Oscillation]) -> str:
    lines = [
        "Projections of the updates w(t) - w(t - 1), trained on from a checkpoint on the way; of several checkpoints or"
        " seeds of a method the first seed's middle one. Variance: filled along the dominant eigenvector, hollow along"
        " the random direction, a point per checkpoint and seed, a bar and the number: geometric mean."
    ]
    for result in results:
        lines.append(f"{result.run}, iteration {result.iteration}: eigenvalue {result.eigenvalue:.4g}")
        for direction, title in TITLES.items():
            track = getattr(result, direction)
            lines.append(
                f"  {title}: sign changes {track.sign_changes:.0%}, variance {track.variance:.3g}, share of the"
                f" updates' squared norms {track.share:.2g}"
            )
    return "\n".join(lines)
