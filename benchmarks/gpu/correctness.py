"""Packet A: whether a GPU computes what the CPU tests promise.

    python -m benchmarks.gpu.correctness --out results/gpu [--seconds 420] [--jobs 4] [--tiny]

Three kinds of checks, as many at a time as --jobs says, because no time is measured:

- **copies**: whether `torch._foreach_copy_` into destinations of several dtypes is right here
  (pytorch/pytorch#173531), and whether brx's rings hold what they should;
- **tests**: the tests of the project that use a GPU where there is one;
- **runs**: pairs of short trainings whose metrics must be equal, to the last bit or within a bound.

The table says what was expected, what was found, and whether it holds. A check that did not end in
time is "not run". --tiny runs everything with small models, on any machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.iterations import FP32
from benchmarks.report import Table, parser_of
from brx.config.loading import load_config
from brx.train.build import assemble

ROOT = Path(__file__).parents[2]

TESTED = (
    "tests/pipeline",
    "tests/train/test_cuda.py",
    "tests/optim/test_basis_rotation.py",
    "tests/optim/test_elementwise.py",
    "tests/optim/test_reduced_precision.py",
    "tests/optim/test_fake_cuda.py",
    "tests/data/test_batches.py",
)
"""The longest first, which begins with the packet."""

COMMON = (
    "data.tokenizer=bytes",
    "data.validation_fraction=0.2",
    "model.blocks=8",
    "model.width=128",
    "model.heads=4",
    "model.sequence_length=128",
    "pipeline.stages=8",
    "training.batch_size=8",
    "training.iterations=60",
    "training.log_every=1",
    "training.validation_every=30",
    "runtime.deterministic=true",
)
"""The settings of every run; a variant adds its own."""

TINY = (
    "model.width=16",
    "model.heads=2",
    "model.sequence_length=16",
    "training.batch_size=2",
    "training.iterations=12",
    "training.validation_every=6",
    "training.validation_examples=4",
)

ROTATED = ("optimizer.method=basis-rotation", "optimizer.lr=1e-3")
IN_FP32 = (*ROTATED, *FP32, "runtime.precision=fp32")

VARIANTS = {
    "base": ROTATED,
    "again": ROTATED,
    "rings in host memory": (*ROTATED, "pipeline.rings=host"),
    "2 ranks": (*ROTATED, "pipeline.devices=2", "runtime.share_gpus=true"),
    "4 ranks": (*ROTATED, "pipeline.devices=4", "runtime.share_gpus=true"),
    "compiled": (*ROTATED, "runtime.compile=true"),
    "fp32": IN_FP32,
    "fp32, on the CPU": (*IN_FP32, "runtime.device=cpu"),
    "graphs": (*ROTATED, "runtime.graphs=true"),
    "AdamW": ("optimizer.method=pipedream",),
    "AdamW, graphs": ("optimizer.method=pipedream", "runtime.graphs=true"),
    "AdamW, 2 ranks": (
        "optimizer.method=pipedream",
        "pipeline.devices=2",
        "runtime.share_gpus=true",
    ),
}
"""Settings by name of the run; those with graphs run on a GPU only."""


@dataclass(frozen=True)
class Pair:
    """Two runs, and how far apart their last losses may be, as a share of the loss. With a bound of
    0, every metric must be equal to the last bit."""

    first: str
    second: str
    bound: float


PAIRS = (
    Pair("base", "again", 0.0),
    Pair("base", "rings in host memory", 0.0),
    Pair("base", "2 ranks", 0.0),
    Pair("base", "4 ranks", 0.0),
    Pair("AdamW", "AdamW, 2 ranks", 0.0),
    Pair("AdamW", "AdamW, graphs", 0.0),
    # A refresh in a CUDA graph rounds the decay of covariances twice, because it looks at no
    # gradient.
    Pair("base", "graphs", 0.01),
    Pair("base", "compiled", 0.01),
    Pair("base", "fp32", 0.01),
    Pair("fp32", "fp32, on the CPU", 0.001),
)


CUT_OFF = 124
"""The exit code of a process for which no time was left, as that of `timeout`."""
NOT_RUN = "not run: no time was left"
STOPPED = "stopped: the time was up"
NUM_NAMED = 10
"""How many failed tests a finding names. The log has all of them."""


@dataclass(frozen=True)
class Finding:
    """A row of the report."""

    check: str
    expected: str
    found: str
    holds: bool | None  # None: nothing was expected, or the time was up


def main() -> None:
    """Run all checks and write the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--seconds", type=float, default=420, help="time for everything")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--tiny", action="store_true", help="in small, on any machine")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="names of runs")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings = [mixed_copies(device), ring_contents(device)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        work = Work(Path(folder), deadline, options)
        names = [name for name in options.only if device.type == "cuda" or "graphs" not in name]
        tests = [] if options.tiny else [pool.submit(work.test, path) for path in TESTED]
        runs = {name: pool.submit(work.train, name) for name in names}
        problems = {name: run.result() for name, run in runs.items()}
        there = [pair for pair in PAIRS if pair.first in runs and pair.second in runs]
        findings += [compare(pair, Path(folder), problems) for pair in there]
        findings += [test.result() for test in tests]
    report(findings, options.out)


class Work:
    """Runs processes until a common deadline."""

    def __init__(self, folder: Path, deadline: float, options: argparse.Namespace) -> None:
        self.folder = folder
        self.deadline = deadline
        self.is_tiny = options.tiny
        self.text = folder / "pages.txt"
        # Many documents, so that some of them go to the validation data.
        files = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "brx").rglob("*.py")])
        texts = [file.read_text(encoding="utf-8") for file in files]
        self.text.write_text("\n".join(texts), encoding="utf-8")
        self.log = options.out / "correctness.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")

    def train(self, name: str) -> str | None:
        """Train one variant; returns what went wrong, or None."""
        data = [f"data.source={self.text}", f"data.directory={self.folder / 'data'}"]
        settings = [*COMMON, *data, *VARIANTS[name]]
        if not any("precision" in setting for setting in settings):
            settings.append("runtime.precision=bf16")
        if self.is_tiny:
            settings += TINY
        out = str(self.folder / name)
        command = [sys.executable, "-m", "brx", "train", "quick", "--out", out, "--set", *settings]
        code, output = self.run(command)
        return None if code == 0 else last_line(output)

    def test(self, path: str) -> Finding:
        """Run the tests of a file or folder."""
        options = ["-o", "addopts=", "-v", "-rfE", "--tb=short"]
        code, output = self.run([sys.executable, "-m", "pytest", *options, path])
        found = "; ".join([last_line(output), *failed_tests(output)[:NUM_NAMED]])
        return Finding(f"tests: {path}", "all pass", found, None if code == CUT_OFF else code == 0)

    def run(self, command: list[str]) -> tuple[int, str]:
        """Run a command; returns its exit code and output, which also goes into the log."""
        environment = {
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": "2",
            "PYTHONUNBUFFERED": "1",
        }
        left = self.deadline - time.monotonic()
        if left < 10:
            return CUT_OFF, NOT_RUN
        try:
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                timeout=left,
                text=True,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            code, output = process.returncode, process.stdout
        except subprocess.TimeoutExpired as error:
            partial = error.output or b""
            code, output = CUT_OFF, f"{partial.decode(errors='replace')}\n{STOPPED}"
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n{output}\nexit code {code}\n\n")
        return code, output


