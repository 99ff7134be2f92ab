import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.data.batches import Batches, validation_set
from brx.data.token_file import Sidecar, TokenFile
from brx.errors import UserError


def counting_file(num_tokens):
    """A token file whose ids are their own places."""
    sidecar = Sidecar(source="counting", tokenizer="gpt2", num_tokens=num_tokens, num_documents=1, sha256="")
    return TokenFile(np.arange(num_tokens, dtype="<u2"), sidecar)


@given(
    sequence_length=st.integers(1, 40),
    spare=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**70),
    iteration=st.integers(0, 2**40),
)
def test_windows_lie_inside_and_targets_are_next_tokens(sequence_length, spare, batch_size, seed, iteration):
    num_tokens = sequence_length + 1 + spare
    settings = {"sequence_length": sequence_length, "batch_size": batch_size, "seed": seed}
    inputs, targets = Batches(counting_file(num_tokens), **settings).batch(iteration)
    assert inputs.shape == targets.shape == (batch_size, sequence_length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    starts = inputs[:, :1]
    assert torch.equal(inputs, starts + torch.arange(sequence_length))
    assert torch.equal(targets, inputs + 1)
    assert starts.min() >= 0
    assert targets.max() < num_tokens

    np.random.seed(0)  # noqa: NPY002 (the global generators must not matter)
    torch.manual_seed(iteration)
    batches = Batches(counting_file(num_tokens), **settings)
    batches.batch(iteration + 1)  # nor what was asked for before
    assert torch.equal(batches.batch(iteration)[0], inputs)


@given(seed=st.integers(0, 2**64), iteration=st.integers(0, 2**40), other=st.integers(0, 2**40))
def test_other_iterations_and_seeds_give_other_windows(seed, iteration, other):
    def starts(seed, iteration):
        # 8 starts among 60,000: the same ones by chance in one of 10^38 cases
        return Batches(counting_file(60_000), sequence_length=4, batch_size=8, seed=seed).batch(iteration)[0][:, 0]

    first = starts(seed, iteration)
    assert torch.equal(first, starts(seed, other)) == (iteration == other)
    assert not torch.equal(first, starts(seed + 1, iteration))
    # A seed of several words and an iteration could be mistaken for each other, were they only strung together.
    assert not torch.equal(starts(seed % 2**32 + 7 * 2**32, iteration % 2**32), starts(seed % 2**32, 7))


def test_the_order_of_the_data_never_changes():
    batches = Batches(counting_file(60_000), sequence_length=2, batch_size=4, seed=3)
    assert batches.batch(1)[0][:, 0].tolist() == [42723, 6019, 9545, 37949]


def test_every_window_is_equally_likely():
    batches = Batches(counting_file(12), sequence_length=4, batch_size=100, seed=0)
    starts = torch.cat([batches.batch(iteration)[0][:, 0] for iteration in range(80)])
    counts = torch.bincount(starts)
    assert len(counts) == 8  # starts 0 to 7: the last window ends with the last token
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


@given(sequence_length=st.integers(1, 30), spare=st.integers(0, 500), examples=st.integers(1, 50))
def test_validation_windows_are_evenly_spread(sequence_length, spare, examples):
    file = counting_file(sequence_length + 1 + spare)
    batches = validation_set(file, sequence_length=sequence_length, examples=examples, batch_size=8)
    assert [len(inputs) for inputs, _ in batches[:-1]] == [8] * (len(batches) - 1)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert inputs.shape == (examples, sequence_length)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(sequence_length))
    assert torch.equal(targets, inputs + 1)
    gaps = inputs[:, 0].diff()
    assert inputs[0, 0] == 0
    if examples > 1:
        assert inputs[-1, 0] == spare
        assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("num_tokens", [0, 1, 16])
def test_a_file_shorter_than_a_window_is_refused(num_tokens):
    file = counting_file(num_tokens)
    with pytest.raises(UserError, match=rf"counting: {num_tokens} tokens are too few for model.sequence_length 16"):
        Batches(file, sequence_length=16, batch_size=1, seed=0)
    with pytest.raises(UserError, match="too few"):
        validation_set(file, sequence_length=16, examples=1, batch_size=1)
