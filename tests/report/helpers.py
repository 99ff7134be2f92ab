"""Results in compact form with made-up losses, and HTML as a list of elements."""

import json
from html.parser import HTMLParser

import numpy as np

from brx.config.loading import dump_config, preset_with
from brx.paper.scales import delays_of

EVIL_NAME = "<img src=x onerror=alert(1)> & 'co'"
SUMMARY = {
    "status": "finished",
    "device": {"type": "cpu", "name": "x86_64", "threads": 1},
    "data_fingerprint": "f1f2f3",
    "versions": {"brx": "0.1.0", "torch": "2.13.0"},
    "git_commit": "c0ffee",
    "finished_at": "2026-01-02T03:04:05Z",
}


def write_run(folder, final_loss, settings, **summary):
    """A run of `laptop` whose training loss falls from 5 to `final_loss`; its validation loss is 0.1 higher."""
    config = preset_with("laptop", {**settings, **delays_of(settings["pipeline.stages"], 8)})
    iterations = np.arange(1, 1001)
    loss = final_loss + (5.0 - final_loss) * np.exp(-iterations / 50)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    np.savez_compressed(
        folder / "curves.npz",
        iterations=iterations,
        train_loss=loss,
        second_places=[0, 999],
        seconds=[0.0, 120.0],
        val_iterations=iterations[99::100],
        val_loss=loss[99::100] + 0.1,
    )


class Elements(HTMLParser):
    """All elements of a page, each as [tag, attributes, text up to the next tag]."""

    def __init__(self, text):
        super().__init__()
        self.all, self._is_inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.all.append([tag, dict(attributes), ""])
        self._is_inside = True

    def handle_endtag(self, tag):
        self._is_inside = False

    def handle_data(self, data):
        if self._is_inside:
            self.all[-1][2] += data

    def named(self, tag, **wanted):
        """Attributes and text of the elements of a tag that have these attributes (`class_` for class)."""
        pairs = {key.rstrip("_").replace("_", "-"): value for key, value in wanted.items()}
        return [
            (attributes, text)
            for name, attributes, text in self.all
            if name == tag and all(attributes.get(key) == value for key, value in pairs.items())
        ]
