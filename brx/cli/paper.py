"""The paper's results: `brx demo`, `plot` (also of any runs), `tables`, `claims`, `report` and
`toy`."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from brx.cli.options import (
    FORMATS,
    Format,
    Overrides,
    ScaleName,
    ScaleRuns,
    Strict,
    argument,
    completing,
    figure_option,
    option,
    refuse_other_formats,
)
from brx.cli.usage import Application, print_note, print_table, refuse
from brx.errors import UserError, did_you_mean
from brx.files import make_folder, replacing

OF_ANY_RUNS = ("curves", "staleness", "profiles")
"""Figures that are drawn from any runs, unlike the paper's."""
FURTHER = {"latex": ".tex", "json": ".json"}
"""The formats of a table's file that is written only if it is asked for, with its suffix."""
complete_table = completing("brx.paper.tables", "TABLES", "all", "list")

app = Application()


@app.add("""\
  brx demo
  # a shorter one
  brx demo --out runs/demo --set training.iterations=300
""")
def demo(
    *,
    out: Annotated[Path, option("DIR", "folder of the runs and the figure")] = Path("runs/demo"),
    overrides: Overrides,
) -> None:
    from brx.paper.demo import run_demo

    if run_demo(out, overrides) == "interrupted":
        print_note("call brx demo again to continue")
        raise typer.Exit(130)


@app.add("""\
  # training losses of any runs
  brx plot curves runs/quick-*
  # what delay did to a run that was trained with logging.staleness_every
  brx plot staleness runs/mine
  # slowdown against effective delay, for runs with other delay profiles
  brx plot profiles runs/profiles
  # a figure of the paper, from results/similar into figures/similar
  brx plot main
  # into one file
  brx plot "Figure 5" --out main.svg
  # list the figures
  brx plot list
""")
def plot(
    figure: Annotated[
        str,
        argument(
            "FIGURE",
            "curves, staleness, profiles, all, list, or one of the paper's figures by name or "
            "number ('Figure 5')",
            autocompletion=completing("brx.paper.figures", "FIGURES", *OF_ANY_RUNS, "all", "list"),
        ),
    ],
    folders: Annotated[
        list[Path] | None, argument("RUN", "folders of runs (for curves, staleness and profiles)")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        option(
            "PATH",
            "one file (x.png, x.pdf, x.svg); or, for curves, staleness and profiles, the path "
            "without suffix (default: the figure's name); or, for figures of the paper, a folder "
            "(default: figures/SCALE, or figures if they need no sweep)",
        ),
    ] = None,
    scale: ScaleName = "similar",
    runs: ScaleRuns = None,
    strict: Strict = False,
) -> None:
    from brx.runs.folder import stop_at_damage

    stop_at_damage(strict)

    if figure == "list":
        _list_figures(folders)
        return
    _check_request(figure, folders, out, runs)

    def draw(where: Path | None) -> Iterable[Path]:
        """Draw to `where`: the path without suffix for figures of any runs, else a folder."""
        if folders:
            return _of_runs(figure, folders, where)
        # Imported here because it loads torch and scipy, which takes seconds.
        from brx.paper.figures import draw_figures

        return draw_figures(figure, scale, runs, where, print_note)

    if out is not None and _is_file(out):
        _draw_one_file(figure, draw, out)
        return
    for path in draw(out):
        print(path)


def _list_figures(folders: list[Path] | None) -> None:
    """Print the paper's figures, a line each; UserError if runs are given."""
    from brx.paper.figures import FIGURES

    refuse(folders, "RUN: list takes no runs")
    for entry in FIGURES.values():
        print(f"{entry.name:24}{entry.place:13}{entry.caption}")


def _is_file(out: Path) -> bool:
    """Whether a path names one file of a figure, rather than a folder or a path without suffix."""
    return out.suffix.lower() in FORMATS


