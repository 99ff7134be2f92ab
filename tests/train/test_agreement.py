"""Ranks that would train different runs say so before the first iteration."""

import pytest

from brx.errors import UserError
from brx.pipeline.world import World
from brx.train.agreement import agree, facts_of, first_disagreement
from tests.train.helpers import tiny_config


class RankZero(World):
    """The first of three ranks, whose facts are given."""

    num_ranks = 3

    def __init__(self, others):
        super().__init__()
        self.others = others

    def gather(self, value):
        return [value, *self.others]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=0.5", "optimizer.lr is 0.01 on rank 0 and 0.5 on rank 2"),
        ("training.seed=7", "training.seed is 0 on rank 0 and 7 on rank 2"),
        ("pipeline.stages=2", "pipeline.stages is 4 on rank 0 and 2 on rank 2"),
        ("training.stop_after=9", "training.stop_after is None on rank 0 and 9 on rank 2"),
        ("data.source=other", "data.source is "),
    ],
)
def test_first_difference_names_rank_key_both_values(override, key, tmp_path):
    facts, other = (facts_of(tiny_config(tmp_path, *more)) for more in ((), (override,)))
    with pytest.raises(UserError, match=f"the ranks disagree: {key}"):
        agree(RankZero([facts, other]), facts)


def test_method_of_another_content_is_found(tmp_path):
    (tmp_path / "own.py").write_text("from torch.optim import AdamW\n")
    own = f"optimizer={{method: '{tmp_path}/own.py:AdamW'}}"
    before = facts_of(tiny_config(tmp_path, own))
    (tmp_path / "own.py").write_text("from torch.optim import AdamW  # edited\n")
    assert "optimizer.code_sha256" in first_disagreement(
        [before, facts_of(tiny_config(tmp_path, own))]
    )


def test_another_torch_is_found(tmp_path, monkeypatch):
    before = facts_of(tiny_config(tmp_path))
    monkeypatch.setattr("torch.__version__", "1.0")
    assert "version of torch is" in first_disagreement([before, facts_of(tiny_config(tmp_path))])


def test_threads_of_their_own_are_no_difference(tmp_path):
    ours, theirs = (facts_of(tiny_config(tmp_path, f"runtime.threads={n}")) for n in (1, 2))
    agree(RankZero([ours, theirs]), ours)
