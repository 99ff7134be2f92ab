"""Curvature of the loss at checkpoints: `brx hessian-norm`, `brx effective-delay` and `brx
oscillation`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from brx.cli.options import (
    FigurePath,
    Format,
    OnlyMeasured,
    RunsOrCheckpoints,
    RunsOrFolders,
    Strict,
    flag,
    option,
)
from brx.cli.usage import Application, print_note, print_table, refuse, refuse_settings

if TYPE_CHECKING:
    from brx.curvature.norm_result import NormResult, Space
    from brx.runs.formats import Format as TableFormat

Breakdown = Literal["stage", "kind", "none"]

app = Application()


@app.add("""\
  # original and rotated coordinates, 200 vectors x 160 batches
  brx hessian-norm runs/quick-basis-rotation-p8-s0
  # fewer batches, and the share of each kind of parameter
  brx hessian-norm runs/quick-basis-rotation-p8-s0 --rotated \\
      --batches-per-vector 16 --by kind
  # estimate the basis now
  brx hessian-norm runs/quick-pipedream-p8-s0 --rotated --basis-batches 100
  # the coordinates of all four strategies, and the slowdowns of their runs
  brx hessian-norm runs/quick-pipedream-p8-s0 --strategies \\
      --runs results/similar
  # show what was measured before
  brx hessian-norm results/similar-curvature --measured \\
      --out figures/hessian-norm

All vectors share one sample of batches: the Hessian is that of their mean
loss. The results are kept in RUN/analysis/. After Ctrl-C or a crash, the
same command continues.
""")
def hessian_norm(
    context: typer.Context,
    runs: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[
        int | None, option("ITERATION", "the checkpoint to measure at (default: the newest)")
    ] = None,
    vectors: Annotated[int, option("N", "number of Cauchy vectors")] = 200,
    batches_per_vector: Annotated[
        int, option("N", "number of batches; the Hessian is that of their mean loss (even)", min=2)
    ] = 160,
    original: Annotated[bool, flag("--original", "only the original coordinates")] = False,
    rotated: Annotated[
        bool, flag("--rotated", "only the rotated coordinates (default: both, if there is a basis)")
    ] = False,
    strategies: Annotated[
        bool,
        flag(
            "--strategies",
            "original coordinates and those of all four strategies; bases estimated from "
            "--basis-batches batches (default here: 200)",
        ),
    ] = False,
    slowdown_runs: Annotated[
        Path | None, option("DIR", "with --strategies: add the slowdowns of these runs", "--runs")
    ] = None,
    basis_from: Annotated[
        Path | None, option("RUN", "take the basis (U and V) from another run of the same model")
    ] = None,
    basis_batches: Annotated[
        int | None, option("N", "estimate the basis (U and V) from N batches", min=1)
    ] = None,
    by: Annotated[Breakdown, typer.Option(help="also break the norm down by this")] = "none",
    precision: Annotated[
        Literal["fp32", "fp64"], typer.Option(help="precision of the Hessian-vector products")
    ] = "fp32",
    seed: Annotated[int, option("N", "seed of the vectors", min=0)] = 0,
    jobs: Annotated[int, option("N", "processes that share the vectors", min=1)] = 1,
    measured: OnlyMeasured = False,
    format: Format = "table",
    out: FigurePath = None,
) -> None:
    """Measure and print; exit code 130 when stopped on the way."""
    from brx.curvature.effective_delay import strategy_slowdowns, strategy_table
    from brx.curvature.norm_measurement import measure_runs
    from brx.curvature.norm_result import (
        NORM_TITLE,
        SPACES,
        STRATEGY_BASIS_BATCHES,
        NormSettings,
        measured_norms,
    )
    from brx.plot.curvature import draw_norms, draw_strategy_norms
    from brx.runs.frames import load
    from brx.runs.measured import refuse_two_checkpoints

    refuse(slowdown_runs is not None and not strategies, "--runs: only with --strategies")
    refuse(
        by != "none" and format in ("csv", "json"),
        f"--by {by}: prints several tables, and {format} holds one; leave one of the two out",
    )
    _check_basis(original, strategies, basis_from, basis_batches)
    if measured:
        refuse_settings(context, [*NormSettings.model_fields, "jobs"])
    refuse_two_checkpoints(runs, checkpoint)
    spaces = _spaces(original, rotated, strategies)
    if strategies:
        basis_batches = basis_batches or STRATEGY_BASIS_BATCHES
    slowdowns = None
    if slowdown_runs is not None:
        slowdowns = strategy_slowdowns(load([slowdown_runs]))
    if measured:
        results = measured_norms(runs, spaces or SPACES, checkpoint)
    else:
        settings = NormSettings(
            vectors=vectors,
            batches_per_vector=batches_per_vector,
            precision=precision,
            seed=seed,
            basis_from=None if basis_from is None else str(basis_from),
            basis_batches=basis_batches,
        )
        results = measure_runs(runs, spaces, settings, iteration=checkpoint, jobs=jobs)
    print_table(strategy_table(results, slowdowns), format, NORM_TITLE)
    _print_details(results, by, format, with_paths=format == "table" and not measured)
    if out is not None:
        drawn = (
            draw_strategy_norms(results, slowdowns, out) if strategies else draw_norms(results, out)
        )
        # With csv and json, stdout holds the table alone.
        print(*drawn, sep="\n", file=sys.stdout if format == "table" else sys.stderr)


def _check_basis(
    original: bool, strategies: bool, basis_from: Path | None, basis_batches: int | None
) -> None:
    """Raise a UserError if a basis is given where none is used, or given in two ways."""
    refuse(
        original and (basis_from or basis_batches),
        "--original: takes no basis; leave out --basis-*",
    )
    for other, is_given in (("--strategies", strategies), ("--basis-batches", basis_batches)):
        refuse(basis_from and is_given, f"--basis-from and {other}: give one of the two")


def _spaces(original: bool, rotated: bool, strategies: bool) -> Sequence[Space] | None:
    """The coordinates to measure in. None means the original ones, and the rotated ones if there is
    a basis. UserError if two choices are given."""
    from brx.curvature.norm_result import STRATEGY_SPACES

    refuse(
        [original, rotated, strategies].count(True) > 1,
        "--original, --rotated, --strategies: give one of them, or none",
    )
    if original:
        return ["original"]
    if rotated:
        return ["rotated"]
    if strategies:
        return STRATEGY_SPACES
    return None


def _print_details(
    results: Sequence[NormResult], by: Breakdown, format: TableFormat, *, with_paths: bool
) -> None:
    """Print for each norm: its breakdown if one is asked for, a warning if many rows lie below the
    resolution of the precision, and with `with_paths` the file that holds it."""
    from brx.curvature.norm_result import breakdown_table, resolution_warning

    for result in results:
        run = Path(result.run)
        if by != "none":
            print_table(breakdown_table(result, by), format, f"{run.name}, {result.space}")
        if warning := resolution_warning(result):
            print(f"brx: warning: {run.name}, {warning}", file=sys.stderr)
        if with_paths:
            print(result.path_in(run))


@app.add("""\
  # first measure the norms
  brx hessian-norm runs/quick-basis-rotation-p8-s0
  brx effective-delay runs/quick-basis-rotation-p8-s0 --stages 1 2 4 8
  # with the slowdowns of all these runs
  brx effective-delay runs/quick-* --out figures/effective-delay
