"""FSDP2 and tensor parallelism over processes: the same training as one process, state that tools
can save and load."""

import json

import pytest

from tests.optim.sharded_worker import work
from tests.processes import start, start_ranks

EXPECTED = {
    "updates of an empty shard": [[3, 3], [3, 3]],  # of ranks without a part of a parameter, too
    "entries of the program": [3],
    "matrices per rank": [2, 1],  # state is shared among the ranks
    "offloaded": [
        True,
        [0, 1],
        2,
    ],  # shards on the CPU of a mesh of GPUs are exchanged through gloo
}


@pytest.mark.parametrize(
    ("num_processes", "num_cases"), [(2, 18), pytest.param(4, 5, marks=pytest.mark.slow)]
)
def test_every_case_of_the_worker(num_processes, num_cases, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # FSDP2 takes a GPU where it sees one
    ranks = start_ranks(num_processes, lambda rank, **place: start(work, out, **place))
    told = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert out.exists(), told[0][-4000:]
    results = json.loads(out.read_text())
    different = {
        n: r
        for n, r in results.items()
        if r != EXPECTED.get(n) and not (isinstance(r, float) and r < 1e-9)
    }
    if num_processes == 2:  # a gradient that is bad on one rank changes nothing on any
        difference, message = different.pop("bad gradient")
        assert difference == 0
        assert "another rank" in message
    assert not different
    assert len(results) == num_cases