def _check_request(
    figure: str, folders: list[Path] | None, out: Path | None, runs: Path | None
) -> None:
    """Raise a UserError if the figure, its runs and where to draw it do not fit together."""
    if out is not None:
        refuse_other_formats("--out", out)
    is_of_any_runs = figure in OF_ANY_RUNS
    refuse(is_of_any_runs and not folders, "RUN: name at least one run's folder")
    refuse(
        is_of_any_runs and runs is not None,
        f"--runs: {figure} takes its runs as arguments, after its name",
    )
    if folders and not is_of_any_runs:
        from brx.paper.figures import FIGURES
        from brx.paper.tables import entries

        # Raises a UserError of its own if the figure is unknown, which the user should read first.
        entries(figure, FIGURES, "figure", ", ".join(OF_ANY_RUNS))
        raise UserError(
            f"RUN: only {', '.join(OF_ANY_RUNS)} take runs as arguments; for {figure}, name "
            f"their folder with --runs"
        )
    refuse(
        figure == "all" and out is not None and _is_file(out),
        f"--out {out}: a file holds one figure; name a folder for all",
    )


def _draw_one_file(figure: str, draw: Callable[[Path], Iterable[Path]], out: Path) -> None:
    """Draw a figure in all formats into a temporary folder, and copy the one that is asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        if figure in OF_ANY_RUNS:
            where = where / "figure"
        first = next(iter(draw(where)))
        image = first.with_suffix(out.suffix.lower()).read_bytes()
    make_folder(out.parent)
    with replacing(out) as file:
        file.write(image)
    print(out)


def _of_runs(figure: str, folders: list[Path], out: Path | None) -> list[Path]:
    """Draw one of `OF_ANY_RUNS`; returns the files written.

    `out` is the path without suffix, by default the figure's name in the working folder."""
    from brx.runs.aspects import comparable, differences, first_names, left_out
    from brx.runs.frames import load

    path = out or Path(figure)
    if figure == "staleness":
        from brx.plot.any_runs import draw_staleness

        return draw_staleness(folders, path)
    frame = load(folders)
    if figure == "profiles":
        from brx.curvature.effective_delay import profile_points
        from brx.plot.curvature import draw_profiles

        shown, *others = comparable(frame)
        for aspects, runs_of_another in left_out(shown, others).items():
            print_note(
                f"left out, different from the rest in {aspects}: "
                f"{', '.join(runs_of_another['name'])}"
            )
        return draw_profiles(profile_points(shown), path)
    from brx.plot.any_runs import draw_curves

    has_losses = frame["iteration"] > 0
    if has_losses.any() and not has_losses.all():
        names = first_names(list(frame.index[~has_losses]))
        print_note(f"left out, since no loss of theirs was written: {names}")
        frame = frame[has_losses]
    print_note(*differences(frame))
    return draw_curves(frame, path)


