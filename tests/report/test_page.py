"""The page's content: all runs, figures, tables and sources, and nothing that would be loaded from
elsewhere."""

import base64
import gzip
import json
import re
import sys

import pytest

from brx.cli.main import main
from brx.errors import UserError
from brx.paper.figures import FIGURES
from brx.paper.paper_figure import draw_paper_figure
from brx.paper.scales import SCALES, Experiments
from brx.paper.tables import TABLES
from brx.plot.style import look_of, method_colors
from brx.report.page import (
    _text,
    facets_of,
    other_drawings,
    page_tables,
    paper_drawings,
    run_entries,
)
from tests.report.helpers import EVIL_NAME, Elements, write_run


@pytest.fixture(scope="module")
def elements(page):
    return Elements(page.read_text())


@pytest.fixture(scope="module")
def run_data(elements):
    packed = {
        name: elements.named("script", id=f"packed-{name}")
        for name in ("runs", "facets", "figures")
    }
    return {
        name: json.loads(gzip.decompress(base64.b64decode(text)))
        for name, ((_, text),) in packed.items()
    }


@pytest.fixture(scope="module")
def by_name(run_data):
    """The runs of the page's chart, by name."""
    return {run["name"]: run for run in run_data["runs"]}


def test_table_has_every_run(elements, runs):
    names = sorted(path.name for path in runs.iterdir())
    assert sorted(text for _, text in elements.named("button", class_="name")) == names


def test_chart_has_every_run(by_name, runs):
    assert sorted(by_name) == sorted(path.name for path in runs.iterdir())


def test_best_rates_are_marked(by_name):
    unchosen = {name for name, run in by_name.items() if not run["is_chosen"]}
    assert unchosen == {"pipedream-32-worse", "pipedream-32-diverged"}


def test_curves_are_thinned_to_their_ends(by_name):
    curves = by_name["basis-rotation-32"]["curves"]
    assert len(curves["train"]) == len(curves["iterations"]) == len(curves["minutes"]) == 120
    # Middles of windows of 159 iterations.
    assert (curves["iterations"][0], curves["iterations"][-1], curves["minutes"][-1]) == (
        80,
        921,
        1.842,
    )
    assert curves["val_iterations"] == list(range(100, 1001, 100))
    assert [curves["train"][-1], curves["val"][-1]] == pytest.approx([2.1, 2.2], abs=1e-3)


def test_diverged_run_has_no_numbers(by_name):
    diverged = by_name["pipedream-32-diverged"]
    assert set(diverged["curves"]["train"]) == {None}
    assert (diverged["status"], diverged["numbers"]["train loss"]) == ("diverged", "-")


def test_each_filter_offers_the_values_that_occur(elements):
    boxes = [attributes for attributes, _ in elements.named("input", type="checkbox")]
    for name, values in (
        ("method", ["pipedream", "nesterov", "basis-rotation"]),
        ("stages", ["1", "32"]),
        ("lr", ["0.0003", "0.001", "0.01"]),
        ("seed", ["0", "3"]),
        ("data", ["f1f2f3, version 1"]),
    ):
        assert [box["value"] for box in boxes if box["name"] == name] == values


def test_figures_with_runs_are_there(elements, run_data):
    assert {attributes["id"] for attributes, _ in elements.named("figure")} == {
        "figure-teaser",
        "figure-validation",
    }
    assert set(run_data["figures"]) == {"teaser", "validation"}


def test_first_figure_is_seen_at_once(elements):
    ((teaser, _),) = [
        image for image in elements.named("img") if "src" in image[0]
    ]  # the others when they are seen
    assert teaser["src"].startswith("data:image/svg+xml;base64,")


def test_figure_without_runs_is_named(elements):
    (missing,) = [text for _, text in elements.named("li") if text.startswith("figure width: ")]
    assert "brx sweep configs/sweeps/laptop/width.yaml" in missing


def test_images_have_a_description(elements):
    assert all(attributes["alt"] for attributes, _ in elements.named("img"))


def test_claims_without_runs_are_counted(elements):
    assert any(text.endswith(" not tried") for _, text in elements.named("summary"))


def test_findings_have_both_numbers(elements):
    findings = " ".join(" ".join(text.split()) for _, text in elements.named("li"))
    assert "The paper: 7.5%; here: 7.1% (of 4mn" in findings
    assert re.search(
        r"\(Figure 2a\)\. The paper: 5\.81x; here: 12\.\d+x \([^()]+\); why: one seed\.", findings
    )


