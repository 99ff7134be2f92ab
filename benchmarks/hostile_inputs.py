"""Evidence that damaged configurations, overrides, corpora, token files, checkpoints, metrics and
shared runs get a one-line error.

    python -m benchmarks.hostile_inputs --count 1300

Each input is a random change of an intact run (case N is always the same). It passes if the
command

- ends by itself with a known exit code, within `LIMIT_S` of processor time (a run that is training
  by then does not hang),
- prints no traceback,
- says in one short last line what is wrong if it refuses (exit code 2), and
- leaves every file that was there before as it was, except those of a run that it was to continue.

Commands run in forks of this process, which has loaded torch once; every `REAL_EVERY`-th is a
process of its own. Results are kept in benchmarks/results/hostile_inputs.jsonl as they come, so
that the command can be stopped and repeated; inputs that had a problem are then tried again.
hostile_inputs.md is the table."""

import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot  # noqa: F401  (loaded once, before the forks)
import numpy as np
import pandas  # noqa: F401
import pyarrow.parquet
import torch
import yaml

from benchmarks.report import RESULTS, parser_of
from brx.cli.main import COMMANDS as COMMANDS_OF_BRX
from brx.cli.main import main as brx
from brx.config.loading import apply_overrides, dump_config
from brx.runs.lock import LOCK
from brx.train.loop import train

LIMIT_S, START_S, WALL_LIMIT_S = 10, 10, 1200
REAL_EVERY = 100
LONGEST_LINE = 1500


VALUES: list[Any] = [
    -1,
    0,
    1,
    2,
    3,
    10**9,
    10**12,
    10**30,
    -(10**30),
    0.5,
    -0.0,
    1e-320,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    True,
    False,
    None,
    "",
    " ",
    "x",
    "1",
    "nan",
    "auto",
    "stash",
    "basis-rotation",
    "muon",
    "no.such:Class",
    "os:system",
    "builtins:print",
    "torch.optim:LBFGS",
    "torch.optim:Optimizer",
    "é\u202e\u0000",
    "../..",
    "/",
    "/dev/null",
    "a" * 5000,
    [],
    {},
    [1],
    [[[]]],
    {"a": 1},
    {"method": "x"},
    {"method": None},
    {1: 2},
    [None],
    "2001-99-99",
]
LEVELS = zip("abcdefgh", "bcdefghi", strict=True)
RAW = [
    "",
    "\n",
    "null",
    "[]",
    "3",
    "model",
    "model: *x",
    "a: &a [*a]",
    "a: &a {b: *a}",
    "<<: *a",
    "model: &m {<<: *m}",
    "? ",
    "{" * 2000,
    "[" * 100000,
    "!!python/object/apply:os.system [ls]",
    "\t",
    "\ufeff",
    "model:\n\tblocks: 2",
    "%YAML 9.9\n---\n",
    "--- 1\n--- 2",
    "a: 1\na: 2",
    "training: " + "9" * 6000,
    "training: 2001-99-99",
    "model: 0x",
    "model: 0b",
    "model: 1:99",
    "model: !!binary x",
    "model: !!float x",
    "model: !!int ''",
    "model: !!timestamp x",
    "model: !!set [1]",
    "model: !!omap x",
    "a: &a [1,1]\n" + "".join(f"{y}: &{y} [{','.join(['*' + x] * 12)}]\n" for x, y in LEVELS),
]

