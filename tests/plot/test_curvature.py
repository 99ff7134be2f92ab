"""Figures of made-up norms, effective delays and oscillations: means over seeds, titles, labels."""

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
    draw_profiles,
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
    """The figures that would have been saved, each with its details as a text."""
    saved = []

    def save(figure, path, caption, *, details, **others):
        saved.append((figure, str(details)))
        return []

    monkeypatch.setattr("brx.plot.curvature.save", save)
    return saved


@pytest.fixture
def norms(drawn, tmp_path):
    """Results of several methods, depths and seeds, their panel, and its details."""
    results = []
    for seed in range(3):
        results += [norm(seed, 2.0 + seed, stages=1), norm(seed, 2.0 + seed, stages=4)]
    results += [norm(0, 1.0, "rotated", "basis-rotation"), norm(0, 3.0, method="basis-rotation")]
    draw_norms(results, tmp_path / "figure")
    [(figure, details)] = drawn
    (axes,) = figure.axes
    return results, axes, details


def points_of(axes):
    """The points (x, y) that have error bars."""
    return [tuple(bar.lines[0].get_xydata()[0]) for bar in axes.containers]


def test_method_at_a_depth_has_one_tick(norms):
    _, axes, _ = norms
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["PipeDream\nP = 1", "PipeDream\nP = 4", "Basis rotation\nP = 4"]


def test_no_point_covers_another(norms):
    results, axes, _ = norms
    assert len({x for x, _ in points_of(axes)}) == len(results)


def test_points_are_norms_per_parameter(norms):
    results, axes, _ = norms
    expected = sorted(result.normalized for result in results)
    assert sorted(y for _, y in points_of(axes)) == pytest.approx(expected)


def test_details_have_every_seed(norms):
    _, _, details = norms
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


@pytest.fixture
def strategies(drawn, tmp_path):
    """The lines of a method with two seeds and of one with a single seed, and the results of the
    latter."""
    several = []
    for space in STRATEGY_SPACES:
        several += [norm(0, 1.0, space), norm(1, 4.0, space)]
    single = [norm(0, 1.0, space, stages=1) for space in STRATEGY_SPACES]
    draw_strategy_norms([*several, *single], None, tmp_path / "figure")
    [(figure, _)] = drawn
    return (*figure.axes[0].containers, single)


def ends_of_bars(line):
    """Low and high ends (points, 2) of a line's error bars."""
    _, _, (bars,) = line.lines
    return np.array(bars.get_segments())[:, :, 1]


def test_strategy_is_the_geometric_mean(strategies):
    several, _, _ = strategies
    assert list(several.lines[0].get_ydata()) == pytest.approx([2.0] * 5)


def test_bars_are_the_range_over_seeds(strategies):
    several, _, _ = strategies
    assert ends_of_bars(several) == pytest.approx(np.array([[1.0, 4.0]] * 5))


def test_bar_of_one_seed_is_its_interval(strategies):
    _, single, results = strategies
    assert ends_of_bars(single)[0] == pytest.approx(results[0].interval)


@pytest.fixture
def delays_by_seed():
    """Two seeds: all curvature is in the first stage, or in the last."""
    results = [norm(0, 1.0, squares=(0, 5, 0, 0, 0, 0)), norm(1, 1.0, squares=(0, 0, 0, 0, 2, 3))]
    curves = []
    for result in results:
        curves.append((result, [effective_delay(result, stages) for stages in (1, 2, 4)]))
    return curves


POINT = {
    **dict.fromkeys(("tau", "error", "norm", "product", "lr"), 2.0),
    **{"method": "pipedream", "profile": "4 x 8"},
    **{"ratio": 3.0, "low": 2.5, "high": 4.0, "is_censored": False},
}


def test_effective_delay_is_a_mean_over_seeds(drawn, delays_by_seed, tmp_path):
    draw_effective_delay(delays_by_seed, pd.DataFrame(), tmp_path / "figure")
    [(figure, _)] = drawn
    (bars,) = figure.axes[0].containers
    assert bars.lines[0].get_xydata().tolist() == [[2, 0.5], [4, 0.5]]


def test_slowdown_is_drawn_against_effective_delay(drawn, delays_by_seed, tmp_path):
    draw_effective_delay(delays_by_seed, pd.DataFrame([POINT] * 3), tmp_path / "figure")
    [(figure, _)] = drawn
    assert figure.axes[1].containers[0].lines[0].get_xydata().tolist() == [[2.0, 3.0]]


def test_one_slowdown_has_no_panel(drawn, delays_by_seed, tmp_path):
    draw_effective_delay(delays_by_seed, pd.DataFrame([POINT]), tmp_path / "figure")
    [(figure, _)] = drawn
    assert len(figure.axes) == 1


def test_profile_is_in_the_legend_as_it_is_written(drawn, tmp_path):
    """matplotlib hides labels that begin with `_`, and reads `$a$` as mathematics."""
    draw_profiles(pd.DataFrame([POINT | {"profile": "_$a$.py:delays"}]), tmp_path / "figure")
    [(figure, _)] = drawn
    (legend,) = figure.legends
    assert legend.texts[0].get_text().replace(r"\$", "$").strip() == "_$a$.py:delays"


@pytest.fixture
def oscillation(drawn, tmp_path):
    """The figure of PipeDream at P = 1 and basis rotation at P = 4."""
    track = Track.of([1.0, -1.0], total=1.0)
    results = []
    for method, num_stages in (("pipedream", 1), ("basis-rotation", 4)):
        result = Oscillation(
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
        results.append(result)
    draw_oscillation(results, tmp_path / "figure")
    [(figure, _)] = drawn
    return figure


def test_updates_are_counted_from_one(oscillation):
    assert oscillation.axes[0].lines[0].get_xdata().tolist() == [1, 2]


def test_legend_has_the_methods_of_all_rows(oscillation):
    (legend,) = oscillation.legends
    assert [text.get_text() for text in legend.texts] == ["PipeDream", "Basis rotation"]