def test_page_opens_with_findings(elements):
    sections = [attributes["id"] for attributes, _ in elements.named("section")]
    assert sections == ["findings", "figures", "tables", "runs", "provenance"]


def test_page_can_be_sent_by_mail(page):
    assert page.stat().st_size < 3_000_000


def test_tables_of_experiments_are_there(elements):
    titles = [text for _, text in elements.named("caption")]
    for beginning in (
        "Final training loss",
        "Slowdown of every experiment",
        "Learning rates of every experiment",
    ):
        assert any(title.startswith(beginning) for title in titles), beginning


def test_tried_rates_are_listed(page):
    assert "0.0003: 3.000, 0.001: 2.900" in page.read_text()


def test_provenance_counts_runs(elements):
    facts = {text for _, text in elements.named("dd")}
    assert {"finished (6 runs)", "diverged (1 run)", "c0ffee (7 runs)"} <= facts
    assert "packages, tokenizer bytes, fingerprint f1f2f3 (7 runs)" in facts


@pytest.fixture
def marked(runs, tmp_path):
    """Experiments whose figure `teaser` was drawn before, and has a mark."""
    experiments = Experiments.load(SCALES["laptop"], runs)
    (_, _, drawing, *_), _ = draw_paper_figure(FIGURES["teaser"], experiments, tmp_path)
    drawing.write_text(drawing.read_text().replace("</svg>", "<!-- kept --></svg>"))
    return experiments


def test_figure_of_these_runs_is_taken(marked, tmp_path):
    taken, _ = paper_drawings(marked, [tmp_path])
    assert [drawing.name for drawing in taken if "<!-- kept -->" in drawing.svg] == ["teaser"]


def test_figure_of_other_runs_is_drawn_anew(marked, runs, tmp_path):
    drawn, _ = paper_drawings(Experiments(marked.scale, marked.runs[:-1], runs), [tmp_path])
    assert not any("<!-- kept -->" in drawing.svg for drawing in drawn)


@pytest.mark.parametrize(("suffix", "content"), [(".txt", None), (".json", "[]")])
def test_damaged_figure_is_drawn_anew(marked, tmp_path, suffix, content):
    file = tmp_path / f"teaser{suffix}"
    file.unlink()
    if content is not None:
        file.write_text(content)
    drawn, _ = paper_drawings(marked, [tmp_path])
    assert "teaser" in [drawing.name for drawing in drawn]
    assert not any("<!-- kept -->" in drawing.svg for drawing in drawn)


@pytest.fixture
def variants(runs):
    """Runs of as many variants of one method."""
    frame = Experiments.load(SCALES["laptop"], runs).runs
    names = ["basis-rotation", *(f"basis-rotation {n}" for n in range(1, len(frame)))]
    return frame.assign(variant=names)


def test_variants_have_their_own_dashes(variants):
    assert len({entry["dash"] for entry in run_entries(variants, variants)[:5]}) == 5


def test_variants_share_a_colour(variants):
    (method, *_) = facets_of(variants)
    assert len(set(method.colors.values())) == 1


def test_policy_forbids_loading(elements):
    (policy,) = [
        attributes for attributes, _ in elements.named("meta") if "http-equiv" in attributes
    ]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none'")


def test_addresses_are_within_the_page(elements):
    for tag, attributes, _ in elements.all:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            address = attributes.get(name) or "#"
            assert address.startswith(("#", "data:")), (tag, name, address[:80])


def test_name_of_a_run_is_text(elements, page):
    assert not [attributes for attributes, _ in elements.named("img") if "onerror" in attributes]
    assert EVIL_NAME not in page.read_text()


def test_further_figures_are_shown_with_their_captions(runs, tmp_path, page):
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    (drawn / "valley.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="640.3pt" height="480pt"></svg>'
    )
    (drawn / "valley.txt").write_text("A valley <b>\nfrom one run\n")
    (tmp_path / "run").symlink_to(runs / "pipedream-1")
    out = tmp_path / "report.html"
    assert (
        main(["report", "--runs", str(tmp_path), "--figures", str(drawn), "--out", str(out)]) == 0
    )
    found = Elements(out.read_text())
    assert [attributes["id"] for attributes, _ in found.named("figure")][-1] == "figure-valley"
    assert {"width": "640", "height": "480", "alt": "A valley <b>"}.items() <= found.named("img")[
        -1
    ][0].items()


