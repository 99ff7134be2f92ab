"""`brx toy`: figures, numbers, and mistakes."""

import json

import pytest

from brx.config.loading import PRESETS, read_mapping


def write(path, landscape, **changes):
    content = read_mapping(PRESETS / "toy" / f"{landscape}.yaml") | changes
    path.write_text("\n".join(f"{key}: {value}" for key, value in content.items()))
    return str(path)


SPIRAL = {"start_radius": 1.4, "end_radius": 1.3, "measurements": 20}
SWEEP = {"starts": 5, "angles_degrees": "[0, 30, 45]", "delays": "[1, 2]", "most_updates": 200}


@pytest.mark.parametrize(
    ("preset", "changes", "shown", "lengths"),
    [
        (
            "quadratic",
            {"other_starts": 2},
            "Adam, aligned: 14 updates, with delay 14 updates",
            {"runs": 8},
        ),
        (
            "spiral-small-steps",
            SPIRAL,
            "Spearman correlation",
            {"angles": 20, "updates_with_delay": 20},
        ),
        (
            "sweep",
            SWEEP,
            "Spearman's correlation of slowdown and (1,1)-norm over the angles",
            {"sweeps": 4},
        ),
    ],
    ids=["quadratic", "spiral", "sweep"],
)
def test_toy_prints_what_it_draws(preset, changes, shown, lengths, tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path / "mine.yaml", preset, **changes)
    folders = ("figures", "results/toy") if preset == "quadratic" else ("a", "b")
    where = [] if preset == "quadratic" else ["--out", "a/toy-mine", "--json", "b/mine.json"]
    assert shown in printed("toy", preset.partition("-")[0], config, *where)
    assert all(
        (tmp_path / folders[0] / f"toy-mine{suffix}").stat().st_size
        for suffix in (".png", ".pdf", ".txt")
    )
    numbers = json.loads((tmp_path / folders[1] / "mine.json").read_text())
    assert {key: len(numbers[key]) for key in lengths} == lengths


@pytest.mark.parametrize(
    ("landscape", "changes", "expected"),
    [
        ("quadratic", {"eigenvalues": [1.0]}, "eigenvalues: "),
        ("quadratic", {"start": [0.0, 0.0]}, "start: the loss there, 0, must be above the target"),
        ("spiral", {"delay": 0}, "delay: input should be greater than or equal to 1, got 0"),
        ("sweep", {"distance": 1.0}, "distance: the loss there, 0.5, must be above the target, 15"),
        ("spiral", {"most_updates": 5}, "most_updates: must be at least 20"),
        ("spiral", {"lr": 1e200}, "lr: with 1e+200, points or gradients become too large"),
        ("quadratic", {"lr": 1e200}, "lr: with 1e+200, points or gradients become too large"),
    ],
)
def test_mistake_names_file_with_key(landscape, changes, expected, tmp_path, refused):
    config = write(tmp_path / "wrong.yaml", landscape, **changes)
    assert f"{config}: {expected}" in refused("toy", landscape, config)
