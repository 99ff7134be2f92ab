"""One self-contained HTML file: findings, figures, tables, runs, and the JavaScript library that
draws the runs' curves."""

import base64
import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex
from numpy.typing import NDArray

import brx
from brx.config.parsing import dump_yaml
from brx.errors import UserError, counted
from brx.files import make_folder, write_text
from brx.paper.claims import (
    CLAIMS,
    Outcome,
    claim_table,
    evidence_text,
    in_groups,
    judge,
    paper_text,
    why_not,
)
from brx.paper.figures import FIGURES
from brx.paper.paper_figure import PANEL_IN, draw_paper_figure
from brx.paper.scales import Experiments
from brx.paper.tables import TABLES
from brx.plot.any_runs import draw_curves
from brx.plot.style import METHOD_LOOKS, method_colors, sequence_color, thin_rows
from brx.progress import duration
from brx.readers import read_json
from brx.runs.aspects import comparable, is_missing
from brx.runs.comparison import compare
from brx.runs.frames import DEPTH
from brx.runs.run import Run, read_run
from brx.runs.tables import experiment_table, leaderboard_table, rate_table, slowdown_table
from brx.runs.trajectory import RATE, SEED, trajectory_of
from brx.sweep.compare import DELAYS, read_board
from brx.train.recorder import git_commit

# Runs made by `brx compare --all-builtin`, in the compact form of `brx export`.
KEPT_COMPARISON = Path("results") / "compare"
# A page without either of these figures is not about the paper, but about somebody's own runs.
OF_THE_PAPER = ("teaser", "main")
MOST_CURVES = 12  # in the figure that a page of somebody's own runs opens with
HEADLINES = ("teaser", "main", "claims")  # the figures that a page about the paper opens with
# Points of a curve. The losses are means over 2 % of a run, so 120 points are two per such window.
MOST_POINTS = 120
# Line styles of a method's variants, which share its colour.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
# Facets that are numbers: each with its heading and its column.
ORDERED = {
    "stages": ("P", DEPTH),
    "length": ("iterations", "last_iteration"),
    "lr": ("lr", RATE),
    "seed": ("seed", SEED),
}


class PageTable(NamedTuple):
    """A table on the page."""

    name: str  # its anchor
    title: str
    texts: pd.DataFrame  # its cells; columns are headings
    missing: Sequence[str] = ()  # experiments that had no runs


