"""`brx export`: runs in a form small enough to keep."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "copy runs in compact form (config, summary, loss curves), to be committed or shared"
EXAMPLES = """\
  brx export runs/cpu --to results/cpu
  brx export runs/a runs/b --to results/mine
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="runs, or folders that hold runs")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder that gets a folder a run")
    parser.add_argument("--unfinished", action="store_true", help="runs that have not ended, too")


def run(args: argparse.Namespace) -> int:
    """Copy, and say how many."""
    from brx.errors import UserError
    from brx.runs.curves_file import export
    from brx.runs.experiments import find_runs
    from brx.runs.folder import RunFolder

    found = find_runs(args.runs)
    chosen = [path for path in found if args.unfinished or RunFolder(path).read_summary().get("status") == "finished"]
    sources: dict[str, Path] = {}
    for path in chosen:
        if (other := sources.setdefault(path.resolve().name, path)) != path:
            raise UserError(f"RUNS: {other} and {path} would both become {args.to / path.resolve().name}; export one")
        if path.resolve().parent == args.to.resolve():
            raise UserError(f"--to {args.to}: is where {path} lies already; name another folder")
    for name, path in sources.items():
        export(path, args.to / name)
    print(f"{args.to}: {len(chosen)} runs")
    if len(chosen) < len(found):
        print(f"{len(found) - len(chosen)} unfinished ones left out (--unfinished takes them)")
    return 0