def mixed_copies(device: torch.device) -> Finding:
    """Compare torch's copy into a list of several dtypes with one copy after the other."""
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(1000 + size, generator=generator).to(device) for size in range(64)]
    dtypes = [(torch.bfloat16, torch.float32)[index % 2] for index in range(64)]
    expected = [source.to(dtype) for source, dtype in zip(sources, dtypes, strict=True)]
    targets = [torch.zeros_like(tensor) for tensor in expected]
    torch._foreach_copy_(targets, sources)
    pairs = zip(targets, expected, strict=True)
    num_wrong = sum(not torch.equal(target, right) for target, right in pairs)
    found = f"torch {torch.__version__}: {num_wrong} of 64 tensors wrong"
    return Finding("_foreach_copy_ into bf16 and fp32 in one call", "to be known", found, None)


def ring_contents(device: torch.device) -> Finding:
    """Compare every version in the rings of a bf16 run with the weights that the stage had then."""
    settings = [*COMMON, *TINY, *ROTATED, "runtime.precision=bf16", "training.iterations=100"]
    config = load_config(
        "quick", [setting for setting in settings if "training.val" not in setting]
    )
    shape = (config.training.batch_size, config.model.sequence_length)
    tokens = torch.randint(256, shape, device=device)
    engine = assemble(config, lambda n: (tokens, tokens), device=device).engine
    kept: list[list[list[Tensor]]] = [weights_of(engine)]
    for _ in engine.run(1, lambda: 10):
        kept.append(weights_of(engine))
    num_wrong = 0
    for number, stage in enumerate(engine.stages):
        newest = len(kept) - 1
        for version in range(newest - stage.delay.num_slots + 1, newest + 1):
            if stage.delay.tau == 0 or version < 0:
                continue
            slot = stage.slots.slots[stage.delay.slot_of(version)].views
            right = kept[version][number]
            pairs = zip(slot, right, strict=True)
            num_wrong += sum(not torch.equal(held, good.to(held.dtype)) for held, good in pairs)
    return Finding("rings hold the versions", "0 wrong", f"{num_wrong} wrong", num_wrong == 0)


