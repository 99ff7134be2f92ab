"""Many runs at once in compact form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from brx.errors import UserError
from brx.runs.curves_file import export
from brx.runs.folder import RunFolder
from brx.runs.frames import find_runs
from brx.runs.reading import ENDED


def export_runs(folders: Sequence[Path], target: Path, *, unfinished: bool = False) -> tuple[int, int]:
    """Export runs that have ended, each to a folder of its name below `target`.

    Those that diverged are among them: they count where learning rates are chosen and slowdowns bounded. Runs of the
    same names that are there already are replaced. Returns how many were exported, and how many left out.

    Raises:
        UserError: two runs have the same name, or `target` is where a run lies already.
    """
    paths = find_runs(folders)
    chosen = [path for path in paths if unfinished or RunFolder(path).read_summary().get("status") in ENDED]
    sources: dict[str, Path] = {}
    for path in chosen:
        if (other := sources.setdefault(path.resolve().name, path)) != path:
            raise UserError(f"RUNS: {other} and {path} would both become {target / path.resolve().name}; export one")
        if path.resolve().parent == target.resolve():
            raise UserError(f"--to {target}: is where {path} lies already; name another folder")
    for name, path in sources.items():
        export(path, target / name)
    return len(chosen), len(paths) - len(chosen)
