"""`brx data`: prepare token files ahead of a run, look at them, and remove them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brx.cli.options import Overrides
from brx.cli.usage import Application, Command
from brx.errors import UserError

if TYPE_CHECKING:
    from brx.data.prepare import PreparedData

PREPARE = """\
  brx data prepare                                                the sources of pinned packages, as bytes
  brx data prepare 'corpus/*.txt' --tokenizer gpt2                local .txt, .jsonl, .parquet: file, folder or glob
  brx data prepare openwebtext --tokenizer gpt2 --tokens 1_000_000_000 --workers 16
  brx data prepare --config paper-95m                             what a configuration asks for

An interrupted preparation goes on where it was when started again.
"""
INFO = """\
  brx data info data/packages-bytes-1f3a9c07                      counts; reads the files and compares their SHA-256
"""
LIST = """\
  brx data list                                                   what is in data/, with sizes
  brx data remove data/packages-bytes-1f3a9c07                    frees the disk; a run that needs it prepares it again
"""

app = Application(epilog=PREPARE[: PREPARE.index("\n\n") + 1] + INFO + LIST)


@app.command(cls=Command, epilog=PREPARE)
def prepare(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="packages, a path or glob, or a hub dataset")
    ] = None,
    *,
    config: Annotated[str, typer.Option(metavar="CONFIG", help="whose data section counts")] = "quick",
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="bytes or gpt2")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="stop after this many training tokens")] = None,
    directory: Annotated[str | None, typer.Option(metavar="DIR", help="folder for prepared token files")] = None,
    overrides: Overrides,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="threads that tokenize (default: one per core)")
    ] = None,
) -> None:
    """Make the token files, if they are not there yet."""
    from brx.config import load_config
    from brx.data import prepare as preparation

    given = {"source": source, "tokenizer": tokenizer, "tokens": tokens, "directory": directory}
    settings = [f"data.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    section = load_config(config, [*overrides, *settings]).data
    _print(preparation.token_folder(section), preparation.prepare(section, workers=workers))


@app.command(cls=Command, epilog=INFO)
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of token files", show_default=False)],
) -> None:
    """Say what a folder of token files holds, and check it."""
    from brx.data.prepare import PreparedData

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; token files are made with brx data prepare")
    _print(folder, PreparedData.load(folder, always_hash=True))


@app.command("list", cls=Command, epilog=LIST)
def list_folders(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where data.directory puts them")] = Path("data"),
) -> None:
    """List folders of token files with their sizes, unfinished ones too."""
    from brx.data.prepare import NOTE, token_folders

    folders = token_folders(directory)
    total = 0
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        total += size
        print(f"{size / 1e6:10,.1f} MB  {folder}{'  (unfinished)' if (folder / NOTE).is_file() else ''}")
    print(f"{total / 1e6:10,.1f} MB  in {len(folders)} folders of token files in {directory}")


@app.command("remove", cls=Command, epilog=LIST)
def remove_folders(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="folders that brx data list names", show_default=False)
    ],
) -> None:
    """Remove folders of token files; nothing else."""
    from brx.data.prepare import remove

    for folder in folders:
        remove(folder)
        print(f"removed {folder}")


def _print(folder: Path, data: PreparedData) -> None:
    print(folder)
    for name, file in (("train", data.train), ("validation", data.validation)):
        sidecar = file.sidecar
        print(f"{name}: {sidecar.num_tokens:,} tokens, {sidecar.num_documents:,} documents, sha256 {sidecar.sha256}")
    print(f"source {data.train.sidecar.source}, tokenizer {data.train.sidecar.tokenizer}")
    print(f"fingerprint {data.fingerprint}")