class Drawing(NamedTuple):
    """A figure on the page."""

    name: str  # its name on the command line
    caption: str
    details: Sequence[str]  # further lines of the caption
    svg: str
    width: int  # in points, 72 per inch
    height: int

    @property
    def across(self) -> int:
        """How many panels of the usual width fit into the drawing's width; the page gives more room
        to a drawing with more of them."""
        return max(1, round(self.width / (PANEL_IN * 72)))

    @property
    def uri(self) -> str:
        """The drawing as a data URI, for an image element."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


class Contents(NamedTuple):
    """The claims and figures that the page shows."""

    is_own: bool  # the page is about somebody's own runs, not about the paper
    opening: Sequence[Drawing]  # figures of somebody's own runs
    drawings: Sequence[Drawing]  # the paper's figures, and figures of other commands
    undrawn: Sequence[str]  # a line for each figure that has no runs
    outcomes: Sequence[Outcome]  # claims to show
    num_claims: int  # all claims


def write_report(experiments: Experiments, figure_folders: list[Path], path: Path) -> None:
    """Write the page of a scale's runs.

    Args:
        experiments: the runs.
        figure_folders: where commands drew figures. The paper's figures are taken from there if
            they show these runs as they are now, and drawn again if not. Other figures are shown as
            they are. If two folders have a figure of the same name, the first folder's is taken.
        path: where to write the HTML file.

    Raises:
        UserError: an optional package is missing, or a file in `figure_folders` is no figure.
        RunError: the page cannot be written.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            f"the report needs the package {error.name}: pip install {error.name}"
        ) from None

    environment = Environment(
        loader=PackageLoader("brx.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    values = _template_values(experiments, contents_of(experiments, figure_folders))
    values["later"]["plotly"] = _packed(get_plotlyjs())
    page = environment.get_template("page.html").render(values)
    make_folder(path.parent)
    write_text(path, page)


def contents_of(experiments: Experiments, figure_folders: Sequence[Path]) -> Contents:
    """Judge the claims and collect the figures.

    A page about somebody's own runs leaves out the claims and figures that do not rest on them."""
    outcomes = judge(experiments.fresh(), CLAIMS)
    num_claims = len(outcomes)
    paper, undrawn = paper_drawings(experiments, figure_folders)
    is_own = not any(drawing.name in OF_THE_PAPER for drawing in paper)
    opening: list[Drawing] = []
    if is_own:
        opening = own_curves(experiments.chosen)
        outcomes = [outcome for outcome in outcomes if outcome.runs]
        undrawn = []
    drawings = [*paper, *other_drawings(figure_folders)]
    return Contents(is_own, opening, drawings, undrawn, outcomes, num_claims)


def _template_values(experiments: Experiments, contents: Contents) -> dict[str, Any]:
    """The values that the template (template/page.html) uses, by name. Those in `later` are
    compressed, and the browser unpacks them."""
    further = [drawing for drawing in contents.drawings if drawing.name not in HEADLINES]
    sections = sections_of(
        is_own=contents.is_own,
        has_opening=bool(contents.opening),
        has_figures=bool(further),
        has_findings=bool(contents.outcomes),
    )
    claims = claim_table(contents.outcomes, experiments.scale)
    left_out = ("Left out, or not comparable", experiments.notes)
    entries = run_entries(experiments.runs, experiments.chosen)
    facets = facets_of(experiments.runs)
    later: dict[str, Any] = {
        "facets": {facet.name: dict(facet.colors) for facet in facets},
        "runs": entries,
        "figures": {
            drawing.name: drawing.svg for drawing in [*contents.opening, *contents.drawings]
        },
    }
    return {
        "scale": experiments.scale.name,
        "sections": sections,
        "selection": comparable_selection(experiments.chosen),
        "findings": in_groups(contents.outcomes),
        "is_own": contents.is_own,
        "opening": contents.opening,
        "num_claims": contents.num_claims,
        "num_shown": len(contents.outcomes),
        "paper": paper_text,
        "here": evidence_text,
        "why_not": why_not,
        "headlines": _headlines(contents.drawings),
        "drawings": further,
        "undrawn": contents.undrawn,
        "tables": page_tables(experiments, claims, opens_with_runs=contents.is_own),
        "facts": [*provenance(experiments.runs), left_out],
        "runs": entries,
        "facets": facets,
        "later": {key: _packed(value) for key, value in later.items()},
    }


def _headlines(drawings: Sequence[Drawing]) -> list[Drawing]:
    """The drawings in `HEADLINES`, in that order."""
    headlines = [drawing for drawing in drawings if drawing.name in HEADLINES]
    return sorted(headlines, key=lambda drawing: HEADLINES.index(drawing.name))


def sections_of(
    *, is_own: bool, has_opening: bool, has_figures: bool, has_findings: bool
) -> dict[str, str]:
    """The titles of the page's sections by anchor, in order.

    A page about somebody's own runs begins with the runs; the paper's sections follow if there is
    anything in them."""
    titles = {
        "opening": "These runs",
        "findings": "Findings",
        "figures": "Figures",
        "tables": "Tables",
        "runs": "Runs",
        "provenance": "Provenance",
    }
    if not is_own:
        order = ["findings", "figures", "tables", "runs", "provenance"]
        return {name: titles[name] for name in order}
    is_there = {"opening": has_opening, "figures": has_figures, "findings": has_findings}
    order = ["opening", "tables", "runs", "figures", "findings", "provenance"]
    return {name: titles[name] for name in order if is_there.get(name, True)}


def other_drawings(folders: Sequence[Path]) -> list[Drawing]:
    """Figures that other commands drew: SVG files, each with its caption in a .txt file next to it.

    If two folders have a figure of the same name, the first folder's is taken."""
    images: dict[str, Path] = {}
    for folder in folders:
        for image in sorted(folder.glob("*.svg")):
            images.setdefault(image.stem, image)
    drawn_from_runs = {name for name, figure in FIGURES.items() if figure.is_from_runs_of_scale}
    return [
        _read_drawing(image)
        for name, image in images.items()
        if name not in drawn_from_runs and image.with_suffix(".txt").is_file()
    ]


def _packed(content: Any) -> str:
    """A value as JSON, compressed by gzip and written in base64."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")


def paper_drawings(
    experiments: Experiments, folders: Iterable[Path]
) -> tuple[list[Drawing], list[str]]:
    """The paper's figures that have runs, and a line for each figure that has none.

    A figure is taken from `folders` if it shows these runs as they are now, and drawn if not."""
    drawn = []
    undrawn = []
    with tempfile.TemporaryDirectory(prefix="brx-report-") as scratch:
        for figure in FIGURES.values():
            if not figure.is_from_runs_of_scale:
                continue
            paths = (folder / f"{figure.name}.svg" for folder in folders)
            svg = next((path for path in paths if _is_of(path, experiments)), None)
            try:
                if svg is None:
                    files, _ = draw_paper_figure(figure, experiments, Path(scratch))
                    svg = next(file for file in files if file.suffix == ".svg")
                drawn.append(_read_drawing(svg))
            except UserError as error:
                undrawn.append(f"figure {figure.name}: {error}")
    return drawn, undrawn


def _is_of(path: Path, experiments: Experiments) -> bool:
    """Whether a figure is complete and was drawn from these runs as they are now."""
    if not path.is_file() or not path.with_suffix(".txt").is_file():
        return False
    try:
        details = read_json(path.with_suffix(".json"))
    except ValueError:
        return False
    return isinstance(details, dict) and details.get("fingerprint") == experiments.fingerprint


def _read_drawing(image: Path) -> Drawing:
    """Read an SVG, and its caption from the .txt file next to it.

    Raises:
        UserError: the file is not an SVG with a size in points.
    """
    svg = image.read_text(encoding="utf-8", errors="replace")
    sizes = re.findall(r' (width|height)="(\d+(?:\.\d+)?)pt"', svg[:2000])
    points = {side: round(float(text)) for side, text in sizes}
    if "<svg" not in svg or len(points) < 2 or 0 in points.values():
        raise UserError(f"{image}: not an SVG image with a size in points")
    text = image.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
    caption, *details = text.strip().splitlines() or [image.stem]
    return Drawing(image.stem, caption, details, svg, points["width"], points["height"])


def own_curves(chosen: pd.DataFrame) -> list[Drawing]:
    """A figure of training losses, one seed per experiment; no figure if there are no losses.

    It shows the largest set of experiments that can be compared with each other.

    Args:
        chosen: runs at the best learning rates.
    """
    if chosen.empty:
        return []
    largest = comparable(chosen)[0]
    shown = largest.drop_duplicates("experiment").head(MOST_CURVES)
    with tempfile.TemporaryDirectory(prefix="brx-report-") as scratch, suppress(UserError):
        paths = draw_curves(shown, Path(scratch) / "curves")
        return [_read_drawing(next(path for path in paths if path.suffix == ".svg"))]
    return []


def page_tables(
    experiments: Experiments, claims: pd.DataFrame | None = None, *, opens_with_runs: bool = False
) -> list[PageTable]:
    """All tables that have rows: the paper's, three about every experiment, and the leaderboard.

    Args:
        experiments: the runs.
        claims: the table of the paper's claims, if it is to be shown.
        opens_with_runs: whether the three tables about every experiment come first.
    """
    tables = [] if claims is None else [PageTable("claims", TABLES["claims"].title, claims)]
    for name, table in TABLES.items():
        # `_experiment_tables` makes the table of the experiments.
        if name in ("claims", "experiments"):
            continue
        asked = experiments.fresh()  # its `missing` is about this table alone
        with suppress(UserError):  # there are no rows
            tables.append(PageTable(name, table.title, table.make(asked), list(asked.missing)))

    of_runs = _experiment_tables(experiments)
    tables = [*of_runs, *tables] if opens_with_runs else [*tables, *of_runs]
    with suppress(UserError):  # there are no finished runs
        board = read_board([KEPT_COMPARISON])
        title = f"How robust methods are against delay (brx compare): {board.runs}"
        tables.append(PageTable("leaderboard", title, leaderboard_table(board.rows, list(DELAYS))))
    return [table for table in tables if len(table.texts)]


def _experiment_tables(experiments: Experiments) -> list[PageTable]:
    """Slowdowns, final losses and learning rates of every experiment that has runs."""
    chosen = experiments.chosen
    title = (
        "Slowdown of every experiment against P = 1 (target: the loss that all of the same "
        "model reach)"
    )
    tables = [PageTable("all-slowdowns", title, slowdown_table(compare(chosen).slowdowns))]
    if len(chosen):
        title = "Final losses of every experiment, at its best learning rate"
        tables.append(PageTable("all-final-losses", title, experiment_table(chosen)))
    ordered = chosen.sort_values(["architecture", "variant", DEPTH], kind="stable")
    rates = rate_table(experiments.runs, ordered)
    tables.append(PageTable("all-learning-rates", "Learning rates of every experiment", rates))
    return tables


def provenance(runs: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """How the runs were made: headings, each with a line per distinct value and the number of runs
    that have it."""
    dates = runs["finished_at"].dropna().sort_values().tolist() if "finished_at" in runs else []

    # A list of dictionaries, because pandas takes tens of microseconds to look up a value of a row.
    rows = runs.to_dict("records")
    version_columns = [key for key in runs.columns if "versions." in key]

    def versions(run: dict[str, Any]) -> str:
        known = [key for key in version_columns if not is_missing(run[key])]
        return ", ".join(f"{key.removeprefix('versions.')} {run[key]}" for key in known)

    def device(run: dict[str, Any]) -> str:
        if pd.isna(run.get("device.type")):
            return ""
        return f"{run['device.type']} ({run['device.name']}), threads: {run['device.threads']:g}"

    def data(run: dict[str, Any]) -> str:
        fingerprint = "unknown" if pd.isna(run["data_fingerprint"]) else run["data_fingerprint"]
        return f"{run['data.source']}, tokenizer {run['data.tokenizer']}, fingerprint {fingerprint}"

    total = duration(runs["seconds"].sum())
    return [
        ("Runs", _counted(rows, lambda run: run["status"])),
        ("Ended", [f"{dates[0]} to {dates[-1]}"] if dates else []),
        ("Training time", [f"{total} in all, without validations and checkpoints"]),
        ("Versions", _counted(rows, versions)),
        ("Git commits", _counted(rows, lambda run: run.get("git_commit"))),
        ("Devices", _counted(rows, device)),
        ("Data", _counted(rows, data)),
        ("Models", _counted(rows, lambda run: run["architecture"])),
        ("This page", [f"brx {brx.__version__}, git commit {git_commit() or 'unknown'}"]),
    ]


def _counted(
    runs: list[dict[str, Any]],
    text: Callable[[dict[str, Any]], object],  # None, NaN or "": unknown
) -> list[str]:
    """The distinct texts of runs, each with its number of runs, the most frequent first."""
    texts = pd.Series([text(run) for run in runs], dtype=object)
    texts = texts.fillna("unknown").replace("", "unknown")
    lines = []
    for value, count in texts.value_counts().items():
        lines.append(f"{value} ({counted(count, 'run')})")
    return lines


# The runs for the browser: facets to filter and sort by, and thinned loss curves.


class Facet(NamedTuple):
    """Something that runs can be filtered by."""

    name: str
    title: str
    colors: Mapping[str, str]  # by value, in order


def run_entries(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[dict[str, Any]]:
    """All runs in the page's order, as `_entry` gives them.

    Args:
        runs: rows of `load`.
        chosen: the ones at the best learning rates.
    """
    ordered = _by_method(runs)
    dashes = _dashes_by_variant(ordered["variant"])
    texts: dict[str, str] = {}
    entries = []
    # A list of dictionaries, because pandas takes tens of microseconds to look up a value of a row.
    for path, row in zip(ordered.index, ordered.to_dict("records"), strict=True):
        read = read_run(Path(str(path)))
        settings = _settings_text(read, texts)
        entries.append(_entry(row, read, settings, path in chosen.index, dashes[row["variant"]]))
    return entries


def _dashes_by_variant(variants: pd.Series) -> dict[str, str]:
    """A line style for each variant. Variants of the same method have different styles, which
    repeat after `len(DASHES)` variants."""
    dashes: dict[str, str] = {}
    num_of_method: Counter[str] = Counter()
    for variant in variants.unique():
        method = _base(variant)
        dashes[variant] = DASHES[num_of_method[method] % len(DASHES)]
        num_of_method[method] += 1
    return dashes


def _settings_text(
    run: Run,
    texts: dict[str, str],  # the YAML of sections that other runs had, by content; extended here
) -> str:
    """The settings that are not defaults, as YAML.

    The YAML of a section is kept in `texts`, because most sections are equal in many runs and
    PyYAML takes milliseconds to write those of one run."""
    text = ""
    for section, values in trajectory_of(run.config, with_defaults=False).items():
        content = f"{section} {values!r}"
        if content not in texts:
            texts[content] = dump_yaml({section: values})
        text += texts[content]
    return text


def comparable_selection(chosen: pd.DataFrame) -> dict[str, str]:
    """The values of facets that are selected when the page opens: the deepest pipeline, its most
    frequent model, and the length and data that most of that model's runs have."""
    if chosen.empty:
        return {}
    deepest = chosen[chosen[DEPTH] == chosen[DEPTH].max()]
    model = deepest["architecture"].mode().iloc[0]
    of_model = deepest[deepest["architecture"] == model]
    return {
        "stages": f"{deepest[DEPTH].max()}",
        "length": f"{of_model['last_iteration'].mode().iloc[0]}",
        "model": model,
        "data": _origins(of_model).mode().iloc[0],
        "chosen": "yes",
    }


def _base(variant: str) -> str:
    """The method of a variant: `basis-rotation` for `basis-rotation 2nd/unilateral`."""
    return variant.partition(" ")[0]


def facets_of(runs: pd.DataFrame) -> list[Facet]:
    """Everything that runs can be filtered by, with the values that occur."""
    ordered = _by_method(runs)
    variants = ordered["variant"].unique()
    by_method = method_colors(map(_base, variants))
    colors = {variant: by_method[_base(variant)] for variant in variants}
    facets = [Facet("method", "method", colors)]
    for name, (title, column) in ORDERED.items():
        values = [_text(value) for value in sorted(runs[column].unique())]
        facets.append(Facet(name, title, _shades(values)))
    architectures = runs.sort_values(["model.blocks", "model.width"])["architecture"].unique()
    facets.append(Facet("model", "model", _shades(architectures)))
    return [*facets, Facet("data", "data", _shades(ordered["origin"].unique()))]


def _by_method(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with a column `origin`, in the page's order.

    Methods are in the order of the figures' legends, and unknown ones at the end. Within a method,
    runs are ordered by variant, stages, learning rate and seed."""
    order = {method: index for index, method in enumerate(METHOD_LOOKS)}
    rank = runs["method"].map(lambda method: order.get(method, len(order)))
    runs = runs.assign(rank=rank, origin=_origins(runs))
    return runs.sort_values(["rank", "variant", DEPTH, RATE, SEED, "name"])


def _origins(runs: pd.DataFrame) -> pd.Series:
    """Each run's data and trajectory version. Losses of runs that differ in them cannot be
    compared."""
    # A run without a summary has no trajectory version.
    versions = runs["trajectory_version"].astype("Int64").astype(str).fillna("unknown")
    return runs["data_fingerprint"].fillna("unknown").str[:8] + ", version " + versions


def _shades(values: Sequence[str]) -> dict[str, str]:
    """A colour per value, light to dark."""
    return {value: to_hex(sequence_color(index, len(values))) for index, value in enumerate(values)}


def _text(value: float) -> str:
    """A number, without decimals if it is whole and not huge, as a rate that diverged may be."""
    is_count = value == int(value) and abs(value) < 1e15
    return str(int(value)) if is_count else f"{value:g}"


def _entry(
    row: dict[str, Any], run: Run, settings: str, is_chosen: bool, dash: str
) -> dict[str, Any]:
    """A run for the browser: its row of the table, its settings and its curves."""
    ordered = {name: _text(row[column]) for name, (_, column) in ORDERED.items()}
    return {
        "name": row["name"],
        "facets": {
            "method": row["variant"],
            **ordered,
            "model": row["architecture"],
            "data": row["origin"],
        },
        "is_chosen": is_chosen,  # its learning rate is the best one
        "status": row["status"],
        "dash": dash,
        # The numbers in the run's row of the table, by heading.
        "numbers": {
            "train loss": _cell(row["train_loss"], 3),
            "val loss": _cell(row["val_loss"], 3),
            "minutes": _cell(row["seconds"] / 60, 1),
        },
        "settings": settings,
        "curves": _curves(run),
    }


def _cell(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if np.isfinite(value) else "-"


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Series for the chart, rounded. A loss that is not finite is None, because JSON has no NaN and
    no infinity."""
    iterations = run.iterations[run.centres]
    shown = thin_rows(len(iterations), MOST_POINTS)
    train_iterations = iterations[shown]
    return {
        "iterations": train_iterations.astype(int).tolist(),
        "minutes": _rounded(_minutes_at(run, train_iterations), 3),
        "train": _rounded(run.smoothed[shown], 4),
        "val_iterations": run.val_iterations.astype(int).tolist(),
        "val_minutes": _rounded(_minutes_at(run, run.val_iterations), 3),
        "val": _rounded(run.val_loss, 4),
    }


def _minutes_at(
    run: Run,
    iterations: NDArray[np.float64],  # (n,), rising
) -> NDArray[np.float64]:
    """The minutes of training at some iterations; NaN at iterations without a training loss."""
    if len(run.iterations) == 0:
        return np.full(len(iterations), np.nan)
    indices = np.searchsorted(run.iterations, iterations)
    indices = np.minimum(indices, len(run.iterations) - 1)  # for iterations after the last loss
    is_there = run.iterations[indices] == iterations
    minutes: NDArray[np.float64] = np.where(is_there, run.seconds[indices] / 60, np.nan)
    return minutes


def _rounded(values: NDArray[np.float64], digits: int) -> list[float | None]:
    """Rounded numbers, with None in place of those that are not finite."""
    if np.isfinite(values).all():
        return [round(value, digits) for value in values.tolist()]
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]
