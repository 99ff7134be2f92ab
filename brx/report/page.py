"""One HTML file with everything in it: findings, figures, tables, runs, and the library that draws
the runs' curves."""

import base64
import gzip
import json
import re
import tempfile
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
from brx.errors import UserError
from brx.files import write_text
from brx.paper.claims import (
    CLAIMS,
    claim_table,
    evidence_text,
    in_groups,
    judge,
    paper_text,
    why_not,
)
from brx.paper.figures import FIGURES, PANEL_IN, draw_paper_figure
from brx.paper.scales import Experiments
from brx.paper.tables import TABLES
from brx.plot.any_runs import draw_curves
from brx.plot.style import METHOD_LOOKS, method_colors, sequence_color, thin_rows
from brx.readers import read_json
from brx.runs.comparison import compare
from brx.runs.folder import trajectory_of
from brx.runs.frames import DEPTH, RATE, SEED, Run, comparable, read_run
from brx.runs.tables import experiment_table, leaderboard_table, rate_table, slowdown_table
from brx.sweep.compare import DELAYS, read_board
from brx.sweep.run import duration
from brx.train.recorder import git_commit

# Runs made by `brx compare --all-builtin`, in the compact form of `brx export`.
KEPT_COMPARISON = Path("results") / "compare"
OF_THE_PAPER = ("teaser", "main")  # figures without whose runs a page is not about the paper
MOST_CURVES = 12  # in the figure that a page of somebody's own runs opens with
HEADLINES = ("teaser", "main", "claims")  # the figures that the page opens with
MOST_POINTS = (
    120  # points of a curve: the losses are means over 2 % of a run, which 120 points resolve twice
)
# Line styles of a method's variants, which share its colour
DASHES = (
    "solid",
    "dash",
    "dot",
    "dashdot",
    "longdash",
    "longdashdot",
)
# Facets of numbers: by name, their headings and columns.
ORDERED = {
    "stages": ("P", DEPTH),
    "length": ("iterations", "last_iteration"),
    "lr": ("lr", RATE),
    "seed": ("seed", SEED),
}


class PageTable(NamedTuple):
    """A table on the page: its anchor, what it shows, its cells by heading, and experiments that
    were not there."""

    name: str
    title: str
    texts: pd.DataFrame
    missing: Sequence[str] = ()


class Drawing(NamedTuple):
    """A figure on the page: its name on the command line, caption, the caption's other lines, and
    the drawing."""

    name: str
    caption: str
    details: Sequence[str]
    svg: str
    width: int  # in points, 72 per inch
    height: int

    @property
    def across(
        self,
    ) -> int:  # panels of the usual width side by side, which decides how small it may be shown
        return max(1, round(self.width / (PANEL_IN * 72)))

    @property
    def uri(self) -> str:
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


def write_report(experiments: Experiments, figure_folders: list[Path], path: Path) -> None:
    """Write the page of a scale's runs.

    Args:
        experiments: the runs.
        figure_folders: where commands drew figures. Those of the paper are taken from there if
            they show these runs as they are now, and drawn anew if not; others are shown as they
            are. The first folder counts where two have a figure of one name.
        path: of the HTML file.

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

    runs = experiments.runs
    outcomes = judge(experiments.fresh(), CLAIMS)
    num_claims = len(outcomes)
    paper, undrawn = paper_drawings(experiments, figure_folders)
    # Runs of somebody's own have none of the figures that the paper begins with.
    is_own = not any(drawing.name in OF_THE_PAPER for drawing in paper)
    opening: list[Drawing] = []
    if is_own:
        opening = own_curves(experiments.chosen)
        outcomes = [outcome for outcome in outcomes if outcome.verdict != "not tried"]
        undrawn = []
    drawings = [*paper, *other_drawings(figure_folders)]
    headlines = [drawing for name in HEADLINES for drawing in drawings if drawing.name == name]
    further = [drawing for drawing in drawings if drawing.name not in HEADLINES]

    entries = run_entries(runs, experiments.chosen)
    facets = facets_of(runs)
    unpacked_later: dict[str, Any] = {
        "facets": {facet.name: dict(facet.colors) for facet in facets},
        "runs": entries,
        "figures": {drawing.name: drawing.svg for drawing in [*opening, *drawings]},
        "plotly": get_plotlyjs(),
    }
    environment = Environment(
        loader=PackageLoader("brx.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("page.html").render(
        scale=experiments.scale.name,
        sections=sections_of(
            is_own=is_own,
            has_opening=bool(opening),
            has_figures=bool(further),
            has_findings=bool(outcomes),
        ),
        selection=comparable_selection(experiments.chosen),
        findings=in_groups(outcomes),
        is_own=is_own,
        opening=opening,
        num_claims=num_claims,
        num_shown=len(outcomes),
        paper=paper_text,
        here=evidence_text,
        why_not=why_not,
        headlines=headlines,
        drawings=further,
        undrawn=undrawn,
        tables=page_tables(
            experiments, claim_table(outcomes, experiments.scale), opens_with_runs=is_own
        ),
        facts=[*provenance(runs), ("Left out, or not comparable", experiments.notes)],
        runs=entries,
        facets=facets,
        later={key: _packed(value) for key, value in unpacked_later.items()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)


def sections_of(
    *, is_own: bool, has_opening: bool, has_figures: bool, has_findings: bool
) -> dict[str, str]:
    """The page's sections in order: anchors and titles. A page of somebody's own runs has the
    paper's part at its end, and only as far as there is one."""
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
    """The figures that other commands left: each an SVG with its caption in a .txt file next to it.
    Where two folders have one of the same name, the first folder's."""
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
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")


