"""Mistakes of users: exit code 2 (1 where a disk refuses), one line that says what would be right,
nothing left."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from brx.cli.main import main
from brx.runs.folder import CACHE
from tests.runs.helpers import write_run

ASKED = "verdict --stages 8 --micro-batches 8"
MISTAKES = [
    # What brx has, by another name; words and flags that it does not have.
    ("", "brx: Missing command (known: demo, train, "),
    ("trian", "brx: No such command 'trian'. Did you mean 'train'? (known: demo, "),
    ("data", "brx data: Missing command (known: prepare, info, "),
    (
        "toy circle",
        "brx toy: LANDSCAPE: 'circle' is not one of 'quadratic', 'spiral', 'sweep'; see",
    ),
    ("train", "brx train: CONFIG is missing: a YAML file or a preset's name; see brx train --help"),
    ("train quick --devcies 2", "No such option: --devcies (Possible options: --devices)"),
    (
        "train quick --devices two",
        "brx train: --devices: input should be a valid integer, unable to",
    ),
    ("train quick --out --resume", "brx train: --out needs a value: the run's folder"),
    ("train quick --out ''", "brx train: --out got an empty text; is a variable of the shell not"),
    ("train quick --out=", "brx train: --out got an empty text; is a variable of the shell not"),
    ("slowdown ''", "got an empty text; is a variable of the shell not set?"),
    (
        "train quick --set 'data.source=\"\"'",
        "data.source: must not be empty",
    ),
    ("train quick --devices 0", "brx train: --devices: input should be greater than or equal to 1"),
    ("train quik", "did you mean 'quick'"),
    ("train empty", "empty: is a folder without config.yaml, so it is not a run's folder"),
    (
        "train quick --out runs/a/config.yaml/b",
        "cannot be written: runs/a/config.yaml is a file, not a folder",
    ),
    (
        "train quick --set pipeline.micro_batches=4",
        "unknown key, did you mean 'accumulation', the micro",
    ),
    ("train quick --set lr=0.1", "lr: unknown key, did you mean 'optimizer.lr'?"),
    (
        "train quick --set optimizer=muon",
        "must be a section of keys and values, such as optimizer.method, got 'muon'",
    ),
    ("train quick --set optimizer.method=adam", "did you mean 'pipedream', which is AdamW?"),
    ("train quick --set pipeline.stages=9", "must be at most model.blocks (8)"),
    ("train quick --set runtime.device=cuda", "cuda is not available on this machine"),
    ("train quick --set runtime.graphs=true", "runtime.graphs: needs a CUDA device, and this run"),
    ("train quick --set data.source=missing.txt", "missing.txt: no such file"),
    (
        "train quick --set pipeline.delay=nothing.py:f",
        "pipeline.delay: nothing.py cannot be read: No such file",
    ),
    ("plan empty-section.yaml", "empty-section.yaml: pipeline: must be a section of keys"),
    (
        "plot oscillation --runs results/similar",
        "--runs: figure oscillation is not drawn from a folder of runs",
    ),
    ("sweep laptop/mian --dry-run", "laptop/mian: no such sweep file, did you mean 'laptop/main'?"),
    ("claims main-reductoin", "did you mean 'main-reduction'?"),
    # Token files.
    ("data info missing", "missing: has no token files; brx data prepare makes them"),
    ("data remove empty", "empty: is not a folder of token files; brx data list shows them"),
    # Figures and tables.
    ("plot mian", "FIGURE: unknown figure 'mian', did you mean 'main'? (known: curves,"),
    ("tables 'Table 99'", "TABLE: unknown table 'Table 99', did you mean 'Table "),
    ("plot all --out x.png", "--out x.png: a file holds one figure"),
    ("plot main --runs nowhere", "nowhere: no such folder; make the runs with brx sweep"),
    ("plot curves", "name at least one run's folder"),
    (
        "plot main runs/a",
        "RUN: only curves, staleness, profiles take runs as arguments; for main, name",
    ),
    ("plot curves runs/a --out runs/a/config.yaml/figure", "config.yaml is a file, not a folder"),
    ("plot curves runs/a --out ''", "--out got an empty text"),
    ("plot curves runs/a --out ..", "is a folder; name the figure, without suffix"),
    ("plot curves runs/a --out x.jpg", "--out x.jpg: a figure is written as .png, .pdf, .svg"),
    ("schedule --stages 4 --figure x.jpg", "--figure x.jpg: a figure is written as .png, .pdf"),
    ("toy quadratic --out x.JPG", "--out x.JPG: a figure is written as .png, .pdf, .svg"),
    ("slowdown runs --all-targets x.eps", "--all-targets x.eps: a figure is written as .png"),
    ("report --runs runs --out empty", "--out empty: is a folder; name the page's file"),
    # Runs.
    ("slowdown empty", "no run with losses there"),
    ("slowdown runs --target nan", "--target nan: must be a loss above 0"),
    (
        "slowdown runs other/a",
        "other/a: the same run as runs/a, with the same data, settings, learning rate (0.01) and "
        "seed (0)",
    ),
    ("slowdown runs --same-rate --all-targets f", "give one of the two"),
    ("slowdown runs --rates 1e-2 x", "--rates: input should be a valid number"),
    ("slowdown runs --rates 0.5", "--rates 0.5: no run has it (there are 0.01)"),
    ("export runs/a other/a --to z", "would both become"),
    ("export runs/a --to runs", "is where"),
    (
        "export runs/a --to runs/a/config.yaml",
        "cannot be written: runs/a/config.yaml is a file, not a folder",
    ),
    # Leaderboards.
    ("compare --out empty --committed empty", "METHOD: needed, since no run is in"),
    ("compare adamm", "unknown method 'adamm'"),
    ("compare nothing.py:Mine", "nothing.py cannot be read"),
    ("compare muon soap --set optimizer.beta1=0.5", "needs exactly one METHOD"),
    ("compare nesterov --rest-lr 1e-3", "rest_lr"),
    ("compare muon --set training.iterations=5", "must be optimizer.KEY=VALUE"),
    ("compare --dry-run", "--dry-run: give a METHOD"),
    ("compare muon --all-builtin", "give one of the two"),
    # Plans.
    ("methods muonn", "muonn: no such method, did you mean 'muon'? (known: pipedream,"),
    ("methods torch.optim:Sgd", "did you mean 'SGD'?"),
    ("methods muon --stages 4", "--stages: only basis-rotation has refresh intervals"),
    ("memory --matrix 4096", "--matrix 4096: write rows x columns"),
    ("memory quick --matrix 3x3", "give one of the two"),
    ("memory --set model.width=3", "--set: needs a CONFIG"),
    ("schedule --stages 2 --devices 3", "--devices must be from 1 to --stages (2), got 3"),
    ("schedule --stages 4 --devices 2 --figure x", "--figure shows one stage per device"),
    ("schedule --stages 4 --delay nosuch", "brx: --delay: must be pipeline, 2bw, a whole"),
    ("schedule --stages 4 --delay 2", "rank 0 of 4 runs 3 forward passes ahead"),
    (
        "schedule --stages 2000",
        "--micro-batches 4, --accumulation 1: 32,032,000 actions are more than can be shown "
        "(20,000)",
    ),
    ("schedule --stages 4 --accumulation 1000000", "actions are more than can be shown"),
    ("schedule --stages 4 --accumulation 2 --figure x", "shows one micro-batch per update"),
    ("plan quick --throughput H10", "no such device, did you mean 'H100'?"),
    (
        "stages --hidden 4096 --heads 32",
        "a model of your own needs --params-per-block, --blocks too",
    ),
    ("stages --batch-size " + 400 * "9", "--batch-size: input should be less than or equal to"),
    ("stages --hidden 1 --heads 1 --blocks 1 --params-per-block inf", "less than or equal to"),
    (
        "plan quick --set training.batch_size=" + 200 * "9",
        "model 8 blocks, d 64: too large to plan, with 64 tokens per example",
    ),
    ("stages --memory -8", "--memory -8GB: must be a number above 0 with a unit"),
    # Verdicts.
    (f"{ASKED} --loss 9", "--loss 9: above 4"),
    (f"{ASKED} --loss nan", "--loss nan: must be a loss above 0"),
    (
        f"{ASKED} --cost adam=0.1",
        "--cost adam=0.1: write METHOD=SHARE, did you mean 'pipedream', which is AdamW?",
    ),
    (f"{ASKED} --cost nesterov=much", "--cost nesterov=much: the share"),
    (f"{ASKED} --device-memory 8GB", "need a --config"),
    (f"{ASKED} --config quick --bandwidth 8GB", "--bandwidth: needs"),
    (
        f"{ASKED} --micro-batches 3 --config quick",
        "--micro-batches 3: 8 examples per update cannot be divided by it",
    ),
    ("plot curves RUN --runs x", "--runs: curves takes its runs as arguments"),
    (f"{ASKED} --stages 64 --config quick", "--stages 64: the model has only 8"),
    (
        f"{ASKED} --cost-from results/tables/similar/time-to-loss.json",
        "no table with a column 'ratio to pipedream'",
    ),
    (
        f"{ASKED} --cost-from results/demo/basis-rotation-p1",
        "has no pipedream (AdamW), and costs are relative",
    ),
    (f"{ASKED} --cost-from results/demo results/laptop", "needs runs of one model and batch"),
    (
        f"{ASKED} --config laptop --device-memory 10Gb",
        "--device-memory 10Gb: Gb are bits; give bytes: 1.25GB, or 10GB if bytes were meant",
    ),
    (
        "plan laptop --set pipeline.balance=speed",
        "pipeline.balance",
    ),
    ("stages llama-1b --hidden 5", "a model of your own needs --heads, --params-per-block, --bl"),
    ("stages llama-1b --batch-size 5", "CONFIG: has a model, a batch and a sequence length of"),
    ("stages --set model.width=8", "--set: needs a CONFIG to change"),
    ("plan laptop --set optimizer.method=torch.optim:Muon", "its constructor: Muon only supports"),
    (f"{ASKED} nowhere.json", "nowhere.json: not readable"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, a copy of it, an empty folder, and the committed results."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_run(folder, "a")
    shutil.copytree(folder / "runs", folder / "other")
    for empty in ("empty", "quick"):  # the second is no run, so that the preset is meant
        (folder / empty).mkdir()
    (folder / "empty-section.yaml").write_text("pipeline:\n")
    (folder / "results").symlink_to(Path(__file__).parents[2] / "results")
    return folder


def files_in(place):
    """All files but the content of runs that is kept next to them."""
    return sorted(path for path in place.rglob("*") if path.name != CACHE)


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_mistake_is_one_line_without_a_trace(arguments, expected, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = files_in(place)
    assert main(shlex.split(arguments)) == (1 if "runs/a/config.yaml" in arguments else 2)
    output = capsys.readouterr()
    assert expected in output.err
    assert (output.err.count("\n"), output.out) == (1, "")
    assert files_in(place) == before