def test_missing_package_is_one_line(runs, tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "needs the package jinja2" in refused(
        "report", "--runs", runs, "--out", tmp_path / "report.html"
    )
    assert not (tmp_path / "report.html").exists()


def test_missing_folder_of_figures_is_one_line(runs, refused):
    assert "--figures: nowhere: no such folder" in refused(
        "report", "--runs", runs, "--figures", "nowhere"
    )


@pytest.fixture(scope="module")
def own_text(own_page):
    return own_page.read_text()


def test_report_of_own_runs_opens_with_them(own_text):
    sections = [attributes["id"] for attributes, _ in Elements(own_text).named("section")]
    assert sections[:3] == ["opening", "tables", "runs"]


def test_report_of_own_runs_opens_with_their_curves(own_text):
    start = own_text.index('id="opening"')
    assert 'id="figure-curves"' in own_text[start : own_text.index('id="tables"')]


def test_report_of_own_runs_has_their_slowdown_first(own_text):
    assert own_text.index('id="table-all-slowdowns"') < own_text.index(
        'id="table-all-final-losses"'
    )


@pytest.mark.parametrize("words", [" not tried</summary>", "figures have no runs yet"])
def test_own_report_does_not_miss_the_paper(words, own_text):
    assert words not in own_text


def test_own_report_has_no_claims_that_rest_on_other_things(own_text):
    assert 'id="findings"' not in own_text
    assert 'id="table-claims"' not in own_text


def test_experiments_have_one_table(runs, monkeypatch):
    monkeypatch.setattr(
        "brx.report.page.TABLES", {name: TABLES[name] for name in ("claims", "experiments")}
    )
    tables = page_tables(Experiments.load(SCALES["similar"], runs))
    assert len([table for table in tables if "Final losses of every" in table.title]) == 1


@pytest.mark.parametrize(
    ("value", "text"), [(32, "32"), (3e-4, "0.0003"), (1.0, "1"), (1e30, "1e+30")]
)
def test_number_of_a_facet_is_short(value, text):
    assert _text(value) == text


def test_twelve_methods_have_twelve_colors():
    methods = ["pipedream", "muon", *(f"mine{number}.py:Mine" for number in range(10))]
    colors = method_colors(methods)
    assert len(set(colors.values())) == 12
    assert colors["muon"] == look_of("muon").color


def test_color_does_not_depend_on_later_methods():
    assert method_colors(["a", "b"])["a"] == method_colors(["a", "b", "c"])["a"]


@pytest.mark.parametrize("kind", ["page", "own_page"])
def test_navigation_names_the_sections_in_order(kind, request):
    elements = Elements(request.getfixturevalue(kind).read_text())
    sections = [attributes["id"] for attributes, _ in elements.named("section")]
    anchors = [
        attributes["href"] for attributes, _ in elements.named("a") if "#" in attributes["href"]
    ]
    assert [f"#{name}" for name in sections] == anchors[1 : len(sections) + 1]


@pytest.mark.parametrize("kind", ["page", "own_page"])
def test_script_finds_the_elements_that_it_needs(kind, request):
    text = request.getfixturevalue(kind).read_text()
    ids = {attributes["id"] for _, attributes, _ in Elements(text).all if "id" in attributes}
    wanted = set(re.findall(r'getElementById\("([\w-]+)"\)', text))
    assert wanted
    assert wanted <= ids


def test_run_under_way_has_a_report(tmp_path):
    settings = {"optimizer.method": "muon", "pipeline.stages": 2, "optimizer.lr": 2e-3}
    write_run(tmp_path / "runs" / "mine", 2.0, settings)
    (tmp_path / "runs" / "mine" / "summary.json").unlink()
    page = tmp_path / "report.html"
    assert main(["report", "--runs", str(tmp_path / "runs"), "--out", str(page)]) == 0
    assert "unknown, version unknown" in page.read_text()


@pytest.mark.parametrize("size", ["1.1.1pt", "0pt", "10px"])
def test_figure_of_no_size_is_refused(size, tmp_path):
    (tmp_path / "valley.svg").write_text(f'<svg width="{size}" height="10pt"></svg>')
    (tmp_path / "valley.txt").write_text("A valley")
    with pytest.raises(UserError, match="not an SVG image with a size in points"):
        other_drawings([tmp_path])
