"""The page for notebook users: its snippets run, one after the other, on committed results."""

import re
from pathlib import Path

import matplotlib as mpl

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
    assert sorted(names["costs"]["method"]) == ["basis-rotation", "pipedream"]
