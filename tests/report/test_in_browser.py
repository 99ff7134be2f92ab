"""The page's script, in a real browser without a network: filters, chart, sorting."""

import json
import shutil
import subprocess

import pytest

from tests.report.helpers import EVIL_NAME, Elements

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt install chromium)")


FRAME = """<iframe id="page" src="{address}" style="width: {width}px; height: 844px; border: 0"></iframe><pre></pre>
<script>onmessage = (event) => document.querySelector("pre").textContent = event.data;</script>"""
WAIT = """
    (async () => {
      const chart = document.getElementById("chart");
      document.getElementById("runs").scrollIntoView();
      while (chart.hasAttribute("aria-busy") && !document.documentElement.dataset.scriptError) {
        await new Promise((go) => setTimeout(go, 50));
      }
      %s
      await new Promise((go) => setTimeout(go, 300));
      document.documentElement.dataset.ready = "yes";
    })();
"""


def browse(address, profile):
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--allow-file-access-from-files",
        f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=300000", "--dump-dom", address,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.fixture
def opened(page, tmp_path):
    """A function that opens the page in the browser, goes to the runs, and gives its elements after the scripts."""

    def open_page(fragment="", then=""):
        path = tmp_path / "page.html"
        path.write_text(page.read_text().replace("</body>", f"<script>{WAIT % then}</script></body>"))
        found = Elements(browse(f"file://{path}{fragment}", tmp_path / "profile"))
        ((root, _),) = found.named("html")
        assert "data-script-error" not in root, root["data-script-error"]
        assert root["data-ready"] == "yes"
        return found

    return open_page


@pytest.mark.parametrize("width", [390, 1280])
def test_at_both_widths_nothing_is_wider_than_the_page_and_headings_clear_the_bar(page, tmp_path, width):
    measure = """
      document.getElementById("figures").scrollIntoView();
      const images = [...document.querySelectorAll("img[data-figure]")];
      const isShown = (image) => image.src.startsWith("blob:");
      for (let tries = 0; tries < 1000 && !images.every(isShown); tries++) {
        await new Promise((go) => setTimeout(go, 50));
      }
      const bar = document.querySelector("header");
      const covered = getComputedStyle(bar).position === "sticky" ? bar.getBoundingClientRect().bottom : 0;
      document.querySelector(".canvas").click();
      const large = document.querySelector("dialog img");
      parent.postMessage(JSON.stringify({
        overflow: document.documentElement.scrollWidth - innerWidth,
        clearance: document.getElementById("figures-heading").getBoundingClientRect().top - covered,
        shown: images.every(isShown),
        large: large.getBoundingClientRect().width,
        across: getComputedStyle(large).getPropertyValue("--panels"),
        tables: [...document.querySelectorAll(".table")].every((table) => table.offsetWidth <= innerWidth),
        error: document.documentElement.dataset.scriptError,
      }), "*");
    """
    (tmp_path / "page.html").write_text(
        page.read_text().replace("</body>", f"<script>{WAIT % measure}</script></body>")
    )
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(address=f"file://{tmp_path / 'page.html'}", width=width))
    ((_, text),) = Elements(browse(f"file://{frame}", tmp_path / "profile")).named("pre")
    found = json.loads(text)
    assert "error" not in found
    assert found["overflow"] <= 0
    assert found["clearance"] >= 0
    assert found["shown"]
    assert found["tables"]
    assert found["large"] >= 300 * int(found["across"])


def shown_runs(elements):
    """The names in the rows that are not hidden, in their order."""
    names, hidden = [], True
    for tag, attributes, text in elements.all:
        if tag == "tr" and "data-run" in attributes:
            hidden = "hidden" in attributes
        elif tag == "button" and attributes.get("class") == "name" and not hidden:
            names.append(text)
    return names


def test_the_address_restores_a_selection_and_all_runs_can_be_shown_and_sorted(opened):
    click = """
        document.documentElement.dataset.restored = JSON.stringify({
          runs: [...document.querySelectorAll("#run-table tr:not([hidden]) .name")].map((one) => one.textContent),
          curves: document.querySelectorAll("g.trace.scatter").length,
        });
        document.querySelector("#filters button[type=reset]").click();
        [...document.querySelectorAll("#run-table th button")].find((one) => one.textContent === "val loss").click();
    """
    elements = opened("#stages=1&method=pipedream&method=nesterov", click)
    ((root, _),) = elements.named("html")
    assert json.loads(root["data-restored"]) == {"runs": ["pipedream-1", EVIL_NAME], "curves": 2}
    assert [text for _, text in elements.named("output")] == ["7 of 7 runs"]
    assert sum("trace scatter" in (attributes.get("class") or "") for attributes, _ in elements.named("g")) == 7
    names = shown_runs(elements)
    assert set(names[:2]) == {"pipedream-1", "basis-rotation-1"}
    assert names[2:] == [
        "basis-rotation-32", EVIL_NAME, "pipedream-32", "pipedream-32-worse", "pipedream-32-diverged",
    ]  # fmt: skip


def test_opens_with_the_deepest_pipeline_at_the_chosen_rates_and_a_ticked_box_filters(opened):
    act = """
        const texts = (selector) => [...document.querySelectorAll(selector)].map((one) => one.textContent);
        document.documentElement.dataset.opened = JSON.stringify({
          runs: texts("#run-table tr:not([hidden]) .name"),
          count: texts("output"),
          curves: document.querySelectorAll("g.trace.scatter").length,
          legend: texts("#legend li"),
        });
        document.querySelector("input[name=method][value=pipedream]").click();
        document.querySelector("tr:not([hidden]) .name").click();
    """
    elements = opened(then=act)
    ((root, _),) = elements.named("html")
    assert json.loads(root["data-opened"]) == {
        "runs": ["pipedream-32", "basis-rotation-32"],
        "count": ["2 of 7 runs"],
        "curves": 2,
        "legend": ["pipedream", "basis-rotation"],
    }
    assert shown_runs(elements) == ["pipedream-32"]
    ((pressed, name),) = elements.named("button", aria_pressed="true")
    assert (name, pressed["title"]) == ("pipedream-32", "pipedream-32")
    (settings,) = [text for _, text in elements.named("pre")]
    assert "like: 32" in settings
