"""Checks of whole sweeps, before any run is paid for."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from brx.config.schema import CustomConfig, RunConfig
from brx.config.user_code import allowed
from brx.errors import UserError
from brx.files import write_errors_in_one_line
from brx.model.checks import check_model_of
from brx.runs.checkpoint import checkpoint_folder
from brx.sweep.spec import Sweep
from brx.train.checks import check_method
from brx.train.device import choose_device

# EILSEQ: characters that the file system lacks; EEXIST: two names that it takes for one.
BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EEXIST}


def check_own_methods(sweeps: Sequence[Sweep]) -> None:
    """Refuse a user's own method or model that cannot train, before any run is paid for.

    The user's file is imported, after it was named on stderr.

    Raises:
        UserError: `check_method` or `check_model_of` refuses a cell.
    """
    configs: list[RunConfig] = []
    for sweep in sweeps:
        configs += [cell.config for cell in sweep.cells]
    _check_own_models(configs)
    to_check: dict[str, RunConfig] = {}  # one of each kind
    for config in configs:
        optimizer = config.optimizer
        if isinstance(optimizer, CustomConfig):
            kind = repr((optimizer.method, optimizer.arguments, config.pipeline))
            to_check[kind] = config
    for config in to_check.values():
        try:
            device = choose_device(config.runtime.device)[0]
        except UserError:  # the sweep may be started on a machine that lacks the cells' device
            device = torch.device("cpu")
        with allowed():
            check_method(config, device)


def _check_own_models(configs: Sequence[RunConfig]) -> None:
    checked = set()
    for config in configs:
        pipeline = config.pipeline
        of_pipeline = (pipeline.stages, pipeline.stash, pipeline.recompute)
        kind = repr((config.model, config.data.vocabulary_size, of_pipeline))
        if kind in checked:
            continue
        checked.add(kind)
        with allowed():
            check_model_of(config)


def check_names(sweeps: Sequence[Sweep]) -> None:
    """Try the names of all cells and repetitions on the file system where they will be, before any
    run is paid for.

    A file system may limit the length of names, lack characters, or ignore case.

    Raises:
        UserError: a name cannot be used there; the line names the cell.
        RunError: the folder cannot be written to, or the disk is full.
    """
    for sweep in sweeps:
        cells = [*sweep.cells, *sweep.repetitions(sweep.cells)]
        names = dict.fromkeys(cell.folder.name for cell in cells)
        parent = next(place for place in (sweep.out, *sweep.out.parents) if place.is_dir())
        with (
            write_errors_in_one_line(sweep.out),
            tempfile.TemporaryDirectory(prefix=".names-", dir=parent) as trial,
        ):
            for name in names:
                _try_name(Path(trial) / name, sweep)


def _try_name(folder: Path, sweep: Sweep) -> None:
    """Make a folder with the name of a cell, and in it the folder of a checkpoint, which has the
    longest path in a run."""
    try:
        folder.mkdir()
        checkpoint_folder(folder, sweep.cells[0].config.training.iterations).mkdir(parents=True)
    except OSError as error:
        if error.errno not in BAD_NAME:
            raise
        raise UserError(
            f"{sweep.out}: this file system cannot hold the cell {folder.name}: {error.strerror}; "
            f"choose another folder (--out)"
        ) from None