def paper_drawings(
    experiments: Experiments, folders: Iterable[Path]
) -> tuple[list[Drawing], list[str]]:
    """The paper's figures that have runs, and a line for each that has none."""
    drawn, undrawn = [], []
    with tempfile.TemporaryDirectory(prefix="brx-report-") as scratch:
        for figure in [figure for figure in FIGURES.values() if figure.is_from_runs_of_scale]:
            paths = (folder / f"{figure.name}.svg" for folder in folders)
            kept = next((path for path in paths if _is_of(path, experiments)), None)
            try:
                drawn.append(
                    _read_drawing(
                        kept or draw_paper_figure(figure, experiments, Path(scratch))[0][2]
                    )
                )
            except UserError as error:
                undrawn.append(f"figure {figure.name}: {error}")
    return drawn, undrawn


def _is_of(path: Path, experiments: Experiments) -> bool:
    """Whether a figure was drawn from these runs as they are now."""
    try:
        details = read_json(path.with_suffix(".json"))
    except ValueError:
        return False
    return path.is_file() and details.get("fingerprint") == experiments.fingerprint


def _read_drawing(image: Path) -> Drawing:
    """An SVG, and the caption in the .txt file next to it.

    Raises:
        UserError: it is no SVG of a known size.
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
    """The training losses of the largest set of experiments that compare, at their best rates, of
    one seed each; nothing where there are none."""
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
    """The paper's tables, and three of every experiment that has runs; all that have rows.

    Args:
        claims: the table of the paper's claims, if it is to be shown.
        opens_with_runs: the tables of the experiments come first.
    """
    tables = [] if claims is None else [PageTable("claims", TABLES["claims"].title, claims)]
    for name, table in TABLES.items():
        asked = experiments.fresh()
        if name != "claims":
            try:
                tables.append(PageTable(name, table.title, table.make(asked), list(asked.missing)))
            except UserError:  # there are no rows
                continue
    chosen = experiments.chosen
    title = (
        "Slowdown of every experiment against P = 1 (target: the loss that all of the same "
        "model reach)"
    )
    of_runs = [PageTable("all-slowdowns", title, slowdown_table(compare(chosen).slowdowns))]
    if len(chosen):
        title = "Final losses of every experiment, at its best learning rate"
        of_runs.append(PageTable("all-final-losses", title, experiment_table(chosen)))
    rates = rate_table(
        experiments.runs, chosen.sort_values(["architecture", "variant", DEPTH], kind="stable")
    )
    of_runs.append(PageTable("all-learning-rates", "Learning rates of every experiment", rates))
    tables = [*of_runs, *tables] if opens_with_runs else [*tables, *of_runs]
    with suppress(UserError):  # there are no finished runs
        board = read_board([KEPT_COMPARISON])
        title = f"How robust methods are against delay (brx compare): {board.runs}"
        tables.append(PageTable("leaderboard", title, leaderboard_table(board.rows, list(DELAYS))))
    return [table for table in tables if len(table.texts)]


def provenance(runs: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """What is known of how the runs were made: headings, each with a line per distinct value and
    how many have it."""
    dates = runs["finished_at"].dropna().sort_values().tolist() if "finished_at" in runs else []

    # Dictionaries: pandas takes tens of microseconds for each value of a row.
    rows = runs.to_dict("records")
    version_columns = [key for key in runs.columns if "versions." in key]

    def versions(run: dict[str, Any]) -> str:
        known = [key for key in version_columns if _is_known(run[key])]
        return ", ".join(f"{key.removeprefix('versions.')} {run[key]}" for key in known)

    def device(run: dict[str, Any]) -> str:
        is_known = pd.notna(run.get("device.type"))
        return (
            f"{run['device.type']} ({run['device.name']}), threads: {run['device.threads']:g}"
            if is_known
            else ""
        )

    def data(run: dict[str, Any]) -> str:
        fingerprint = "unknown" if pd.isna(run["data_fingerprint"]) else run["data_fingerprint"]
        return f"{run['data.source']}, tokenizer {run['data.tokenizer']}, fingerprint {fingerprint}"

    return [
        ("Runs", _counted(rows, lambda run: run["status"])),
        ("Ended", [f"{dates[0]} to {dates[-1]}"] if dates else []),
        (
            "Training time",
            [f"{duration(runs['seconds'].sum())} in all, without validations and checkpoints"],
        ),
        ("Versions", _counted(rows, versions)),
        ("Git commits", _counted(rows, lambda run: run.get("git_commit"))),
        ("Devices", _counted(rows, device)),
        ("Data", _counted(rows, data)),
        ("Models", _counted(rows, lambda run: run["architecture"])),
        ("This page", [f"brx {brx.__version__}, git commit {git_commit() or 'unknown'}"]),
    ]


def _is_known(value: Any) -> bool:
    """Whether a value of a frame is neither None nor NaN."""
    return value is not None and value == value


def _counted(
    runs: list[dict[str, Any]],
    text: Callable[[dict[str, Any]], object],
) -> list[str]:  # the most frequent first
    texts = (
        pd.Series([text(run) for run in runs], dtype=object)
        .fillna("unknown")
        .replace("", "unknown")
    )
    return [
        f"{text} ({count} {'run' if count == 1 else 'runs'})"
        for text, count in texts.value_counts().items()
    ]


# The runs as the page's browser has them: what can be filtered and sorted by, and thinned loss
# curves.


class Facet(NamedTuple):
    name: str
    title: str
    colors: Mapping[str, str]  # by value, in order


def run_entries(runs: pd.DataFrame, chosen: pd.DataFrame) -> list[dict[str, Any]]:
    """All runs (rows of `load`) in the page's order, as `_entry` has them; `chosen` are at the best
    rates."""
    ordered = _by_method(runs)
    variants = ordered["variant"].drop_duplicates()
    places = variants.groupby(
        variants.map(_base)
    ).cumcount()  # place of a variant among the variants of its method
    dashes = {
        variant: DASHES[place % len(DASHES)]
        for variant, place in zip(variants, places, strict=True)
    }
    texts: dict[str, str] = {}
    entries = []
    # Dictionaries: pandas takes tens of microseconds for each value of a row.
    for path, row in zip(ordered.index, ordered.to_dict("records"), strict=True):
        read = read_run(Path(str(path)))
        settings = _settings_text(read, texts)
        entries.append(_entry(row, read, settings, path in chosen.index, dashes[row["variant"]]))
    return entries


def _settings_text(
    run: Run,
    texts: dict[str, str],  # sections that have been written already, by their content
) -> str:
    """The settings that are no defaults, as YAML. Most sections are equal in many runs, and PyYAML
    takes milliseconds for those of one."""
    text = ""
    for section, values in trajectory_of(run.config, with_defaults=False).items():
        content = f"{section} {values!r}"
        if content not in texts:
            texts[content] = dump_yaml({section: values})
        text += texts[content]
    return text


def comparable_selection(chosen: pd.DataFrame) -> dict[str, str]:
    """What the browser opens with: the deepest pipeline of the model and length that most runs
    there have."""
    if chosen.empty:
        return {}
    deepest = chosen[chosen[DEPTH] == chosen[DEPTH].max()]
    model = deepest["architecture"].mode().iloc[0]
    of_model = deepest[deepest["architecture"] == model]
    length, data = (
        values.mode().iloc[0] for values in (of_model["last_iteration"], _origins(of_model))
    )
    return {
        "stages": f"{deepest[DEPTH].max()}",
        "length": f"{length}",
        "model": model,
        "data": data,
        "chosen": "yes",
    }


def _base(variant: str) -> str:
    return variant.partition(" ")[0]


def facets_of(runs: pd.DataFrame) -> list[Facet]:
    """What runs can be filtered by, with the values that occur."""
    ordered = _by_method(runs)
    variants = ordered["variant"].unique()
    by_method = method_colors(map(_base, variants))
    colors = {variant: by_method[_base(variant)] for variant in variants}
    facets = [Facet("method", "method", colors)]
    for name, (title, column) in ORDERED.items():
        facets.append(
            Facet(name, title, _shades([_text(value) for value in sorted(runs[column].unique())]))
        )
    architectures = runs.sort_values(["model.blocks", "model.width"])["architecture"].unique()
    facets.append(Facet("model", "model", _shades(architectures)))
    return [*facets, Facet("data", "data", _shades(ordered["origin"].unique()))]


def _by_method(runs: pd.DataFrame) -> pd.DataFrame:
    """In the order of the figures' legends, variants after the usual form; then by stages, rate and
    seed."""
    order = list(METHOD_LOOKS)
    rank = runs["method"].map(lambda method: order.index(method) if method in order else len(order))
    runs = runs.assign(rank=rank, origin=_origins(runs))
    return runs.sort_values(["rank", "variant", DEPTH, RATE, SEED, "name"])


def _origins(runs: pd.DataFrame) -> pd.Series:
    """Data and trajectory version: losses of runs that differ there do not compare."""
    # A run without a summary has none.
    versions = runs["trajectory_version"].astype("Int64").astype(str).fillna("unknown")
    return runs["data_fingerprint"].fillna("unknown").str[:8] + ", version " + versions


def _shades(values: Sequence[str]) -> dict[str, str]:
    return {value: to_hex(sequence_color(index, len(values))) for index, value in enumerate(values)}


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _entry(
    row: dict[str, Any], run: Run, settings: str, is_chosen: bool, dash: str
) -> dict[str, Any]:
    ordered = {name: _text(row[column]) for name, (_, column) in ORDERED.items()}
    losses = {f"{name} loss": f"{row[f'{name}_loss']:.3f}" for name in ("train", "val")}
    numbers = losses | {"minutes": f"{row['seconds'] / 60:.1f}"}
    return {
        "name": row["name"],
        "facets": {
            "method": row["variant"],
            **ordered,
            "model": row["architecture"],
            "data": row["origin"],
        },
        "is_chosen": is_chosen,  # its learning rate is the best of those tried
        "status": row["status"],
        "dash": dash,
        # The numbers of the run's row in the table, by heading.
        "numbers": {
            name: text if np.isfinite(float(text)) else "-" for name, text in numbers.items()
        },
        "settings": settings,
        "curves": _curves(run),
    }


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Series for the chart, rounded; null where a loss is not finite: JSON knows no such
    numbers."""
    iterations = run.iterations[run.centres]
    shown = thin_rows(len(iterations), MOST_POINTS)
    series = {
        ("", "train"): (iterations[shown], run.smoothed[shown]),
        ("val_", "val"): (run.val_iterations, run.val_loss),
    }
    chart: dict[str, list[float | None]] = {}
    for (prefix, name), (places, losses) in series.items():
        chart[f"{prefix}iterations"] = places.astype(int).tolist()
        chart[f"{prefix}minutes"] = _rounded(_minutes_at(run, places), 3)
        chart[name] = _rounded(losses, 4)
    return chart


def _minutes_at(
    run: Run,
    iterations: NDArray[np.float64],  # (n,), rising
) -> NDArray[np.float64]:
    """The minutes of training at some iterations; NaN at those without a training loss."""
    if len(run.iterations) == 0:
        return np.full(len(iterations), np.nan)
    places = np.searchsorted(run.iterations, iterations)
    places = np.minimum(places, len(run.iterations) - 1)
    is_there = run.iterations[places] == iterations
    minutes: NDArray[np.float64] = np.where(is_there, run.seconds[places] / 60, np.nan)
    return minutes


def _rounded(values: NDArray[np.float64], digits: int) -> list[float | None]:
    if np.isfinite(values).all():
        return [round(value, digits) for value in values.tolist()]
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]
