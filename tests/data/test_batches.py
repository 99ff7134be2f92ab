"""Micro-batches: a pure function of (seed, iteration), inside the file, shifted by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.data.batches import Batches, validation_set
from brx.data.token_file import Sidecar, TokenFile
from brx.errors import UserError


def tokens(num):
    """A file in which each token is its own place."""
    return TokenFile(
        np.arange(num, dtype="<u2"),
        Sidecar(source="test", tokenizer="bytes", num_tokens=num, num_documents=1, sha256=""),
    )


@given(num=st.integers(9, 5000), seed=st.integers(0, 2**40), iteration=st.integers(1, 10**7))
def test_windows_are_inside_and_targets_follow(num, seed, iteration):
    batches = Batches(tokens(num), sequence_length=8, batch_size=4, seed=seed)
    inputs, targets = batches.batch(iteration)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, :1] + torch.arange(8), inputs)
    assert inputs.min() >= 0
    assert targets.max() < num


def test_a_batch_depends_on_seed_and_iteration_alone():
    first = Batches(tokens(60000), sequence_length=8, batch_size=4, seed=1)
    list(map(first.batch, range(1, 50)))
    again = Batches(tokens(60000), sequence_length=8, batch_size=4, seed=1)
    assert torch.equal(first.batch(50)[0], again.batch(50)[0])
    assert not torch.equal(again.batch(50)[0], again.batch(51)[0])
    other = Batches(tokens(60000), sequence_length=8, batch_size=4, seed=2)
    assert not torch.equal(again.batch(50)[0], other.batch(50)[0])


def test_windows_reach_both_ends_of_the_file():
    batches = Batches(tokens(12), sequence_length=8, batch_size=16, seed=0)
    starts = {int(start) for t in range(20) for start in batches.batch(t)[0][:, 0]}
    assert starts == {0, 1, 2, 3}


@pytest.mark.parametrize("examples", [1, 5, 8])
def test_validation_set_is_fixed_and_spread(examples):
    found = validation_set(tokens(1000), sequence_length=8, examples=examples, batch_size=3)
    inputs = torch.cat([batch[0] for batch in found])
    assert len(inputs) == examples
    assert max(len(batch[0]) for batch in found) <= 3
    assert inputs[0, 0] == 0
    if examples > 1:
        assert inputs[-1, 0] == 1000 - 9
        assert inputs[:, 0].diff().min() > 100


def test_file_shorter_than_a_window_is_refused():
    with pytest.raises(UserError, match=r"8 tokens are too few for model\.sequence_length 8"):
        Batches(tokens(8), sequence_length=8, batch_size=1, seed=0)
    with pytest.raises(UserError, match="too few"):
        validation_set(tokens(8), sequence_length=8, examples=1, batch_size=1)
