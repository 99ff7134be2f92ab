"""Results in compact form with made-up losses, and HTML as a list of elements."""

from html.parser import HTMLParser

import numpy as np

from brx.config.loading import preset_with
from brx.paper.scales import depth_settings
from tests.paper.helpers import write_compact

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
    """A run of `laptop` whose training loss falls from 5 to `final_loss`; its validation loss is
    0.1 higher."""
    config = preset_with("laptop", {**settings, **depth_settings(settings["pipeline.stages"], 8)})
    loss = final_loss + (5.0 - final_loss) * np.exp(-np.arange(1, 1001) / 50)
    val_losses = {t: loss[t - 1] + 0.1 for t in range(100, 1001, 100)}
    write_compact(folder, config, loss, val_losses, 120.0, {**SUMMARY, **summary})


class Elements(HTMLParser):
    """All elements of a page, each as [tag, attributes, text up to the next tag]."""

    def __init__(self, text):
        super().__init__()
        self.all = []
        self._is_inside = False
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
        """The attributes and text of all elements with this tag and these attributes (`class_` for
        class, `data_name` for data-name)."""
        pairs = {key.rstrip("_").replace("_", "-"): value for key, value in wanted.items()}
        return [
            (attributes, text)
            for name, attributes, text in self.all
            if name == tag and all(attributes.get(key) == value for key, value in pairs.items())
        ]
