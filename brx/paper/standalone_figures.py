"""The paper's figures that need no sweep: pipelines over time, the toys, and what was measured of the Hessian.

Each is what a command of its own draws (`brx schedule`, `brx toy`, ...), at the paper's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from brx.config import load_yaml_as
from brx.config.loading import PRESETS
from brx.curvature.effective_delay import effective_delay, slowdown_points, usual_stages
from brx.curvature.norm_result import measured_norms
from brx.curvature.oscillation import measured_oscillations
from brx.paper.scales import CURVATURE
from brx.paper.toy.figures import draw_quadratic, draw_spiral
from brx.paper.toy.quadratic import QuadraticConfig, run_quadratic
from brx.paper.toy.spiral import SpiralConfig, run_spiral
from brx.plot.curvature import draw_effective_delay, draw_norms
from brx.plot.oscillation import draw_oscillation
from brx.plot.schedule import draw_schedules
from brx.runs.frames import find_runs, load

DrawTo = Callable[[Path], list[Path]]


@dataclass(frozen=True)
class StandaloneFigure:
    """One figure.

    Attributes:
        name: on the command line and of the files.
        label: in the paper's source; empty where the paper has only a sentence.
        caption: what it shows.
        draw: draws it at a path without suffix; the files written.
    """

    name: str
    label: str
    caption: str
    draw: DrawTo


def _schedule(path: Path) -> list[Path]:
    return draw_schedules(4, 4, path)


def _toy_quadratic(path: Path) -> list[Path]:
    return draw_quadratic(run_quadratic(load_yaml_as(PRESETS / "toy" / "quadratic.yaml", QuadraticConfig)), path)


def _toy_spiral(path: Path) -> list[Path]:
    return draw_spiral(run_spiral(load_yaml_as(PRESETS / "toy" / "spiral.yaml", SpiralConfig)), path)


def _oscillation(path: Path) -> list[Path]:
    folders = [folder for folder in find_runs([CURVATURE]) if any((folder / "analysis").glob("oscillation-*.json"))]
    oscillations = [oscillation for folder in folders for oscillation in measured_oscillations(folder)]
    depths = [oscillation.num_stages for oscillation in oscillations]
    ends = {min(depths), max(depths)}
    return draw_oscillation([oscillation for oscillation in oscillations if oscillation.num_stages in ends], path)


def _hessian_norm(path: Path) -> list[Path]:
    return draw_norms(measured_norms(find_runs([CURVATURE])), path)


def _effective_delay(path: Path) -> list[Path]:
    folders = find_runs([CURVATURE])
    measured = measured_norms(folders)
    stages = usual_stages(measured)
    curves = [(result, [effective_delay(result, count) for count in stages]) for result in measured]
    return draw_effective_delay(curves, slowdown_points(load(folders)), path)


STANDALONE = {
    figure.name: figure
    for figure in (
        StandaloneFigure("schedule", "fig:bg", "Synchronous and asynchronous pipelines, and the delay.", _schedule),
        StandaloneFigure("toy-quadratic", "fig:quadratic", "Delay on a quadratic, aligned or not.", _toy_quadratic),
        StandaloneFigure("toy-spiral", "fig:toy-example", "Delay in a valley that turns.", _toy_spiral),
        StandaloneFigure(
            "oscillation",
            "fig:result-main-oscillation",
            "Updates along the Hessian's dominant eigenvector.",
            _oscillation,
        ),
        StandaloneFigure("hessian-norm", "", "Norm of the Hessian in original and rotated coordinates.", _hessian_norm),
        StandaloneFigure("effective-delay", "", "The effective delay, and the slowdown.", _effective_delay),
    )
}