COMMANDS = [["train"], ["train"], ["train"], ["plan"], ["config", "show"], ["memory"], ["methods"]]
READERS = [
    ["slowdown"],
    ["plot", "curves"],
    ["export"],
    ["report"],
    ["tables"],
    ["hessian-norm", "--vectors", "1", "--batches-per-vector", "1"],
]
SHARED = "shared"
SHARED_TWIN = ("pipeline.stages=1", "training.iterations=6", "training.stop_after=null")
MEASUREMENTS = (
    "hessian-norm measured/run --original --vectors 3 --batches-per-vector 2",
    "oscillation measured/run --iterations 2 --batches 1 --power-iterations 2",
    f"export measured --to {SHARED} --unfinished",
)
SHARED_READERS = (
    "slowdown {runs} --target 4",
    "plot curves {runs} --out {out}",
    "plot main --runs {runs} --out {out}",
    "export {runs} --to {out} --unfinished",
    "report --runs {runs} --out {out}/page.html",
    "claims --runs {runs}",
    "hessian-norm {runs} --measured",
    "effective-delay {runs} --stages 1 2",
    "oscillation {runs} --measured",
    "plan {runs}/run",
    "similarity {runs}/run {runs}/twin",
)


class Case(NamedTuple):
    """A command on hostile input."""

    what: str  # what was damaged or changed
    arguments: list[str]  # of brx
    continued: Path | None = None  # a run that the command may continue, and so change


def config_of(folder: Path) -> dict[str, Any]:
    """The settings of a small run, as YAML would give them."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            "\n".join(
                f"{n}: the quick brown fox jumps over the lazy dog {n * n}" for n in range(3000)
            )
        )
    return {
        "model": {"blocks": 2, "width": 8, "heads": 2, "sequence_length": 16},
        "data": {"source": "text.txt", "directory": "data", "validation_fraction": 0.3},
        "pipeline": {"stages": 2},
        "optimizer": {"method": "basis-rotation", "lr": 0.01},
        "training": {
            "iterations": 12,
            "stop_after": 6,
            "batch_size": 2,
            "validation_every": 4,
            "validation_examples": 5,
            "checkpoint_every": 3,
            "log_every": 2,
        },
        "runtime": {"device": "cpu", "threads": 1},
    }


def some_path(content: dict[str, Any], choose: random.Random) -> list[str]:
    """A random key, at some depth; now and then one that is not there."""
    path, here = [], content
    while isinstance(here, dict) and here and (not path or choose.random() < 0.85):
        path.append(choose.choice(sorted(here, key=str)))
        here = here[path[-1]]
    if choose.random() < 0.15:
        path[-1] = choose.choice(["", "x", path[-1] + "s", "__class__", "model", "métier", "a.b"])
    return path


def put(content: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a nested key."""
    for key in path[:-1]:
        if isinstance(content.get(key), dict):
            content = content[key]
        else:  # the key is missing or has no keys below it: use one with a space behind its name
            content = content.setdefault(f"{key} ", {})
    content[path[-1]] = value


def damaged(data: bytes, choose: random.Random) -> tuple[str, bytes]:
    """What was done to the bytes (cut, flipped, emptied, filled or shuffled), and the result."""
    kind = choose.choice(
        ["cut", "flip", "flip", "empty", "zeros", "random", "twice", "lines", "insert"]
    )
    at = choose.randrange(len(data) + 1)
    if kind == "cut":
        return f"cut at {at}", data[:at]
    if kind == "flip" and data:
        at %= len(data)
        bit = 1 << choose.randrange(8)
        return f"bit {bit} of byte {at} flipped", data[:at] + bytes([data[at] ^ bit]) + data[
            at + 1 :
        ]
    if kind == "zeros":
        return f"zeros from {at}", data[:at] + bytes(len(data) - at)
    if kind == "random":
        return "random bytes", choose.randbytes(choose.randrange(5000))
    if kind == "twice":
        return "twice", data + data
    if kind == "lines":
        lines = data.splitlines(keepends=True)
        choose.shuffle(lines)
        return "lines shuffled", b"".join(lines)
    if kind == "insert":
        extra = choose.choice(
            [
                b"[1,2]\n",
                b"null\n",
                b"\xff\xfe",
                b"{}\n",
                b'{"iteration": 1}\n',
                b"\x00" * 100,
                b"]",
            ]
        )
        return f"{extra[:10]!r} at {at}", data[:at] + extra + data[at:]
    return "emptied", b""


