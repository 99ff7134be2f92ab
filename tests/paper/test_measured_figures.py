"""The figures that need no sweep: what `brx plot` draws is what their own commands draw, to the byte."""

from dataclasses import replace

import pytest

from brx.cli.main import main
from brx.curvature.norm_measurement import measure_runs
from brx.curvature.norm_result import STRATEGY_SPACES, NormSettings
from brx.errors import UserError
from brx.paper.figures import FIGURES
from brx.paper.scales import SCALES, VARIANTS
from tests.curvature.helpers import finished_run
from tests.paper.helpers import write_experiment

OWN_COMMANDS = {
    "schedule": ["schedule", "--stages", "4", "--figure"],
    "hessian-norm": ["hessian-norm", "{runs}", "--measured", "--out"],
    "oscillation": ["oscillation", "{runs}", "--measured", "--out"],
    "effective-delay": ["effective-delay", "{runs}", "--out"],
}


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_figure_is_that_of_its_own_command(name, tmp_path):
    arguments = [part.format(runs=SCALES["laptop"].curvature) for part in OWN_COMMANDS[name]]
    (tmp_path / "own").mkdir()
    assert main([*arguments, str(tmp_path / "own" / name)]) == 0
    assert main(["plot", FIGURES[name].place or name, "--out", str(tmp_path / "plot")]) == 0
    for suffix in (".png", ".pdf", ".svg", ".txt"):
        own, drawn = (tmp_path / which / f"{name}{suffix}" for which in ("own", "plot"))
        assert own.read_bytes().replace(b"/own/", b"/plot/") == drawn.read_bytes()


def test_toy_figures_are_drawn_from_the_papers_settings(tmp_path):
    for name, text in (("toy-quadratic", "eigenvalues [20.0, 1.0]"), ("toy-spiral", "20 sin(4 r - theta)")):
        assert main(["plot", name, "--out", str(tmp_path)]) == 0
        assert text in (tmp_path / f"{name}.txt").read_text()


def test_norms_by_strategy_stand_beside_the_slowdowns_of_the_scale_as_far_as_there_are_any(tmp_path):
    (tmp_path / "curvature").mkdir()
    run = finished_run(tmp_path / "curvature", "run")
    scale = replace(SCALES["laptop"], curvature=run.parent, runs=tmp_path / "runs")
    with pytest.raises(UserError, match="no checkpoint was measured in all coordinates"):
        FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)
    measure_runs([run], STRATEGY_SPACES, NormSettings(vectors=4, batches_per_vector=2, basis_batches=3))
    *_, caption = FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)
    assert "slowdown" not in caption.read_text()
    for method in ("pipedream-lr", "basis-rotation"):
        for stages in (1, 32):
            write_experiment(scale.runs, scale.preset, {"pipeline.stages": stages, **VARIANTS[method]})
    text = FIGURES["strategy-norms"].draw_to(tmp_path / "figure", scale)[-1].read_text()
    assert "slowdown at P = 32" in text
    assert "(basis-rotation)" in text
    assert "not run (basis-rotation 1st/bilateral)" in text


def test_what_a_scale_has_measured_of_its_own_runs_is_drawn_into_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(SCALES, "paper", replace(SCALES["paper"], curvature=SCALES["laptop"].curvature.resolve()))
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "oscillation", "--scale", "paper"]) == 0
    assert (tmp_path / "figures" / "paper" / "oscillation.png").is_file()


def test_without_measurements_a_figure_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "laptop", replace(SCALES["laptop"], curvature=tmp_path / "nothing"))
    assert main(["plot", "oscillation", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"brx: figure oscillation: {tmp_path / 'nothing'}: no such folder\n"