@app.add("""\
  # print one
  brx tables slowdown
  # for a paper
  brx tables "Table 3" --format latex
  # write all of them as Markdown and CSV
  brx tables all --out results/tables/similar
  # list the tables
  brx tables list
""")
def tables(
    table: Annotated[
        str,
        argument(
            "TABLE",
            "all, list, or a table by name or number ('Table 3')",
            autocompletion=complete_table,
        ),
    ],
    *,
    scale: ScaleName = "similar",
    runs: ScaleRuns = None,
    format: Format = "table",
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "write TABLE.md and TABLE.csv there (with --format latex or json also TABLE.tex or "
            "TABLE.json)",
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    from brx.files import write_text
    from brx.paper.tables import TABLES, make_tables, write_table
    from brx.runs.folder import stop_at_damage
    from brx.runs.formats import format_table

    stop_at_damage(strict)

    if table == "list":
        for entry in TABLES.values():
            print(f"{entry.name:20}{entry.place:13}{entry.title}")
        return
    for paper_table, texts in make_tables(table, scale, runs, print_note):
        if out is None:
            print_table(texts, format, paper_table.title)
            continue
        print(write_table(paper_table, texts, out))
        if format in FURTHER:
            path = out / f"{paper_table.name}{FURTHER[format]}"
            write_text(path, format_table(texts, format) + "\n")


@app.add("""\
  # all claims, from results/similar
  brx claims
  # one claim, with the runs behind it
  brx claims main-reduction
  # from runs that are still in progress
  brx claims --runs runs/similar --format csv

Each claim has two verdicts: strict and first. docs/protocol.md has their rules:
section 11 for the strict one, sections 5 and 6 for the first one.
""")
def claims(
    claim: Annotated[str | None, argument("CLAIM", "a claim, by name (default: all)")] = None,
    *,
    scale: ScaleName = "similar",
    runs: ScaleRuns = None,
    format: Format = "table",
    strict: Strict = False,
) -> None:
    from brx.paper.claims import CLAIMS, claim_table, judge, verdict_counts
    from brx.paper.scales import SCALES, Experiments
    from brx.runs.folder import stop_at_damage

    stop_at_damage(strict)

    asked = [known for known in CLAIMS if claim in (None, known.name)]
    names = [known.name for known in CLAIMS]
    hint = did_you_mean(claim or "", names)
    refuse(not asked, f"CLAIM: unknown claim '{claim}'{hint} (known: {', '.join(names)})")
    experiments = Experiments.load(SCALES[scale], runs)
    print_note(*experiments.notes)
    outcomes = judge(experiments, asked)
    table = claim_table(outcomes, experiments.scale)
    if claim is not None and format != "table":
        print_table(table, format)
        return
    if claim is None:
        shown = table.assign(first=table["first"] + ": " + table["here"])
        columns = ["claim", "paper", "strict", "first"]
        print_table(shown[columns] if format == "table" else table, format)
        print_note(
            *verdict_counts(outcomes), "`brx claims NAME` shows a claim's statement and runs"
        )
        return
    for heading, text in table.iloc[0].items():
        print(f"{heading + ':':12} {text}")
    for run in outcomes[0].runs:
        print(f"{'':12} {run}")


@app.add("""\
  # report.html from the runs in results/similar
  brx report
  # from runs that are still in progress, or any others
  brx report --runs runs/similar --out today.html
""")
def report(
    *,
    scale: ScaleName = "similar",
    runs: ScaleRuns = None,
    figures: Annotated[
        list[Path] | None,
        option(
            "DIR...",
            "folders with figures of other commands, to include (default: figures and "
            "figures/SCALE)",
        ),
    ] = None,
    out: Annotated[Path, option("FILE", "where to write the page")] = Path("report.html"),
    strict: Strict = False,
) -> None:
    from brx.paper.scales import SCALES, Experiments
    from brx.report.page import write_report
    from brx.runs.folder import stop_at_damage

    stop_at_damage(strict)
    for folder in figures or []:
        refuse(not folder.is_dir(), f"--figures: {folder}: no such folder")
    refuse(out.is_dir(), f"--out {out}: is a folder; name the page's file")
    experiments = Experiments.load(SCALES[scale], runs)
    write_report(experiments, figures or [Path("figures"), Path("figures") / scale], out)
    print_note(*experiments.notes)
    print(out)


@app.add("""\
  # AdaSGD and Adam on an aligned and a misaligned quadratic
  brx toy quadratic
  # the spiral as the paper states it
  brx toy spiral
  # with steps that are small enough to reach the end
  brx toy spiral configs/toy/spiral-small-steps.yaml
  # slowdown over angle and delay, and the (1,1)-norm
  brx toy sweep

NAME is the name of the configuration. The figure is figures/toy-NAME, and its
numbers are in results/toy/NAME.json.
""")
def toy(
    landscape: Annotated[
        Literal["quadratic", "spiral", "sweep"], argument("LANDSCAPE", "quadratic, spiral or sweep")
    ],
    config: Annotated[
        Path | None, argument("CONFIG", "settings (default: configs/toy/LANDSCAPE.yaml)")
    ] = None,
    *,
    out: Annotated[
        Path | None,
        figure_option("path of the figure, without suffix (default: figures/toy-NAME)"),
    ] = None,
    json: Annotated[
        Path | None, option("FILE", "where to write the numbers (default: results/toy/NAME.json)")
    ] = None,
) -> None:
    from brx.toy.run import run_toy

    name = config.stem if config else landscape
    figure = out or Path("figures") / f"toy-{name}"
    written = run_toy(landscape, figure, config, json or Path("results") / "toy" / f"{name}.json")
    print(figure.with_name(f"{figure.name}.txt").read_text(encoding="utf-8"), end="")
    print(*written, sep="\n")