def hostile_configuration(folder: Path, choose: random.Random) -> Case:
    """A configuration that is strange YAML, has damaged bytes, or has strange values."""
    content, path = config_of(folder), folder / "hostile.yaml"
    if choose.random() < 0.3:
        text = choose.choice(RAW)
        what = f"text {text[:40]!r}"
    elif choose.random() < 0.25:
        how, data = damaged(yaml.safe_dump(content).encode(), choose)
        path.write_bytes(data)
        return Case(how, [*choose.choice(COMMANDS[:5]), str(path), *out(folder)])
    else:
        changes = []
        for _ in range(choose.choice([1, 1, 1, 2, 3])):
            key, value = some_path(content, choose), choose.choice(VALUES)
            put(content, key, value)
            changes.append(f"{'.'.join(map(str, key))}={str(value)[:30]!r}")
        what, text = ", ".join(changes), yaml.safe_dump(content, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
    command = choose.choice(COMMANDS[:5])
    return Case(what, [*command, str(path), *(out(folder) if command == ["train"] else [])])


def hostile_override(folder: Path, choose: random.Random) -> Case:
    """A good configuration with strange `--set` arguments."""
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(config_of(folder)))
    settings = []
    for _ in range(choose.choice([1, 1, 2])):
        key = ".".join(map(str, some_path(complete(folder), choose)))
        value = choose.choice([*VALUES, *RAW])
        if isinstance(value, str):
            text = value
        elif isinstance(value, dict):
            text = str(value)
        else:
            text = json.dumps(value)
        form = choose.choice(
            ["{}={}"] * 8 + ["{}", "={1}", "{}=={}", "{0}.{0}={1}", ".{}={}", "{}.={}", "--{}={}"]
        )
        settings.append(form.format(key, text[:3000]).replace("\0", ""))
    command = choose.choice([["train"], ["train"], ["train"], ["plan"], ["config", "show"]])
    options = out(folder) if command == ["train"] else []
    return Case(str(settings)[:100], [*command, str(path), *options, "--set", *settings])


def hostile_data(folder: Path, choose: random.Random) -> Case:
    """Damaged token files, or a corpus that is strange or no file at all."""
    content = config_of(folder)
    if choose.random() < 0.5:  # prepared token files
        tokens = choose.choice(
            [path for path in (folder / "data").rglob("*") if path.is_file() and path.suffix]
        )
        how, data = damaged(tokens.read_bytes(), choose)
        tokens.write_bytes(data)
        what = f"{tokens.name}: {how}"
        if choose.random() < 0.3:
            return Case(
                what,
                ["train", str(folder / "run"), "--resume", "--set", "training.stop_after=8"],
                folder / "run",
            )
    else:
        name = choose.choice(["a.txt", "a.jsonl", "a.parquet", "a.json", "a", "a.txt.gz"])
        source = folder / name
        kind = choose.choice(
            ["random", "empty", "lines", "one line", "folder", "loop", "missing", "fifo", "objects"]
        )
        if kind == "random":
            source.write_bytes(choose.randbytes(choose.randrange(200_000)))
        elif kind == "lines":
            source.write_text("\n".join(choose.choice(RAW[:20]) for _ in range(2000)))
        elif kind == "objects":
            field = choose.choice(["text", "x"])
            source.write_text(
                "\n".join(json.dumps({field: choose.choice(VALUES[:30])}) for _ in range(2000))
            )
        elif kind == "one line":
            source.write_text("x" * choose.choice([1, 100, 10**6]))
        elif kind == "folder":
            source.mkdir()
        elif kind == "loop":
            source.symlink_to(source)
        elif kind == "fifo":
            os.mkfifo(source)
        elif kind == "empty":
            source.touch()
        content["data"]["source"] = choose.choice(
            [str(source), str(folder / "a*"), f"{source}/../{name}"]
        )
        what = f"{kind} {name}"
    path = folder / "hostile.yaml"
    path.write_text(yaml.safe_dump(content))
    command = choose.choice([["train"], ["train"], ["data", "prepare"], ["data", "info"]])
    return Case(what, [*command, str(path), *(out(folder) if command == ["train"] else [])])


