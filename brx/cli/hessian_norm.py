"""`brx hessian-norm`: the (1,1)-norm of the training loss's Hessian, in the original and the rotated coordinates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from brx.cli.options import FigurePath, Format, OnlyMeasured, RunsOrCheckpoints
from brx.cli.usage import Application, Command
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.curvature.norm_result import NormResult, Space

EXAMPLES = """\
  brx hessian-norm runs/quick-basis-rotation-p8-s0                     both coordinates, 200 vectors x 160 batches
  brx hessian-norm runs/quick-basis-rotation-p8-s0 --rotated --batches-per-vector 16 --by kind
  brx hessian-norm runs/quick-pipedream-p8-s0 --checkpoint 750 --jobs 2
  brx hessian-norm runs/quick-pipedream-p8-s0 --rotated --basis-batches 100    a basis estimated on the spot
  brx hessian-norm runs/quick-pipedream-p8-s0 --strategies --runs results/laptop    all strategies, and slowdowns
  brx hessian-norm results/laptop-curvature --measured --out figures/hessian-norm   what was measured before

The Hessian is that of the mean loss over one sample of batches, which all vectors share. Stopped with Ctrl-C or by a
crash, the same command continues. The result is kept in RUN/analysis/.
"""

STRATEGY_BASIS_BATCHES = 200

Vectors = Annotated[int, typer.Option(metavar="N", help="Cauchy vectors")]
Batches = Annotated[
    int, typer.Option(metavar="N", min=2, help="batches of the sample whose Hessian it is (even; half shows the bias)")
]
Estimator = Annotated[
    Literal["geometric", "median"],
    typer.Option(help="geometric: one pass, memory of the model's size; median: the original one"),
]
OrGeometric = Annotated[
    bool, typer.Option("--or-geometric", help="use geometric if the median's samples do not fit on disk")
]
Original = Annotated[bool, typer.Option("--original", help="only the original coordinates")]
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
BasisBatches = Annotated[int | None, typer.Option(metavar="N", min=1, help="estimate U and V from N batches")]
Breakdown = Literal["stage", "kind", "none"]
Precision = Annotated[Literal["fp32", "fp64"], typer.Option(help="precision of the Hessian-vector products")]

app = Application()


@app.command(cls=Command, epilog=EXAMPLES)
def hessian_norm(
    runs: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[int | None, typer.Option(metavar="ITERATION", help="which one (default: the newest)")] = None,
    vectors: Vectors = 200,
    batches_per_vector: Batches = 160,
    estimator: Estimator = "geometric",
    or_geometric: OrGeometric = False,
    original: Original = False,
    rotated: Rotated = False,
    strategies: Strategies = False,
    slowdown_runs: SlowdownRuns = None,
    basis_from: BasisFrom = None,
    basis_batches: BasisBatches = None,
    by: Annotated[Breakdown, typer.Option(help="break the sum down")] = "none",
    precision: Precision = "fp32",
    seed: Annotated[int, typer.Option(min=0, help="seed of the vectors")] = 0,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="processes that share the vectors")] = 1,
    measured: OnlyMeasured = False,
    format: Format = "table",
    out: FigurePath = None,
) -> None:
    """Measure and print; exit code 130 when stopped on the way."""
    from brx.curvature.checkpoints import refuse_two_checkpoints, runs_in_place
    from brx.curvature.effective_delay import StrategySlowdowns, strategy_table
    from brx.curvature.norm_measurement import Stopped, measure_runs
    from brx.curvature.norm_result import NORM_TITLE, SPACES, STRATEGY_SPACES, NormSettings, measured_norms, norm_table
    from brx.plot.curvature import draw_norms, draw_strategy_norms
    from brx.runs.checkpoint import run_and_iteration
    from brx.runs.formats import format_table
    from brx.runs.frames import load
    from brx.runs.reading import Run

    _refuse(
        (original + rotated + strategies > 1, "--original, --rotated, --strategies: give one of them, or none"),
        (slowdown_runs is not None and not strategies, "--runs: only with --strategies"),
        (original and (basis_from or basis_batches), "--original: takes no basis; leave out --basis-*"),
        (
            strategies and basis_from,
            "--strategies and --basis-from: give one of the two; a run lends its own basis only",
        ),
        (basis_from and basis_batches, "--basis-from and --basis-batches: give one of the two"),
    )
    refuse_two_checkpoints(runs, checkpoint)
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
        settings = NormSettings(
            vectors=vectors,
            batches_per_vector=batches_per_vector,
            estimator=estimator,
            precision=precision,
            seed=seed,
            basis_from=None if basis_from is None else str(basis_from),
            basis_batches=basis_batches,
        )
        try:
            results = measure_runs(runs, spaces, settings, iteration=checkpoint, jobs=jobs, or_geometric=or_geometric)
        except Stopped as stopped:
            print(f"brx: {stopped}", file=sys.stderr)
            raise typer.Exit(130) from None
    if format == "table":
        print(NORM_TITLE)
    print(format_table(strategy_table(results, delays) if strategies else norm_table(results), format))
    _show_details(results, by, with_paths=format == "table" and not measured)
    if out is not None:
        for written in draw_strategy_norms(results, delays, out) if strategies else draw_norms(results, out):
            print(written, file=sys.stdout if format == "table" else sys.stderr)


def _refuse(*mistakes: tuple[object, str]) -> None:
    """Refuse options that contradict each other."""
    for is_made, message in mistakes:
        if is_made:
            raise UserError(message)


def _show_details(results: Sequence[NormResult], by: Breakdown, *, with_paths: bool) -> None:
    """Print each norm's breakdown, a warning, and where a new one is kept."""
    from brx.curvature.norm_result import breakdown_table, resolution_warning
    from brx.runs.formats import format_table

    for result in results:
        if by != "none":
            print(f"{Path(result.run).name}, {result.space}")
            print(format_table(breakdown_table(result, by), "table"))
        if warning := resolution_warning(result):
            print(f"brx: warning: {Path(result.run).name}, {warning}", file=sys.stderr)
        if with_paths:
            print(result.path_in(Path(result.run)))