""")
def effective_delay(
    runs: RunsOrFolders,
    *,
    stages: Annotated[
        list[int] | None,
        option("P...", "numbers of stages (default: powers of two up to the number of blocks)"),
    ] = None,
    strict: Strict = False,
    out: FigurePath = None,
) -> None:
    from brx.curvature import effective_delay as delays
    from brx.curvature.norm_result import measured_norms
    from brx.plot.curvature import draw_effective_delay
    from brx.runs.aspects import differences
    from brx.runs.folder import stop_at_damage
    from brx.runs.frames import load

    stop_at_damage(strict)
    loaded = load(runs)
    measured = measured_norms(runs)
    print_note(*differences(loaded))
    counts = stages or delays.usual_stages(measured)
    curves = []
    for result in measured:
        by_count = [delays.effective_delay(result, count) for count in counts]
        curves.append((result, by_count))
    points, lacking = delays.measured_points(loaded, measured)
    print_table(delays.delay_table(curves))
    if len(points):
        print_table(delays.profile_table(points))
    else:
        print_note(f"no slowdowns: {lacking}")
    if out is not None:
        print(*draw_effective_delay(curves, points, out), sep="\n")


@app.add("""\
  # two methods
  brx oscillation runs/quick-pipedream-p8-s0 runs/quick-basis-rotation-p8-s0 \\
      --out figures/oscillation
  # several checkpoints, methods and seeds
  brx oscillation runs/*-p32-*/checkpoints/00016000 --out figures/oscillation
  # show what was measured before
  brx oscillation results/laptop-curvature --measured \\
      --out figures/oscillation
""")
def oscillation(
    context: typer.Context,
    checkpoints: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[
        int | None,
        option("ITERATION", "checkpoint of each run (default: nearest to its middle)"),
    ] = None,
    iterations: Annotated[int, option("N", "training iterations to follow", min=2)] = 100,
    batches: Annotated[
        int, option("N", "number of batches; the Hessian is that of their mean loss", min=1)
    ] = 64,
    tolerance: Annotated[
        float, option("RESIDUAL", "stop the power iteration at this residual")
    ] = 1e-2,
    power_iterations: Annotated[
        int, option("N", "stop the power iteration after this many steps at the latest", min=1)
    ] = 200,
    seed: Annotated[
        int,
        option("N", "seed of the start vector and the random direction", min=0, max=2**63 - 1),
    ] = 0,
    measured: OnlyMeasured = False,
    out: FigurePath = None,
) -> None:
    from brx.curvature.oscillation import (
        OscillationSettings,
        measure_oscillation,
        oscillation_table,
        oscillations_in,
        refuse_mixed,
        refuse_mixed_rates,
    )
    from brx.plot.curvature import draw_oscillation
    from brx.progress import tell
    from brx.runs.checkpoint import run_and_iteration
    from brx.runs.measured import refuse_two_checkpoints

    refuse_two_checkpoints(checkpoints, checkpoint)
    refuse(not tolerance > 0, f"--tolerance {tolerance}: must be above 0")
    if measured:
        refuse_settings(context, OscillationSettings.model_fields)
        results = oscillations_in(checkpoints, checkpoint)
    else:
        settings = OscillationSettings(
            iterations=iterations,
            batches=batches,
            tolerance=tolerance,
            power_iterations=power_iterations,
            seed=seed,
        )
        results = []
        for place in checkpoints:
            run, iteration = run_and_iteration(place)
            result = measure_oscillation(
                run,
                iteration=iteration or checkpoint,
                settings=settings,
                report=tell,
            )
            results.append(result)
    print_table(oscillation_table(results))
    print("share: the part of the updates' squared norm that lies along the direction")
    if out is not None:
        refuse_mixed(results)
        refuse_mixed_rates(checkpoints)
        print(*draw_oscillation(results, out), sep="\n")
