"""`brx toy`: figures, numbers, and mistakes."""

import json

import pytest

from brx.cli.main import main
from brx.config.loading import PRESETS, read_mapping


def write(path, landscape, **changes):
    content = read_mapping(PRESETS / "toy" / f"{landscape}.yaml") | changes
    path.write_text("\n".join(f"{key}: {value}" for key, value in content.items()))
    return str(path)


def test_quadratic(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path / "mine.yaml", "quadratic", other_starts=2)
    assert main(["toy", "quadratic", config]) == 0
    shown = capsys.readouterr().out
    assert "Adam, aligned: 14 updates, with delay 14 updates, slowdown 1.00" in shown
    for suffix in (".png", ".pdf", ".txt"):
        assert (tmp_path / "figures" / f"toy-mine{suffix}").stat().st_size > 0
    numbers = json.loads((tmp_path / "results" / "toy" / "mine.json").read_text())
    assert len(numbers["runs"]) == 8
    assert numbers["config"]["beta2"] == 0.1


def test_spiral(tmp_path, capsys):
    changes = {"start_radius": 1.4, "end_radius": 1.3, "measurements": 20}
    config = write(tmp_path / "mine.yaml", "spiral-small-steps", **changes)
    where = ["--out", str(tmp_path / "a" / "figure"), "--json", str(tmp_path / "b" / "numbers.json")]
    assert main(["toy", "spiral", config, *where]) == 0
    assert "Spearman correlation" in capsys.readouterr().out
    assert (tmp_path / "a" / "figure.png").stat().st_size > 0
    numbers = json.loads((tmp_path / "b" / "numbers.json").read_text())
    assert len(numbers["angles"]) == len(numbers["updates_with_delay"]) == 20


@pytest.mark.parametrize(
    ("landscape", "changes", "expected"),
    [
        ("quadratic", {"eigenvalues": [1.0]}, "eigenvalues: "),
        ("quadratic", {"start": [0.0, 0.0]}, "start: the loss there, 0, must be above the target"),
        ("spiral", {"delay": 0}, "delay: input should be greater than or equal to 1, got 0"),
        ("sweep", {"delays": "[0]"}, "delays.0: input should be greater than or equal to 1, got 0"),
        ("sweep", {"distance": 1.0}, "distance: the loss there, 0.5, must be above the target, 15"),
        ("spiral", {"most_updates": 5}, "most_updates: must be at least 20"),
    ],
)
def test_mistakes_exit_2_with_one_line(landscape, changes, expected, tmp_path, capsys):
    config = write(tmp_path / "wrong.yaml", landscape, **changes)
    assert main(["toy", landscape, config]) == 2
    error = capsys.readouterr().err
    assert f"{config}: " in error
    assert expected in error
    assert error.count("\n") == 1


def test_sweep(tmp_path, capsys):
    changes = {"starts": 5, "angles_degrees": "[0, 30, 45]", "delays": "[1, 2]", "most_updates": 200}
    config = write(tmp_path / "mine.yaml", "sweep", **changes)
    where = ["--out", str(tmp_path / "figure"), "--json", str(tmp_path / "numbers.json")]
    assert main(["toy", "sweep", config, *where]) == 0
    assert "Spearman's correlation of slowdown and (1,1)-norm over the angles" in capsys.readouterr().out
    assert (tmp_path / "figure.png").stat().st_size > 0
    assert len(json.loads((tmp_path / "numbers.json").read_text())["sweeps"]) == 4
