"""`brx data`: prepare token files ahead of a run."""

from __future__ import annotations

import argparse

HELP = "tokenize a corpus into token files"
EXAMPLES = """\
  brx data prepare --config quick
  brx data prepare --set data.source=corpus/*.txt data.tokenizer=gpt2
  brx data prepare --config paper-95m --workers 16      1B tokens of OpenWebText; interrupted, it resumes
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=["prepare"], help="prepare: make the token files, if they are not there yet")
    parser.add_argument("--config", default="quick", help="whose data section counts (default: quick)")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", nargs="+", action="extend", default=[])
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Prepare, and say what there is."""
    from brx.config import load_config
    from brx.data.prepare import prepare, token_folder
    from brx.errors import UserError

    if args.workers is not None and args.workers < 0:
        raise UserError(f"--workers must be at least 0, got {args.workers}")
    config = load_config(args.config, args.overrides).data
    data = prepare(config, workers=args.workers)
    print(token_folder(config))
    for name, file in (("train", data.train), ("validation", data.validation)):
        sidecar = file.sidecar
        print(f"{name}: {sidecar.num_tokens:,} tokens, {sidecar.num_documents:,} documents, sha256 {sidecar.sha256}")
    return 0