def hostile_checkpoint(folder: Path, choose: random.Random) -> Case:
    """A checkpoint whose files are damaged, changed, missing, renamed or swapped."""
    run = folder / "run"
    checkpoints = sorted((run / "checkpoints").iterdir())
    newest = checkpoints[-1]
    kind = choose.choice(
        ["damage", "damage", "damage", "manifest", "manifest", "remove", "rename", "swap", "extra"]
    )
    if kind == "damage":
        path = choose.choice(sorted(newest.iterdir()))
        what, data = damaged(path.read_bytes(), choose)
        path.write_bytes(data)
        what = f"{path.name}: {what}"
    elif kind == "manifest":
        path = newest / "manifest.json"
        manifest = json.loads(path.read_text())
        key, value = some_path(manifest, choose), choose.choice(VALUES)
        put(manifest, key, value)
        if choose.random() < 0.5:  # as if somebody had mended the checksum
            manifest.pop("sha256", None)
            text = json.dumps(manifest, sort_keys=True, default=str)
            manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(manifest, default=str))
        what = f"manifest: {'.'.join(map(str, key))}={str(value)[:30]!r}"
    elif kind == "remove":
        path = choose.choice(sorted(newest.iterdir()))
        path.unlink()
        what = f"without {path.name}"
    elif kind == "rename":
        name = choose.choice(
            ["00000005", "5", "x", "-1", "99999999999", "00000007", "0", "000000060", "٣"]
        )
        newest.rename(newest.with_name(name))
        what = f"renamed to {name}"
    elif kind == "swap":
        one, other = sorted(newest.glob("*.pt"))[:2]
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
        what = "stages swapped"
    else:
        name = choose.choice(["x", "123", ".replaced", ".00000009.tmp", "00000009"])
        path = run / "checkpoints" / name
        path.mkdir() if choose.random() < 0.5 else path.write_text("x")
        what = f"extra {name}"
    options = ["--set", "training.stop_after=8"] if choose.random() < 0.5 else []
    command = (
        [*READERS[-1], str(run)]
        if choose.random() < 0.15
        else ["train", str(run), "--resume", *options]
    )
    return Case(what, command, run if command[0] == "train" else None)


def hostile_metrics(folder: Path, choose: random.Random) -> Case:
    """A run whose metrics, summary or configuration is damaged."""
    run = folder / "run"
    path = run / choose.choice(
        ["metrics.jsonl", "metrics.jsonl", "metrics.jsonl", "summary.json", "config.yaml"]
    )
    if choose.random() < {".json": 0.5, ".jsonl": 0.3, ".yaml": 0.0}[path.suffix]:
        records = (
            [json.loads(line) for line in path.read_text().splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(path.read_text())]
        )
        record = choose.choice(records)
        key, value = some_path(record, choose), choose.choice(VALUES)
        put(record, key, value)
        path.write_text("".join(json.dumps(record, default=str) + "\n" for record in records))
        what = f"{path.name}: {'.'.join(map(str, key))}={str(value)[:30]!r}"
    else:
        what, data = damaged(path.read_bytes(), choose)
        path.write_bytes(data)
        what = f"{path.name}: {what}"
    if choose.random() < 0.5:
        return Case(what, ["train", str(run), "--resume", "--set", "training.stop_after=8"], run)
    command = choose.choice(READERS)
    options = (
        ["--out", str(folder / "new")]
        if command[0] in ("plot", "export", "report", "tables")
        else []
    )
    return Case(what, [*command, str(run), *options])


