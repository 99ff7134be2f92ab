"""FSDP2 and tensor parallelism over processes: the same training as one process, state that tools can save and load."""

import json
import subprocess
import sys
from functools import cache

import pytest

TWO = ("fsdp2", "fsdp2, 1st unilateral", "fsdp2, staggered", "sequence parallel", "tensor parallel", "half precision")
TWO += ("columns, gradient in rows", "adamw taken over", "full state")
TWO += tuple(f"resume through {way}" for way in ("state_dict", "dcp", "flat", "whole"))
FOUR = ("fsdp2", "sequence parallel", "tensor parallel", "fsdp2 and tensor parallel", "hybrid")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the processes report, by their number; they run once for all tests."""

    @cache
    def run(num_processes):
        out = tmp_path_factory.mktemp("sharded") / "results.json"
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={num_processes}", "-m", "tests.optim.sharded_worker", str(out)]
        done = subprocess.run(command, capture_output=True, timeout=600)
        assert out.exists(), done.stderr.decode()[-4000:]
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize(("num_processes", "case"), [*((2, case) for case in TWO), *((4, case) for case in FOUR)])
def test_equals_one_process(results, num_processes, case):
    assert results(num_processes)[case] < 1e-9


def test_gradient_that_is_bad_on_one_rank_changes_nothing_on_any(results):
    difference, message = results(2)["bad gradient"]
    assert difference == 0
    assert "another rank" in message


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("updates of an empty shard", [[3, 3], [3, 3]]),  # of ranks without a part of a parameter, too
        ("matrices per rank", [2, 1]),  # state is shared among the ranks
        ("offloaded", [True, [0, 1], 2]),  # shards on the CPU of a mesh of GPUs are exchanged through gloo
    ],
)
def test_what_each_rank_has(results, case, expected):
    assert results(2)[case] == expected
