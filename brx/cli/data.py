"""`brx data`: prepare token files ahead of a run, and look at them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from brx.cli.arguments import add_overrides

if TYPE_CHECKING:
    from brx.data.prepare import PreparedData

HELP = "tokenize a corpus into token files"
EXAMPLES = """\
  brx data prepare                                                the sources of pinned packages, as bytes
  brx data prepare 'corpus/*.txt' --tokenizer gpt2                local .txt, .jsonl, .parquet: file, folder or glob
  brx data prepare openwebtext --tokenizer gpt2 --tokens 1_000_000_000 --workers 16
  brx data prepare --config paper-95m                             what a configuration asks for
  brx data info data/packages-bytes-1f3a9c07                      counts; reads the files and compares their SHA-256
An interrupted preparation goes on where it was when started again.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    preparing = actions.add_parser("prepare", help="make the token files, if they are not there yet")
    preparing.add_argument("source", nargs="?", metavar="SOURCE", help="packages, a path or glob, or a hub dataset")
    preparing.add_argument("--config", default="quick", help="whose data section counts (default: quick)")
    preparing.add_argument("--tokenizer", metavar="NAME", help="bytes or gpt2")
    preparing.add_argument("--tokens", type=int, metavar="N", help="stop after this many training tokens")
    preparing.add_argument("--directory", metavar="DIR", help="folder for prepared token files")
    add_overrides(preparing)
    preparing.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one a core)")

    info = actions.add_parser("info", help="say what a folder of token files holds, and check it")
    info.add_argument("folder", type=Path, metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """Prepare or check, and say what there is."""
    from brx.data.prepare import PreparedData
    from brx.errors import UserError

    if args.action == "info":
        folder = args.folder
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; token files are made with brx data prepare")
        data = PreparedData.load(folder, always_hash=True)
    else:
        folder, data = _prepare(args)
    print(folder)
    for name, file in (("train", data.train), ("validation", data.validation)):
        sidecar = file.sidecar
        print(f"{name}: {sidecar.num_tokens:,} tokens, {sidecar.num_documents:,} documents, sha256 {sidecar.sha256}")
    print(f"source {data.train.sidecar.source}, tokenizer {data.train.sidecar.tokenizer}")
    print(f"fingerprint {data.fingerprint}")
    return 0


def _prepare(args: argparse.Namespace) -> tuple[Path, PreparedData]:
    from brx.config import load_config
    from brx.data.prepare import prepare, token_folder
    from brx.errors import UserError

    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers must be at least 0, got {args.workers}")
    given = {key: getattr(args, key) for key in ("source", "tokenizer", "tokens", "directory")}
    overrides = [f"data.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    config = load_config(args.config, [*args.overrides, *overrides]).data
    return token_folder(config), prepare(config, workers=args.workers)
