"""`brx hessian-norm`: the (1,1)-norm of the training loss's Hessian, in the original and the rotated coordinates."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brx.curvature.norm_result import NormResult

HELP = "measure basis misalignment: the (1,1)-norm of the Hessian at a checkpoint, per parameter"
EXAMPLES = """\
  brx hessian-norm runs/quick-basis-rotation-p8-s0                     both coordinates, 200 vectors x 40 batches
  brx hessian-norm runs/quick-basis-rotation-p8-s0 --rotated --batches-per-vector 4 --by kind
  brx hessian-norm runs/quick-pipedream-p8-s0 --checkpoint 750 --jobs 2
  brx hessian-norm runs/quick-pipedream-p8-s0 --rotated --basis-batches 100    a basis estimated on the spot
  brx hessian-norm results/curvature/*-p? --measured --out figures/hessian-norm   what was measured before

The paper's 8,000 batches with 200 vectors are read as 200 vectors with 40 batches each. Stopped with Ctrl-C or by a
crash, the same command continues. The result is kept in RUN/analysis/.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--checkpoint", type=int, metavar="ITERATION", help="which one (default: the newest)")
    parser.add_argument("--vectors", type=int, default=200, help="Cauchy vectors (default: 200)")
    parser.add_argument(
        "--batches-per-vector", type=int, default=40, help="batches that a product is a mean over (default: 40)"
    )
    parser.add_argument(
        "--estimator",
        choices=["geometric", "median"],
        default="geometric",
        help="geometric: unbiased, one pass, memory of the model's size; median: the original one (default: geometric)",
    )
    parser.add_argument(
        "--or-geometric", action="store_true", help="switch to it where the median does not fit on disk"
    )
    space = parser.add_mutually_exclusive_group()
    space.add_argument("--original", action="store_true", help="only the original coordinates")
    space.add_argument(
        "--rotated", action="store_true", help="only the rotated ones (default: both, if there is a basis)"
    )
    basis = parser.add_mutually_exclusive_group()
    basis.add_argument("--basis-from", type=Path, metavar="RUN", help="take U and V from another run of the same model")
    basis.add_argument("--basis-batches", type=int, metavar="N", help="estimate U and V from N batches")
    parser.add_argument("--by", choices=["stage", "kind", "none"], default="none", help="break the sum down")
    parser.add_argument("--precision", choices=["fp32", "fp64"], default="fp32", help="of the products (default: fp32)")
    parser.add_argument("--seed", type=int, default=0, help="of the vectors (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that share the vectors (default: 1)"
    )
    parser.add_argument(
        "--measured", action="store_true", help="measure nothing: show what lies in RUN/analysis (needs no checkpoint)"
    )
    parser.add_argument("--format", choices=["table", "markdown", "csv", "json"], default="table", help="of the norms")
    parser.add_argument("--out", type=Path, help="draw the figure, at this path without suffix")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 130 when stopped on the way."""
    import sys

    from rich.console import Console

    from brx.curvature.norm_measurement import Stopped
    from brx.curvature.norm_result import result_path
    from brx.curvature.norm_tables import NORM_TITLE, breakdown_table, norm_rows, resolution_warning
    from brx.runs.formats import format_table

    try:
        results = _measured(args) if args.measured else _measure(args)
    except Stopped as stopped:
        print(f"brx: {stopped}", file=sys.stderr)
        return 130
    if args.format == "table":
        print(NORM_TITLE)
    print(format_table(*norm_rows(results), args.format))
    console = Console()
    for result in results:
        if args.by != "none":
            console.print(breakdown_table(result, args.by))
        if warning := resolution_warning(result):
            print(f"brx: warning: {Path(result.run).name}, {warning}", file=sys.stderr)
        if args.format == "table" and not args.measured:
            print(result_path(Path(result.run), result.space, result.iteration))
    if args.out is not None:
        from brx.plot.curvature import draw_norms

        for written in draw_norms(results, args.out):
            print(written, file=sys.stderr if args.format != "table" else sys.stdout)
    return 0


def _measure(args: argparse.Namespace) -> list[NormResult]:
    """One measurement for each run and coordinates, made now or read again if it has been."""
    from brx.curvature.norm_measurement import NormSettings, measure
    from brx.curvature.norm_result import Space

    _check_at_least_one(args, "batches_per_vector", "basis_batches", "jobs")
    settings = NormSettings(
        vectors=args.vectors,
        batches_per_vector=args.batches_per_vector,
        estimator=args.estimator,
        precision=args.precision,
        seed=args.seed,
    )
    basis_from = None if args.basis_from is None else str(args.basis_from)
    rotated = replace(settings, basis_from=basis_from, basis_batches=args.basis_batches)
    own_basis = args.basis_from is None and args.basis_batches is None
    results = []
    for run_folder in args.runs:
        spaces: list[Space] = ["original"] if not args.rotated else []
        if args.rotated or not (args.original or (own_basis and not _has_basis(run_folder))):
            spaces.append("rotated")
        for space in spaces:
            results.append(
                measure(
                    run_folder,
                    space,
                    rotated if space == "rotated" else settings,
                    iteration=args.checkpoint,
                    jobs=args.jobs,
                    or_geometric=args.or_geometric,
                )
            )
    return results


def _measured(args: argparse.Namespace) -> list[NormResult]:
    """What has been measured of these runs before, at the latest checkpoint."""
    from brx.curvature.norm_result import SPACES, measured_norms
    from brx.runs.reading import Run

    left_out = "rotated" if args.original else "original" if args.rotated else None
    runs = [Run.load(path).path for path in args.runs]
    return measured_norms(runs, [space for space in SPACES if space != left_out])


def _has_basis(folder: Path) -> bool:
    from brx.config.schema import BasisRotationConfig
    from brx.runs.reading import Run

    return isinstance(Run.load(folder).config.optimizer, BasisRotationConfig)


def _check_at_least_one(args: argparse.Namespace, *names: str) -> None:
    from brx.errors import UserError

    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
