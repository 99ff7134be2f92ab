"""`brx hessian-norm`: the (1,1)-norm of the training loss's Hessian, in the original and the rotated coordinates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from brx.cli.options import FigurePath, Format, RunsOrCheckpoints, TableFormat
from brx.cli.usage import Application, Command
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.curvature.norm_result import NormResult
    from brx.curvature.strategies import StrategySlowdowns

EXAMPLES = """\
  brx hessian-norm runs/quick-basis-rotation-p8-s0                     both coordinates, 200 vectors x 40 batches
  brx hessian-norm runs/quick-basis-rotation-p8-s0 --rotated --batches-per-vector 4 --by kind
  brx hessian-norm runs/quick-pipedream-p8-s0 --checkpoint 750 --jobs 2
  brx hessian-norm runs/quick-pipedream-p8-s0 --rotated --basis-batches 100    a basis estimated on the spot
  brx hessian-norm runs/quick-pipedream-p8-s0 --strategies --runs results/laptop    all strategies, and slowdowns
  brx hessian-norm results/laptop-curvature --measured --out figures/hessian-norm   what was measured before

The paper's 8,000 batches with 200 vectors are read as 200 vectors with 40 batches each. Stopped with Ctrl-C or by a
crash, the same command continues. The result is kept in RUN/analysis/.
"""

STRATEGY_BASIS_BATCHES = 200

Estimator = Annotated[
    Literal["geometric", "median"],
    typer.Option(help="geometric: unbiased, one pass, memory of the model's size; median: the original one"),
]
OrGeometric = Annotated[
    bool, typer.Option("--or-geometric", help="use geometric if the median's samples do not fit on disk")
]
Rotated = Annotated[bool, typer.Option("--rotated", help="only the rotated ones (default: both, if there is a basis)")]
Strategies = Annotated[
    bool,
    typer.Option(
        "--strategies",
        help="the original coordinates and those of all four strategies, each basis estimated from the gradients of"
        " --basis-batches (default: 200) at the checkpoint's weights",
    ),
]
SlowdownRuns = Annotated[
    Path | None,
    typer.Option("--runs", metavar="DIR", help="with --strategies: put each strategy's slowdown there beside it"),
]
BasisFrom = Annotated[Path | None, typer.Option(metavar="RUN", help="take U and V from another run of the same model")]
Breakdown = Literal["stage", "kind", "none"]
Measured = Annotated[
    bool,
    typer.Option(
        "--measured",
        help="measure nothing: show what lies in RUN/analysis; a folder of runs will do (needs no checkpoint)",
    ),
]

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def hessian_norm(
    runs: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[int | None, typer.Option(metavar="ITERATION", help="which one (default: the newest)")] = None,
    vectors: Annotated[int, typer.Option(metavar="N", help="Cauchy vectors")] = 200,
    batches_per_vector: Annotated[
        int, typer.Option(metavar="N", min=1, help="batches that a product is a mean over")
    ] = 40,
    estimator: Estimator = "geometric",
    or_geometric: OrGeometric = False,
    original: Annotated[bool, typer.Option("--original", help="only the original coordinates")] = False,
    rotated: Rotated = False,
    strategies: Strategies = False,
    slowdown_runs: SlowdownRuns = None,
    basis_from: BasisFrom = None,
    basis_batches: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="estimate U and V from N batches")
    ] = None,
    by: Annotated[Breakdown, typer.Option(help="break the sum down")] = "none",
    precision: Annotated[
        Literal["fp32", "fp64"], typer.Option(help="precision of the Hessian-vector products")
    ] = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="seed of the vectors")] = 0,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="processes that share the vectors")] = 1,
    measured: Measured = False,
    format: Format = "table",
    out: FigurePath = None,
) -> None:
    """Measure and print; exit code 130 when stopped on the way."""
    from brx.curvature.norm_measurement import NormSettings, Stopped, measure_runs
    from brx.curvature.norm_result import SPACES, STRATEGY_SPACES, Space, measured_norms
    from brx.curvature.places import refuse_two_checkpoints, runs_in_place
    from brx.curvature.strategies import StrategySlowdowns
    from brx.runs.checkpoint import run_and_iteration
    from brx.runs.frames import load
    from brx.runs.reading import Run

    if original + rotated + strategies > 1:
        raise UserError("--original, --rotated, --strategies: give one of them, or none for the first two")
    if slowdown_runs is not None and not strategies:
        raise UserError("--runs: only with --strategies")
    refuse_two_checkpoints(runs, checkpoint)
    if original and (basis_from is not None or basis_batches is not None):
        raise UserError("--original: takes no basis; leave out --basis-from and --basis-batches")
    _check_basis(basis_from, basis_batches, strategies=strategies)
    spaces: Sequence[Space] | None = ["original"] if original else ["rotated"] if rotated else None
    if strategies:
        spaces, basis_batches = STRATEGY_SPACES, basis_batches or STRATEGY_BASIS_BATCHES
    delays = None if slowdown_runs is None else StrategySlowdowns.of(load([slowdown_runs]))
    if measured:
        places = runs_in_place(runs)
        for path in places:
            Run.load(run_and_iteration(path)[0])  # refuses what is no run
        results = measured_norms(places, spaces or SPACES, checkpoint)
    else:
        basis_run = None if basis_from is None else str(basis_from)
        settings = NormSettings(vectors, batches_per_vector, estimator, precision, seed, basis_run, basis_batches)
        try:
            results = measure_runs(runs, spaces, settings, iteration=checkpoint, jobs=jobs, or_geometric=or_geometric)
        except Stopped as stopped:
            print(f"brx: {stopped}", file=sys.stderr)
            raise typer.Exit(130) from None
    _show(results, delays, format, by, strategies=strategies, measured=measured)
    if out is not None:
        _draw(results, delays, out, sys.stdout if format == "table" else sys.stderr, strategies=strategies)


def _check_basis(basis_from: Path | None, basis_batches: int | None, *, strategies: bool) -> None:
    if strategies and basis_from is not None:
        raise UserError("--strategies and --basis-from: give one of the two; a run lends its own strategy's basis only")
    if basis_from is not None and basis_batches is not None:
        raise UserError("--basis-from and --basis-batches: give one of the two")


def _show(
    results: Sequence[NormResult],
    delays: StrategySlowdowns | None,
    format: TableFormat,
    by: Breakdown,
    *,
    strategies: bool,
    measured: bool,
) -> None:
    """Print the table of norms, then of each its breakdown, a warning, and where a new one is kept."""
    from rich.console import Console

    from brx.curvature.norm_result import result_path
    from brx.curvature.norm_tables import NORM_TITLE, breakdown_table, norm_table, resolution_warning
    from brx.curvature.strategies import strategy_table
    from brx.runs.formats import format_table

    if format == "table":
        print(NORM_TITLE)
    print(format_table(strategy_table(results, delays) if strategies else norm_table(results), format))
    console = Console()
    for result in results:
        if by != "none":
            console.print(breakdown_table(result, by))
        if warning := resolution_warning(result):
            print(f"brx: warning: {Path(result.run).name}, {warning}", file=sys.stderr)
        if format == "table" and not measured:
            print(result_path(Path(result.run), result.space, result.iteration))


def _draw(
    results: Sequence[NormResult], delays: StrategySlowdowns | None, path: Path, stream: TextIO, *, strategies: bool
) -> None:
    """Draw the figure; its files are named on `stream`."""
    from brx.plot.curvature import draw_norms
    from brx.plot.strategies import draw_strategy_norms

    for written in draw_strategy_norms(results, delays, path) if strategies else draw_norms(results, path):
        print(written, file=stream)
