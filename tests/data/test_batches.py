"""Micro-batches: windows that depend on the seed and the micro-batch's number alone, and the thread
that fetches them ahead."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from brx.data import batches
from brx.data.batches import Batches, Prefetcher, validation_set
from brx.data.token_file import Sidecar, TokenFile
from brx.errors import UserError


def counting_file(num_tokens):
    """A token file whose ids are their own places."""
    sidecar = Sidecar(
        source="counting", tokenizer="gpt2", num_tokens=num_tokens, num_documents=1, sha256=""
    )
    return TokenFile(np.arange(num_tokens, dtype="<u2"), sidecar)


shapes = {
    "sequence_length": st.integers(1, 40),
    "spare": st.integers(0, 60),  # tokens beyond one window and its last target
    "batch_size": st.integers(1, 9),
    "seed": st.integers(0, 2**70),
    "n": st.integers(0, 2**40),
}


def batches_of(sequence_length, spare, batch_size, seed):
    file = counting_file(sequence_length + 1 + spare)
    return Batches(file, sequence_length=sequence_length, batch_size=batch_size, seed=seed)


@given(**shapes)
def test_windows_lie_inside_the_file(sequence_length, spare, batch_size, seed, n):
    made = batches_of(sequence_length, spare, batch_size, seed)
    inputs, targets = made.batch(n)
    starts = inputs[:, :1]
    assert torch.equal(inputs, starts + torch.arange(sequence_length))
    assert starts.min() >= 0
    assert targets.max() <= sequence_length + spare


@given(**shapes)
def test_targets_are_the_next_tokens(sequence_length, spare, batch_size, seed, n):
    inputs, targets = batches_of(sequence_length, spare, batch_size, seed).batch(n)
    assert torch.equal(targets, inputs + 1)


@given(**shapes)
def test_batch_is_two_contiguous_int64_tensors(sequence_length, spare, batch_size, seed, n):
    for tensor in batches_of(sequence_length, spare, batch_size, seed).batch(n):
        assert tensor.shape == (batch_size, sequence_length)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


@given(**shapes)
def test_batch_depends_on_no_state(sequence_length, spare, batch_size, seed, n):
    inputs, _ = batches_of(sequence_length, spare, batch_size, seed).batch(n)
    np.random.seed(0)  # noqa: NPY002 (the global generators must not matter)
    torch.manual_seed(n)
    again = batches_of(sequence_length, spare, batch_size, seed)
    again.batch(n + 1)  # nor what was asked for before
    assert torch.equal(again.batch(n)[0], inputs)


def starts(seed, n):
    """Where 8 windows start, among 60,000 places: the same ones by chance in one of 10^38 cases."""
    file = counting_file(60_000)
    inputs, _ = Batches(file, sequence_length=4, batch_size=8, seed=seed).batch(n)
    return inputs[:, 0]


@given(seed=st.integers(0, 2**64), n=st.integers(0, 2**40), other=st.integers(0, 2**40))
def test_other_micro_batches_have_other_windows(seed, n, other):
    is_same = torch.equal(starts(seed, n), starts(seed, other))
    assert is_same == (n == other)


@given(seed=st.integers(0, 2**64), n=st.integers(0, 2**40))
def test_other_seeds_give_other_windows(seed, n):
    assert not torch.equal(starts(seed, n), starts(seed + 1, n))


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 2**32 - 1))
def test_long_seed_is_not_seed_with_number(seed, n):
    """They could be mistaken for each other, were their words only strung together."""
    assert not torch.equal(starts(seed + 7 * 2**32, n), starts(seed, 7))


def test_order_of_the_data_never_changes():
    made = Batches(counting_file(60_000), sequence_length=2, batch_size=4, seed=3)
    assert made.batch(1)[0][:, 0].tolist() == [42723, 6019, 9545, 37949]


def test_every_window_is_equally_likely():
    few = Batches(counting_file(12), sequence_length=4, batch_size=100, seed=0)
    counts = torch.bincount(torch.cat([few.batch(n)[0][:, 0] for n in range(80)]))
    assert len(counts) == 8  # starts 0 to 7: the last window ends with the last token
    assert (counts - 1000).abs().max() < 5 * 1000**0.5


sizes = given(
    sequence_length=st.integers(1, 30), spare=st.integers(0, 500), examples=st.integers(1, 50)
)
"""Of validation windows: how many, how long, and how far the first can lie from the last."""


def validation_windows(sequence_length, spare, examples):
    """Batches of at most 8 windows from a file in which each token is its own index."""
    file = counting_file(sequence_length + 1 + spare)
    return validation_set(file, sequence_length=sequence_length, examples=examples, batch_size=8)


@sizes
def test_validation_batches_are_full_but_the_last(sequence_length, spare, examples):
    made = validation_windows(sequence_length, spare, examples)
    full, rest = divmod(examples, 8)
    assert [len(inputs) for inputs, _ in made] == [8] * full + [rest] * (rest > 0)


@sizes
def test_validation_targets_are_the_next_tokens(sequence_length, spare, examples):
    for inputs, targets in validation_windows(sequence_length, spare, examples):
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(sequence_length))
        assert torch.equal(targets, inputs + 1)


@sizes
def test_validation_windows_are_evenly_spread(sequence_length, spare, examples):
    made = validation_windows(sequence_length, spare, examples)
    starts = torch.cat([inputs[:, 0] for inputs, _ in made])
    gaps = starts.diff()
    assert starts[0] == 0
    if examples > 1:
        assert starts[-1] == spare
        assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("num_tokens", [0, 16])
def test_file_shorter_than_a_window_is_refused(num_tokens):
    file = counting_file(num_tokens)
    told = f"counting: gave {num_tokens} tokens, too few for model.sequence_length 16"
    with pytest.raises(UserError, match=told):
        Batches(file, sequence_length=16, batch_size=1, seed=0)
    with pytest.raises(UserError, match="too few"):
        validation_set(file, sequence_length=16, examples=1, batch_size=1)


def make(n):
    return torch.full((2, 3), n), torch.full((2, 3), n + 1)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("brx-batches")]


@pytest.fixture
def threaded(monkeypatch):
    """Makes a Prefetcher that works as on CUDA, with memory that cannot be pinned here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor)
    return lambda make: Prefetcher(make, torch.device("cuda"))


