"""The page's script, in a real browser without a network: filters, chart, sorting."""

import json
import shutil
import subprocess

import pytest

from tests.report.helpers import EVIL_NAME, Elements

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium (Debian: apt install chromium)"
)


FRAME = """<iframe id="page" src="{address}" style="width: {width}px; height: 844px; border: 0">
</iframe><pre></pre>
<script>onmessage = (event) => document.querySelector("pre").textContent = event.data;</script>"""
SCRIPT = """
    const all = (selector) => [...document.querySelectorAll(selector)];
    const texts = (selector) => all(selector).map((one) => one.textContent);
    const shown = () => JSON.stringify({
      runs: texts("#run-table tr:not([hidden]) .name"),
      count: texts("output"),
      curves: document.querySelectorAll("g.trace.scatter").length,
      legend: texts("#legend li"),
    });
    (async () => {
      const root = document.documentElement, chart = document.getElementById("chart");
      document.getElementById("runs").scrollIntoView();
      const wait = (ms) => new Promise((go) => setTimeout(go, ms));
      const until = async (isDone) => {
        while (!isDone() && !root.dataset.scriptError) await wait(50);
      };
      await until(() => !chart.hasAttribute("aria-busy"));
      root.dataset.before = shown();
      %s
      await wait(1000);
      root.dataset.after = shown();
    })();
"""


def browse(address, profile):
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--allow-file-access-from-files",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        # Timers leap over idle time, and unpacking takes real time: on a busy machine, a million
        # turns of a loop that waits for it.
        "--virtual-time-budget=50000000",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout


def with_script(page, folder, act):
    """The address of a copy of the page that does something once its chart is there."""
    path = folder / "page.html"
    path.write_text(page.read_text().replace("</body>", f"<script>{SCRIPT % act}</script></body>"))
    return f"file://{path}"


@pytest.fixture
def opened(page, tmp_path):
    """A function that opens a page: what its browser of runs shows before and after some clicks,
    and its elements."""

    def open_page(fragment="", act="", page=page):
        elements = Elements(
            browse(with_script(page, tmp_path, act) + fragment, tmp_path / "profile")
        )
        ((root, _),) = elements.named("html")
        assert "data-script-error" not in root, root["data-script-error"]
        return json.loads(root["data-before"]), json.loads(root["data-after"]), elements

    return open_page


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_window(page, tmp_path, width):
    measure = """
      document.getElementById("figures").scrollIntoView();
      const images = [...document.querySelectorAll("img[data-figure]")];
      const isShown = (image) => image.src.startsWith("blob:");
      await until(() => images.every(isShown));
      const bar = document.querySelector("header");
      const sticky = getComputedStyle(bar).position === "sticky";
      const covered = sticky ? bar.getBoundingClientRect().bottom : 0;
      document.querySelector(".canvas").click();
      const large = document.querySelector("dialog img");
      parent.postMessage(JSON.stringify({
        overflow: document.documentElement.scrollWidth - innerWidth,
        clearance: document.getElementById("figures-heading").getBoundingClientRect().top - covered,
        shown: images.every(isShown),
        large: large.getBoundingClientRect().width,
        across: getComputedStyle(large).getPropertyValue("--panels"),
        tables: [...document.querySelectorAll(".table")]
            .every((table) => table.offsetWidth <= innerWidth),
        error: document.documentElement.dataset.scriptError,
      }), "*");
    """
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(address=with_script(page, tmp_path, measure), width=width))
    ((_, text),) = Elements(browse(f"file://{frame}", tmp_path / "profile")).named("pre")
    found = json.loads(text)
    assert "error" not in found
    assert found["overflow"] <= 0 <= found["clearance"]
    assert found["shown"]
    assert found["tables"]
    assert found["large"] >= 300 * int(found["across"])


def test_address_restores_a_selection(opened):
    restored, *_ = opened("#stages=1&method=pipedream&method=nesterov")
    assert (restored["runs"], restored["curves"]) == (["pipedream-1", EVIL_NAME], 2)


def test_reset_shows_all_runs_sorted(opened):
    act = """
        document.querySelector("#filters button[type=reset]").click();
        [...document.querySelectorAll("#run-table th button")]
            .find((one) => one.textContent === "val loss").click();
    """
    _, everything, _ = opened("#stages=1&method=pipedream&method=nesterov", act)
    assert (everything["count"], everything["curves"]) == (["7 of 7 runs"], 7)
    assert set(everything["runs"][:2]) == {"pipedream-1", "basis-rotation-1"}
    rest = [
        "basis-rotation-32",
        EVIL_NAME,
        "pipedream-32",
        "pipedream-32-worse",
        "pipedream-32-diverged",
    ]
    assert everything["runs"][2:] == rest


def test_opens_with_the_deepest_pipeline(opened):
    first, *_ = opened()
    assert (first["runs"], first["count"]) == (
        ["pipedream-32", "basis-rotation-32"],
        ["2 of 7 runs"],
    )
    assert (first["curves"], first["legend"]) == (2, ["pipedream", "basis-rotation"])


def test_ticked_box_filters(opened):
    act = """
        document.querySelector("input[name=method][value=pipedream]").click();
        document.querySelector("tr:not([hidden]) .name").click();
    """
    _, filtered, elements = opened(act=act)
    assert filtered["runs"] == ["pipedream-32"]
    ((pressed, name),) = elements.named("button", aria_pressed="true")
    assert (name, pressed["title"]) == ("pipedream-32", "pipedream-32")
    (settings,) = [text for _, text in elements.named("pre")]
    assert "like: 32" in settings


def test_own_runs_can_be_browsed_without_figures(opened, own_page):
    shown, *_ = opened(page=own_page, act='document.querySelector(".canvas").click();')
    assert (shown["runs"], shown["curves"]) == (["p2"], 1)
