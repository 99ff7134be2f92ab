"""Figures of norms, from made-up ones: what is drawn of several seeds."""

import numpy as np
import pandas as pd
import pytest

from brx.curvature.effective_delay import effective_delay
from brx.curvature.norm_result import STRATEGY_SPACES
from brx.curvature.oscillation import Oscillation, Track
from brx.plot.curvature import (
    draw_effective_delay,
    draw_norms,
    draw_oscillation,
    draw_strategy_norms,
    profile_words,
)
from tests.curvature.helpers import norm_result


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("0 x 4, 8 x 4", "8 in stages 5 to 8"),
        ("4 x 8", "4 in stages 1 to 8"),
        ("0 x 3, 32, 0 x 4", "32 in stage 4"),
        ("32, 0 x 7", "32 in stage 1"),
        ("8 x 2, 0, 4", "8 in stages 1 to 2, 4 in stage 4"),
        ("31, 27, 22, 18", "31, 27, 22, 18"),
        ("delays.py:jitter", "delays.py:jitter"),
    ],
)
def test_profiles_in_words(profile, words):
    assert profile_words(profile) == words


def norm(seed, value, space="original", method="pipedream", stages=4, squares=(1.0,) * 6):
    """A measurement of a model of four blocks and as many parameters as groups, with an error of a
    tenth."""
    run = f"{method}-p{stages}-s{seed}"
    return norm_result(
        run, method, stages, 10, space, 6, 6 * value, squares, standard_error=0.6 * value
    )


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been saved, and what stands beside them."""
    saved = []
    draw = "brx.plot.curvature.save"
    monkeypatch.setattr(
        draw, lambda figure, _, caption, **rest: saved.append((figure, str(rest["details"]))) or []
    )
    return saved


def test_seeds_of_one_method_and_depth_stand_side_by_side(drawn, tmp_path):
    results = [norm(seed, 2.0 + seed, stages=stages) for seed in range(3) for stages in (1, 4)]
    results += [norm(0, 1.0, "rotated", "basis-rotation"), norm(0, 3.0, method="basis-rotation")]
    draw_norms(results, tmp_path / "figure")
    [(figure, details)] = drawn
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["PipeDream\nP = 1", "PipeDream\nP = 4", "Basis rotation\nP = 4"]
    drawn_at = [tuple(bar.lines[0].get_xydata()[0]) for bar in axes.containers]
    assert len({x for x, _ in drawn_at}) == len(results)  # none over another
    assert sorted(y for _, y in drawn_at) == pytest.approx(
        sorted(result.normalized for result in results)
    )
    assert details.count("pipedream-p1-s") == 3


def test_title_of_norms_is_the_share_left(drawn, tmp_path):
    """Geometric means over two seeds: 0.1 and 0.4 give 0.2; then one method alone, and a range."""
    shares = {"basis-rotation": (0.1, 0.4), "soap": (0.5, 0.5)}
    results = {}
    for method, of_method in shares.items():
        results[method] = []
        for seed, share in enumerate(of_method):
            results[method] += [norm(seed, 3.0, method=method)]
            results[method] += [norm(seed, 3.0 * share, "rotated", method)]
    draw_norms(results["basis-rotation"], tmp_path / "figure")
    draw_norms([*results["basis-rotation"], *results["soap"]], tmp_path / "figure")
    titles = [figure.axes[0].get_title() for figure, _ in drawn]
    assert titles == [
        "rotation leaves 0.20 of the norm",
        "rotation leaves 0.20 to 0.50 of the norm",
    ]


def test_strategies_are_means_and_ranges_over_seeds(drawn, tmp_path):
    results = [
        norm(seed, value, space)
        for seed, value in enumerate((1.0, 4.0))
        for space in STRATEGY_SPACES
    ]
    alone = [norm(0, 1.0, space, stages=1) for space in STRATEGY_SPACES]
    draw_strategy_norms([*results, *alone], None, tmp_path / "figure")
    several, single = drawn[0][0].axes[0].containers
    assert list(several.lines[0].get_ydata()) == pytest.approx([2.0] * 5)
    _, _, (bars,) = several.lines
    assert np.array(bars.get_segments())[:, :, 1] == pytest.approx(np.array([[1.0, 4.0]] * 5))
    _, _, (bars,) = single.lines
    assert np.array(bars.get_segments())[0, :, 1] == pytest.approx(alone[0].interval)


def test_effective_delays_are_means_over_seeds(drawn, tmp_path):
    by_seed = [norm(0, 1.0, squares=(0, 5, 0, 0, 0, 0)), norm(1, 1.0, squares=(0, 0, 0, 0, 2, 3))]
    curves = [
        (result, [effective_delay(result, stages) for stages in (1, 2, 4)]) for result in by_seed
    ]
    point = dict.fromkeys(("tau", "error", "norm", "product", "lr"), 2.0) | {
        "method": "pipedream",
        "profile": "4 x 8",
    }
    point |= {"ratio": 3.0, "low": 2.5, "high": 4.0, "is_censored": False}
    draw_effective_delay(curves, pd.DataFrame([point] * 3), tmp_path / "figure")
    draw_effective_delay(curves, pd.DataFrame([point]), tmp_path / "figure")
    [(figure, _), (of_one_point, _)] = drawn
    assert figure.axes[1].containers[0].lines[0].get_xydata().tolist() == [[2.0, 3.0]]
    assert len(of_one_point.axes) == 1  # which shows nothing against tau'
    # One curve of both seeds: all curvature in the first stage, or in the last.
    (bars,) = figure.axes[0].containers
    assert bars.lines[0].get_xydata().tolist() == [[2, 0.5], [4, 0.5]]


@pytest.fixture
def oscillation(drawn, tmp_path):
    """The figure of PipeDream at P = 1 and basis rotation at P = 4."""
    track = Track.of([1.0, -1.0], total=1.0)
    results = [
        Oscillation(
            run="a",
            iteration=9,
            method=method,
            num_stages=num_stages,
            eigenvalue=1.0,
            residual=0.0,
            num_power_iterations=1,
            dominant=track,
            random=track,
        )
        for method, num_stages in (("pipedream", 1), ("basis-rotation", 4))
    ]
    draw_oscillation(results, tmp_path / "figure")
    [(figure, _)] = drawn
    return figure


def test_updates_are_counted_from_one(oscillation):
    assert oscillation.axes[0].lines[0].get_xdata().tolist() == [1, 2]


def test_legend_has_the_methods_of_all_rows(oscillation):
    (legend,) = oscillation.legends
    assert [text.get_text() for text in legend.texts] == ["PipeDream", "Basis rotation"]