def hostile_shared_run(folder: Path, choose: random.Random) -> Case:
    """One of two runs that somebody shared: its curves (.npz), summary and measurements (.json) or
    configuration (.yaml) are damaged."""
    shared = folder / SHARED
    run = shared / "run"
    files = sorted(path for path in run.rglob("*") if path.suffix in (".npz", ".json", ".yaml"))
    path = choose.choice(files)
    name = path.relative_to(run)
    if choose.random() < 0.4:
        how, data = damaged(path.read_bytes(), choose)
        path.write_bytes(data)
        what = f"{name}: {how}"
    elif path.suffix == ".npz":
        what = f"{name}: {put_array(path, choose)}"
    else:
        content = yaml.safe_load(path.read_text())
        key, value = some_path(content, choose), choose.choice(VALUES)
        put(content, key, value)
        text = json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content)
        path.write_text(text)
        what = f"{name}: {'.'.join(map(str, key))}={str(value)[:30]!r}"
    command = choose.choice(SHARED_READERS)
    words = [word.format(runs=shared, out=folder / "new") for word in command.split()]
    return Case(what, words)


def put_array(path: Path, choose: random.Random) -> str:
    """Replace one array of an .npz file, add one or leave one out; returns what was done."""
    with np.load(path) as file:
        arrays = dict(file)
    name = choose.choice([*arrays, "strange"])
    length = len(next(iter(arrays.values())))
    hostile: dict[str, Any] = {
        "no values": np.zeros(0),
        "a scalar": np.float64(1),
        "a matrix": np.ones((length, 2)),
        "one value less": np.ones(length - 1),
        "NaN": np.full(length, np.nan),
        "infinities": np.full(length, np.inf),
        "the largest numbers": np.full(length, 1e308),
        "whole numbers": np.full(length, 2**62),
        "negative steps": np.full(length, -1, np.int32),
        "complex numbers": np.full(length, 1j),
        "texts": np.full(length, "x"),
        "truth values": np.full(length, True),
        "dates": np.full(length, np.datetime64("2001-01-01")),
        "records": np.zeros(length, [("a", "f8"), ("b", "i4")]),
        "objects": np.array([{}] * length, dtype=object),
        "missing": None,
    }
    kind = choose.choice(list(hostile))
    arrays[name] = hostile[kind]
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return f"{name}: {kind}"


def hostile_rows(folder: Path, choose: random.Random) -> Case:
    """A corpus in rows (.parquet, .jsonl) whose bytes are damaged, or whose text is of another
    kind."""
    source = folder / choose.choice(["rows.parquet", "rows.parquet", "rows.jsonl"])
    texts = [f"{number}: small boats sail over calm water" for number in range(2000)]
    columns: dict[str, list[Any]] = {
        "texts": texts,
        "whole numbers": list(range(2000)),
        "lists": [[text] for text in texts],
        "mappings": [{"text": text} for text in texts],
        "nothing": [None] * 2000,
        "now and then nothing": [text if number % 7 else None for number, text in enumerate(texts)],
        "empty texts": [""] * 2000,
        "one text": texts[:1],
        "no rows": [],
        "one long text": ["x" * 10**6],
        "strange characters": ["\ufeff\u202e\x00\x1b[31m\ud7ff" + text for text in texts],
    }
    kind = choose.choice(list(columns))
    field = choose.choice(["text", "text", "text", "Text", "", "text.a"])
    if source.suffix == ".parquet":
        table = pyarrow.table({field: columns[kind]})
        pyarrow.parquet.write_table(table, source, row_group_size=choose.choice([7, 500, 5000]))
    else:
        lines = [
            json.dumps({field: value, "other": number})
            for number, value in enumerate(columns[kind])
        ]
        source.write_text("\n".join(lines))
    what = f"{source.name}: {field!r} holds {kind}"
    if choose.random() < 0.5:
        how, data = damaged(source.read_bytes(), choose)
        source.write_bytes(data)
        what += f", {how}"
    content = config_of(folder)
    content["data"]["source"] = str(source)
    path = folder / "hostile.yaml"
    path.write_text(yaml.safe_dump(content))
    command = choose.choice([["train"], ["data", "prepare"]])
    if command == ["train"]:
        return Case(what, ["train", str(path), *out(folder)])
    return Case(what, ["data", "prepare", "--config", str(path)])


