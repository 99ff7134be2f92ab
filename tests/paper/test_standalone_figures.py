"""The figures that need no sweep: what `brx plot` draws is what their own commands draw, to the byte."""

import pytest

from brx.cli.main import main
from brx.paper import standalone_figures as standalone
from brx.paper.standalone_figures import STANDALONE

OWN_COMMANDS = {
    "schedule": ["schedule", "--stages", "4", "--figure"],
    "hessian-norm": ["hessian-norm", "{runs}", "--measured", "--out"],
    "oscillation": ["oscillation", "{ends}", "--measured", "--out"],
    "effective-delay": ["effective-delay", "{runs}", "--out"],
}
CURVATURE = standalone.CURVATURE


@pytest.mark.parametrize("name", OWN_COMMANDS)
def test_figure_is_that_of_its_own_command(name, tmp_path):
    places = {"{runs}": sorted(CURVATURE.glob("*-p?")), "{ends}": sorted(CURVATURE.glob("*-p[18]"))}
    arguments = [str(path) for part in OWN_COMMANDS[name] for path in places.get(part, [part])]
    (tmp_path / "own").mkdir()
    assert main([*arguments, str(tmp_path / "own" / name)]) == 0
    assert main(["plot", STANDALONE[name].label or name, "--out", str(tmp_path / "plot")]) == 0
    for suffix in (".png", ".pdf", ".txt"):
        own, drawn = (tmp_path / which / f"{name}{suffix}" for which in ("own", "plot"))
        assert own.read_bytes().replace(b"/own/", b"/plot/") == drawn.read_bytes()


def test_toy_figures_are_drawn_from_the_papers_settings(tmp_path):
    for name, text in (("toy-quadratic", "eigenvalues [20.0, 1.0]"), ("toy-spiral", "20 sin(4 r - theta)")):
        assert main(["plot", name, "--out", str(tmp_path)]) == 0
        assert text in (tmp_path / f"{name}.txt").read_text()


def test_without_measurements_a_figure_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(standalone, "CURVATURE", tmp_path / "nothing")
    assert main(["plot", "oscillation", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"brx: {tmp_path / 'nothing'}: no such folder\n"