def weights_of(engine: object) -> list[list[Tensor]]:
    """Copies of the newest weights, by stage."""
    stages = engine.stages  # type: ignore[attr-defined]
    return [[weight.detach().clone() for weight in stage.newest.values()] for stage in stages]


def compare(pair: Pair, folder: Path, problems: dict[str, str | None]) -> Finding:
    """Compare the metrics of two runs."""
    check = f"{pair.first} against {pair.second}"
    expected = "equal to the last bit" if pair.bound == 0 else f"last loss within {pair.bound:.1%}"
    for name in (pair.first, pair.second):
        problem = problems[name]
        if problem is not None:
            is_cut_off = problem in (NOT_RUN, STOPPED)
            return Finding(check, expected, f"{name}: {problem}", None if is_cut_off else False)
    first, second = (metrics(folder / name) for name in (pair.first, pair.second))
    if pair.bound == 0:
        differing = [a["iteration"] for a, b in zip(first, second, strict=True) if a != b]
        apart = abs(second[-1]["val_loss"] / first[-1]["val_loss"] - 1)
        start = differing[0] if differing else None
        found = (
            f"differ from iteration {start} on, last loss by {apart:.1e}" if differing else "equal"
        )
        return Finding(check, expected, found, not differing)
    ends = [records[-1]["val_loss"] for records in (first, second)]
    apart = abs(ends[1] / ends[0] - 1)
    return Finding(check, expected, f"{apart:.2%} apart", apart <= pair.bound)


def metrics(run: Path) -> list[dict[str, float]]:
    """The metrics of a run that must be equal."""
    compared = ("iteration", "train_loss", "val_loss", "grad_norm")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{key: record[key] for key in compared if key in record} for record in records]


def failed_tests(output: str) -> list[str]:
    """The tests that have failed, with the reasons if pytest has come to its summary."""
    lines = output.splitlines()
    summary = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    # With -v there is a line for each test while they run: `tests/a.py::test_b FAILED [ 12%]`.
    as_they_ran = [line for line in lines if re.search(r"::.* (FAILED|ERROR)\b", line)]
    return summary or as_they_ran


def last_line(output: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:150] if lines else "no output"


def report(findings: list[Finding], out: Path) -> None:
    """Print and write the table."""
    words: dict[bool | None, str] = {True: "yes", False: "NO", None: "-"}
    table = Table("correctness", ["check", "expected", "found", "holds"])
    for finding in findings:
        table.add(finding.check, finding.expected, finding.found, words[finding.holds])
    settings = "bf16 unless the name says fp32, deterministic kernels, 8 stages"
    table.write("What a GPU computes, against what it should", f"Runs: {settings}.", folder=out)


if __name__ == "__main__":
    main()
