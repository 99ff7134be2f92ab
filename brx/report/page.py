"""One HTML file with everything in it: figures, tables, runs, and the library that draws the runs' curves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from brx.errors import UserError
from brx.files import write_text
from brx.paper.scales import Experiments
from brx.report.drawings import further_drawings, paper_drawings
from brx.report.page_tables import page_tables
from brx.report.provenance import provenance
from brx.report.run_browser import facets_of, run_entries
from brx.runs.frames import DEPTH


def write_report(experiments: Experiments, figure_folders: list[Path], path: Path) -> None:
    """Write the page.

    Args:
        experiments: the runs of a scale.
        figure_folders: with further figures, drawn by other commands.
        path: of the HTML file.

    Raises:
        UserError: the packages of the extra `report` are missing.
        RunError: the file cannot be written.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(f"the report needs the package {error.name}: pip install 'brx[report]'") from None

    runs = experiments.runs
    drawings, undrawn = paper_drawings(experiments)
    entries, facets = run_entries(runs, experiments.chosen), facets_of(runs)
    environment = Environment(
        loader=PackageLoader("brx.report", "template"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    page = environment.get_template("page.html").render(
        scale=experiments.scale.name,
        deepest=str(runs[DEPTH].max()),
        drawings=[*drawings, *further_drawings(figure_folders)],
        undrawn=undrawn,
        tables=page_tables(experiments),
        facts=provenance(runs),
        runs=entries,
        facets=facets,
        run_data={
            "facets": {facet.name: dict(facet.colors) for facet in facets},
            "runs": [asdict(entry) for entry in entries],
        },
        plotly=get_plotlyjs(),
    )
    write_text(path, page)
