"""What a run is made of: `brx config`, `brx methods`, `brx models`, and `brx data` for its token
files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from brx.cli.options import ConfigName, Overrides, argument, complete_method, complete_model, option
from brx.cli.usage import Application, refuse
from brx.errors import counted

if TYPE_CHECKING:
    from brx.data.prepare import PreparedData

SHOW = """\
  brx config show quick
  brx config show my.yaml --set pipeline.stages=16
"""
PREPARE = """\
  # the source code of four pinned packages, as bytes
  brx data prepare
  # a file, folder or glob: .txt, .jsonl, .parquet
  brx data prepare 'corpus/*.txt' --tokenizer gpt2
  # a dataset of the Hugging Face Hub
  brx data prepare openwebtext --tokenizer gpt2 --tokens 1_000_000_000
  # the data of a configuration
  brx data prepare --config paper-95m
"""
INFO = """\
  # print the counts, and check the files' SHA-256
  brx data info data/packages-bytes-1f3a9c07
"""
LIST = """\
  # list what is in data/, with sizes
  brx data list
  # free the disk; a run that needs these files makes them again
  brx data remove data/packages-bytes-1f3a9c07
"""

app = Application()
config = Application(epilog=SHOW)
data = Application(epilog=PREPARE + INFO + LIST)
app.add_typer(config, name="config")
app.add_typer(data, name="data")


@config.add(SHOW)
def show(config: ConfigName, *, overrides: Overrides) -> None:
    """Print the resolved configuration as YAML."""
    from brx.config.loading import dump_config, load_config

    print(dump_config(load_config(config, overrides)), end="")


@app.add("""\
  # list all methods
  brx methods
  # one method with all its options
  brx methods basis-rotation
  # how often each of 32 stages refreshes its basis, for each refresh schedule
  brx methods basis-rotation --stages 32
  # any torch optimizer, with the arguments of its constructor
  brx methods torch.optim:RMSprop
  # a method of your own (docs/methods.md)
  brx methods my_method.py:MyMethod
""")
def methods(
    name: Annotated[
        str | None,
        argument(
            "NAME", "a method, FILE.py:NAME or package.module:NAME", autocompletion=complete_method
        ),
    ] = None,
    *,
    stages: Annotated[
        int | None, option("P", "basis-rotation: print the refresh intervals of P stages", min=1)
    ] = None,
    frequency: Annotated[
        int | None, option("F", "mean of these intervals (default: 10)", min=1)
    ] = None,
) -> None:
    from brx.methods.description import all_methods, one_method, refresh_table

    only = (
        "--stages: only basis-rotation has refresh intervals: brx methods basis-rotation "
        "--stages 32"
    )
    refuse(stages is not None and name != "basis-rotation", only)
    refuse(
        stages is None and frequency,
        "--frequency: needs --stages: it is the mean of the stages' refresh intervals",
    )
    print(all_methods() if name is None else one_method(name))
    if stages is not None:
        print("\n" + refresh_table(stages, frequency or 10))


@app.add("""\
  # list all models with their options
  brx models
  # one model
  brx models llama
  # a model of your own (docs/models.md)
  brx models examples/models/conv_mixer.py:ConvMixer
""")
def models(
    name: Annotated[
        str | None,
        argument(
            "NAME", "a model, FILE.py:NAME or package.module:NAME", autocompletion=complete_model
        ),
    ] = None,
) -> None:
    from brx.config.user_code import allowed
    from brx.model.description import all_models, one_model

    with allowed():
        print(all_models() if name is None else one_model(name))


@data.add(PREPARE + "\nAfter an interruption, the same command continues where it was.\n")
def prepare(
    source: Annotated[
        str | None,
        argument("SOURCE", "packages (source code), a path or glob, or a Hugging Face dataset"),
    ] = None,
    *,
    config: Annotated[
        str, option("CONFIG", "take the data settings from this configuration")
    ] = "quick",
    tokenizer: Annotated[str | None, option("NAME", "bytes or gpt2")] = None,
    tokens: Annotated[int | None, option("N", "stop after this many training tokens")] = None,
    directory: Annotated[str | None, option("DIR", "folder for prepared token files")] = None,
    overrides: Overrides,
    workers: Annotated[
        int | None, option("N", "threads that tokenize (default: up to 8; bytes: one)", min=0)
    ] = None,
) -> None:
    """Make the token files, if they are not there yet."""
    from brx.config.loading import load_config
    from brx.data import prepare as preparation

    given = {"source": source, "tokenizer": tokenizer, "tokens": tokens, "directory": directory}
    # By default, json escapes an emoji as a surrogate pair, which YAML does not know.
    as_yaml = partial(json.dumps, ensure_ascii=False)
    settings = [f"data.{key}={as_yaml(value)}" for key, value in given.items() if value is not None]
    section = load_config(config, [*overrides, *settings]).data
    _print_data(preparation.token_folder(section), preparation.prepare(section, workers=workers))


@data.add(INFO)
def info(folder: Annotated[Path, argument("DIR", "folder of token files")]) -> None:
    """Show what a folder of token files holds, and check it."""
    from brx.data.prepare import SPLITS, PreparedData

    has_any = any((folder / f"{split}.bin").is_file() for split in SPLITS)
    refuse(not has_any, f"{folder}: has no token files; brx data prepare makes them")
    _print_data(folder, PreparedData.load(folder, always_hash=True))


@data.add(LIST, name="list")
def list_folders(
    directory: Annotated[
        Path, argument("DIR", "the folder that holds them (data.directory)", show_default=True)
    ] = Path("data"),
) -> None:
    """List folders of token files and their sizes."""
    from brx.data.prepare import NOTE, token_folders
    from brx.names import shown

    folders = token_folders(directory)
    total = 0
    for folder in folders:
        size = sum(path.stat().st_size for path in folder.iterdir())
        total += size
        print(
            f"{size / 1e6:10,.1f} MB  "
            f"{shown(str(folder))}{'  (unfinished)' if (folder / NOTE).is_file() else ''}"
        )
    num_folders = counted(len(folders), "folder")
    print(f"{total / 1e6:10,.1f} MB  in {num_folders} of token files in {directory}")


@data.add(LIST, name="remove")
def remove_folders(
    folders: Annotated[list[Path], argument("DIR", "folders that brx data list shows")],
) -> None:
    """Remove folders of token files, and nothing else."""
    from brx.data.prepare import remove

    for folder in folders:
        remove(folder)
        print(f"removed {folder}")


def _print_data(folder: Path, data: PreparedData) -> None:
    print(folder)
    for name, file in (("train", data.train), ("validation", data.validation)):
        sidecar = file.sidecar
        tokens = counted(sidecar.num_tokens, "token", ",")
        documents = counted(sidecar.num_documents, "document", ",")
        print(f"{name}: {tokens}, {documents}, sha256 {sidecar.sha256}")
    sidecar = data.train.sidecar
    size = "" if sidecar.vocabulary is None else f" of {counted(sidecar.vocabulary, 'id', ',')}"
    print(f"source {sidecar.source}, tokenizer {sidecar.tokenizer}{size}")
    print(f"fingerprint {data.fingerprint}")