def test_cpu_needs_no_thread():
    prefetcher = Prefetcher(make, torch.device("cpu"))
    assert [tensor[0, 0] for tensor in prefetcher.batch(5)] == [5, 6]
    assert threads() == []
    assert prefetcher.seconds_waited > 0


@pytest.fixture
def made():
    """The micro-batches that `counted` has made, each with whether the main thread made it."""
    return []


@pytest.fixture
def prefetcher(threaded, made):
    def counted(n):
        made.append((n, threading.current_thread() is threading.main_thread()))
        if n == 200:
            raise OSError("the file system went away")
        return make(n)

    with closing(threaded(counted)) as prefetcher:
        yield prefetcher


def test_micro_batches_are_made_ahead_in_a_thread(prefetcher, made):
    prefetcher.batch(1)
    deadline = time.monotonic() + 60
    while len(made) < 1 + batches.AHEAD and time.monotonic() < deadline:
        time.sleep(0.001)
    assert made == [(n, False) for n in range(1, 2 + batches.AHEAD)]


def test_each_micro_batch_is_made_once(prefetcher, made):
    for n in range(1, 40):
        inputs, targets = prefetcher.batch(n)
        assert (inputs[0, 0], targets[0, 0]) == (n, n + 1)
    assert [n for n, _ in made] == list(range(1, 1 + len(made)))


def test_micro_batches_may_be_asked_in_any_order(prefetcher):
    for n in (7, 8, 3, 3, 100, 101, 99, 8):
        assert prefetcher.batch(n)[0][0, 0] == n


def test_one_thread_serves_all_micro_batches(prefetcher):
    for n in (1, 2, 50, 3):
        prefetcher.batch(n)
    assert len(threads()) == 1


def test_exception_comes_at_its_micro_batch(prefetcher):
    for n in (198, 199):
        assert prefetcher.batch(n)[0][0, 0] == n
    with pytest.raises(OSError, match="the file system went away"):
        prefetcher.batch(200)


def test_closing_ends_the_thread(threaded):
    with closing(threaded(make)) as prefetcher:
        prefetcher.batch(1)
    assert threads() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_arrive_on_cuda():
    with closing(Prefetcher(make, torch.device("cuda"))) as prefetcher:
        for n in (1, 2, 3, 50, 51, 2):
            found = prefetcher.batch(n)
            assert {tensor.device.type for tensor in found} == {"cuda"}
            assert all(map(torch.equal, (tensor.cpu() for tensor in found), make(n)))
    assert threads() == []
