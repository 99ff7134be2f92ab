"""The page for notebook users: its snippets run, one after the other, on committed results."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest

from brx.runs.slowdown import iterations_to_target

ROOT = Path(__file__).parents[2]


def test_the_snippets_run_and_say_what_they_promise(monkeypatch):
    monkeypatch.chdir(ROOT)
    mpl.use("Agg")
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippets) == 5
    names = {}
    for snippet in snippets:
        exec(snippet, names)
    assert len(snippets[0].splitlines()) <= 5
    assert names["question"].shape == (2, 2)
    assert len(names["axes"].lines) == 4
    (cost,) = names["costs"][names["costs"]["method"] == "pipedream"].to_dict("records")
    runs, passages = names["runs"], {}
    for run, losses in names["curves"].groupby("run"):
        if runs.at[run, "method"] == "pipedream":
            series = losses["iteration"].to_numpy(), losses["train_loss"].to_numpy()
            passages[runs.at[run, "pipeline.stages"]] = iterations_to_target(*series, cost["target"])
    assert cost["ratio"] == pytest.approx(passages[8] / passages[1])