def out(folder: Path) -> list[str]:
    """The options that name a new run's folder."""
    return ["--out", str(folder / "new")]


def complete(folder: Path) -> dict[str, Any]:
    """All keys of a run."""
    return apply_overrides(config_of(folder), (), "hostile").model_dump(mode="json")


KINDS: dict[str, tuple[Callable[[Path, random.Random], Case], int]] = {
    "configurations": (hostile_configuration, 7),
    "overrides": (hostile_override, 5),
    "data files": (hostile_data, 3),
    "checkpoints": (hostile_checkpoint, 3),
    "metrics, summaries, configurations of runs": (hostile_metrics, 2),
}
LATER_KINDS: dict[str, tuple[Callable[[Path, random.Random], Case], int]] = {
    "shared runs": (hostile_shared_run, 2),
    "rows of a corpus": (hostile_rows, 1),
}
FIRST_LATER = 1000
"""The kinds that were added later begin with this case, so that all cases before it stay the
same."""


def kind_of(index: int) -> str:
    kinds = KINDS if index < FIRST_LATER else LATER_KINDS
    order = [kind for kind, (_, share) in kinds.items() for _ in range(share)]
    return order[index % len(order)]


def maker_of(kind: str) -> Callable[[Path, random.Random], Case]:
    return (KINDS | LATER_KINDS)[kind][0]


def content_of(folder: Path) -> dict[str, str]:
    """A hash of every file by name, without locks and notes that a file was verified."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if (
            path.name == LOCK
            or path.suffix in (".verified", ".lock")
            or path.is_symlink()
            or not path.is_file()
        ):
            continue
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def in_fork(arguments: list[str], folder: Path, log: Path) -> int:
    """Run a command in a fork; returns its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(folder)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(file, number)
            used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT_S, used + LIMIT_S + 1))
            code = brx(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 70
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + WALL_LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def in_process(arguments: list[str], folder: Path, log: Path) -> int:
    """Run a command as a user does."""
    with log.open("wb") as file:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-m", "brx", *arguments]
        try:
            return subprocess.run(
                command,
                cwd=folder,
                stdout=file,
                stderr=file,
                timeout=WALL_LIMIT_S,
                check=False,
                env=environment,
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_CPU, (START_S + LIMIT_S,) * 2
                ),
            ).returncode
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        except ValueError:  # a NUL byte, which no shell can pass on
            return 2


def problem_with(
    case: Case, code: int, text: str, before: dict[str, str], folder: Path
) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    if "Traceback (most recent call last)" in text:
        return "traceback: " + text.strip().splitlines()[-1][:200]
    trained = any(
        path.stat().st_size for path in folder.glob("*/metrics.jsonl") if path.parent.name != "run"
    )
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        # A command that was still training at the limit does not hang.
        is_training = trained or (case.continued is not None and code == -signal.SIGXCPU)
        return None if is_training else "hangs"
    if code not in (0, 1, 2, 130):
        return f"exit code {code}"
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if code == 2 and (len(last) > LONGEST_LINE or not last):
        return f"last line of {len(last)} characters"
    may_change = case.continued if code in (0, 1, 130) else None
    after = content_of(folder)
    for name, digest in before.items():
        if after.get(name) != digest and (
            may_change is None or not (folder / name).is_relative_to(may_change)
        ):
            return f"{name} was changed"
    return None


