"""The measurement of orthonormal factors takes its matrices from where it says."""

import torch

from benchmarks.orthonormal import continue_run, matrices_of
from brx.train.loop import train
from tests.train.helpers import tiny_config


def test_continues_a_copy_of_a_run_from_an_earlier_checkpoint(tmp_path):
    config = tiny_config(
        tmp_path,
        "optimizer.method=basis-rotation",
        "optimizer.frequency=2",
        "training.iterations=8",
        "training.keep_at=[4]",
    )
    run = tmp_path / "run"
    train(config, run)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    by_size, kept = matrices_of(lambda: continue_run(run, checkpoint=4, iterations=2))
    # Of iterations 5 and 6, the latter refreshes.
    assert len(by_size) == len(kept) > 0
    lengths = torch.linalg.vector_norm(by_size[0], dim=-2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