def try_case(template: Path, index: int) -> dict[str, Any]:
    """Make an input, run its command and judge how it ended; returns a row of the results."""
    kind = kind_of(index)
    with tempfile.TemporaryDirectory(prefix="brx-hostile-") as name:
        folder, log = Path(name) / "case", Path(name) / "log"
        shutil.copytree(template, folder)
        case = maker_of(kind)(folder, random.Random(index))
        before, started = content_of(folder), time.monotonic()
        is_real = index % REAL_EVERY == REAL_EVERY - 1
        arguments = [text.replace("\0", "") for text in case.arguments]
        run_command = in_process if is_real else in_fork
        code = run_command(arguments, folder, log)
        seconds = time.monotonic() - started
        text = log.read_text(errors="replace") if log.exists() else ""
        problem = problem_with(case, code, text, before, folder)
    last = text.strip().splitlines()[-1][:200].replace(name, "") if text.strip() else ""
    row = {
        "index": index,
        "kind": kind,
        "what": case.what[:120],
        "command": case.arguments[0],
        "code": code,
    }
    return row | {"seconds": round(seconds, 1), "real": is_real, "problem": problem, "said": last}


def make_template(folder: Path) -> None:
    """Make a run that stopped at iteration 6 of 12, with its data, and two exported runs with
    measurements at a checkpoint."""
    folder.mkdir()
    # In a process of its own, so that the process that forks later has no threads of torch.
    maker = multiprocessing.get_context("fork").Process(target=_fill_template, args=(folder,))
    maker.start()
    maker.join()
    if maker.exitcode != 0:
        raise SystemExit("the intact run could not be made")


def _fill_template(folder: Path) -> None:
    os.chdir(folder)
    config = apply_overrides(config_of(folder), (), "hostile")
    train(config, folder / "run")
    (folder / "good.yaml").write_text(dump_config(config))
    shutil.copytree("run", "measured/run")
    twin = apply_overrides(config_of(folder), SHARED_TWIN, "hostile")
    train(twin, folder / "measured" / "twin")
    for command in MEASUREMENTS:
        code = brx(command.split())
        if code != 0:
            raise SystemExit(f"brx {command}: exit code {code}")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per kind of input."""
    lines = [
        "# Hostile inputs",
        "",
        f"{len(rows)} inputs, {sum(row['real'] for row in rows)} of them to a process of their "
        f"own. None may end in a"
        f" traceback, hang (more than {LIMIT_S} s of processor time without training), or change a "
        f"file that was"
        " there.",
        "",
        "| input | tried | refused (exit 2) | went on (0) | failed run (1) | training at the limit "
        "| problems |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS | LATER_KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        codes = Counter(row["code"] for row in mine)
        signals = sum(count for code, count in codes.items() if code < 0)
        problems = sum(row["problem"] is not None for row in mine)
        lines.append(
            f"| {kind} | {len(mine)} | {codes[2]} | {codes[0]} | {codes[1]} | {signals} | "
            f"{problems} |"
        )
    lines += [
        f"- {row['index']} ({row['what']}): {row['problem']}" for row in rows if row["problem"]
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, count=1300)
    parser.add_argument(
        "--case", type=int, help="try this one alone, and print what the command says"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "hostile_inputs.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for module, _ in COMMANDS_OF_BRX.values():  # loaded once, before the forks
        import_module(f"brx.cli.{module}")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    with tempfile.TemporaryDirectory(prefix="brx-hostile-template-") as name:
        template = Path(name) / "template"
        make_template(template)
        if args.case is not None:
            print(json.dumps(try_case(template, args.case), indent=2))
            return 0
        again = [row["index"] for row in rows if row["problem"] is not None]
        for index in [*again, *range(len(rows), args.count)]:
            rows[index : index + 1] = [try_case(template, index)]
            if rows[index]["problem"] is not None:
                print("{index}: {kind}: {what}: {problem}".format(**rows[index]), flush=True)
            if index % 20 == 0 or index == args.count - 1 or index in again:
                args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
                args.out.with_suffix(".md").write_text(table(rows))
    return 0 if all(row["problem"] is None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
