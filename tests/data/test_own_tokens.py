"""Tokens that another program made, of a vocabulary of its own: they arrive as they are, in
training, too, and what does not fit is refused."""

import json
from contextlib import closing

import numpy as np
import pytest

from brx.cli.main import main
from brx.config.schema import DataConfig
from brx.data.batches import Batches
from brx.data.prepare import TokenWriter, prepare
from brx.errors import UserError

SMALL, LARGE = 65_536, 128_256  # the largest vocabulary of two bytes per id; Llama 3's


def random_ids(vocabulary, count=3000):
    """Ids of a vocabulary, its first and its last among them."""
    ids = np.random.default_rng(0).integers(vocabulary, size=count)
    ids[:2] = 0, vocabulary - 1
    return ids


@pytest.fixture
def folder(tmp_path):
    """Writes a folder of tokens (train, validation), and returns its path."""

    def write(vocabulary, train, validation):
        with closing(TokenWriter(tmp_path / "unfinished", vocabulary=vocabulary)) as writer:
            writer.append("train", train)
            writer.append("validation", validation)
            writer.finish("somebody's texts", "own", tmp_path / "tokens")
        return tmp_path / "tokens"

    return write


def own(source, vocabulary):
    return DataConfig(source=str(source), tokenizer="own", vocabulary=vocabulary)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, ">u4"])
@pytest.mark.parametrize(("vocabulary", "num_bytes"), [(SMALL, 2), (SMALL + 1, 4), (LARGE, 4)])
def test_ids_are_kept(folder, vocabulary, num_bytes, dtype):
    ids = random_ids(vocabulary)
    path = folder(vocabulary, ids.astype(dtype), ids[::-1].astype(dtype))
    data = prepare(own(path, vocabulary))
    np.testing.assert_array_equal(data.train.tokens, ids)
    np.testing.assert_array_equal(data.validation.tokens, ids[::-1])
    assert (path / "train.bin").stat().st_size == num_bytes * len(ids)


def test_micro_batches_hold_the_large_ids(folder):
    ids = random_ids(LARGE, 9)
    data = prepare(own(folder(LARGE, ids, ids), LARGE))
    batches = Batches(data.train, sequence_length=8, batch_size=1, seed=0)  # the only window
    inputs, targets = batches.batch(1)
    assert inputs.tolist() == [ids[:-1].tolist()]
    assert targets.tolist() == [ids[1:].tolist()]


def test_interrupted_writer_goes_on(tmp_path):
    ids = random_ids(LARGE)
    unfinished = tmp_path / "unfinished"
    with closing(TokenWriter(unfinished, vocabulary=LARGE)) as writer:
        writer.append("train", ids[:1000])
        writer.append("validation", ids)
        writer.commit()
        writer.append("train", ids)  # lost
    with closing(TokenWriter(unfinished, vocabulary=LARGE)) as writer:
        assert writer.written.splits["train"].num_tokens == 1000
        writer.append("train", ids[1000:])
        writer.finish("test", "own", tmp_path / "tokens")
    data = prepare(own(tmp_path / "tokens", LARGE))
    np.testing.assert_array_equal(data.train.tokens, ids)


@pytest.mark.parametrize(
    ("vocabulary", "wrong"), [(None, SMALL), (None, -1), (SMALL, SMALL), (LARGE, LARGE), (10, 10)]
)
def test_ids_that_do_not_fit_are_refused(tmp_path, vocabulary, wrong):
    with (
        closing(TokenWriter(tmp_path / "unfinished", vocabulary=vocabulary)) as writer,
        pytest.raises(UserError, match=rf"the token {wrong:,} is not among the [\d,]+ ids"),
    ):
        writer.append("train", np.array([1, wrong]))


def test_lists_are_taken(folder):
    data = prepare(own(folder(10, [3, 1, 2], []), 10))
    assert data.train.tokens.tolist() == [3, 1, 2]
    assert data.validation.num_tokens == 0


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], ["a"]])
def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path, tokens):
    with (
        closing(TokenWriter(tmp_path / "unfinished")) as writer,
        pytest.raises(UserError, match="tokens must be a list of whole numbers"),
    ):
        writer.append("train", tokens)


def test_other_vocabulary_is_refused(folder):
    path = folder(LARGE, random_ids(LARGE), random_ids(LARGE))
    with pytest.raises(UserError, match=r"data.vocabulary: 10, but .* set data.vocabulary to 1282"):
        prepare(own(path, 10))


def test_other_tokenizer_is_refused_with_both_settings(folder):
    path = folder(LARGE, random_ids(LARGE), random_ids(LARGE))
    with pytest.raises(UserError, match=r"to own and data\.vocabulary to 128256"):
        prepare(DataConfig(source=str(path)))


def test_texts_are_refused(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("text")
    with pytest.raises(UserError, match=r"corpus\.txt: must be a folder of token files"):
        prepare(own(path, 10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "own"}, "vocabulary must be the number of different ids"),
        ({"vocabulary": 300}, "vocabulary must be null with tokenizer bytes, got 300"),
    ],
)
def test_vocabulary_goes_with_the_tokenizer_own(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(settings)


def test_sidecar_without_the_vocabulary_is_refused(folder):
    path = folder(10, random_ids(10), random_ids(10))
    sidecar = path / "train.json"
    lines = [line for line in sidecar.read_text().splitlines() if '"vocabulary"' not in line]
    sidecar.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"train\.json: .*vocabulary must be the number"):
        prepare(own(path, 10))


def test_training_takes_the_vocabulary(folder, tmp_path):
    ids = random_ids(LARGE)
    path = folder(LARGE, ids, ids)
    settings = [
        f"data.source={path}",
        "data.tokenizer=own",
        f"data.vocabulary={LARGE}",
        "model.blocks=2",
        "pipeline.stages=2",
        "model.width=8",
        "model.heads=1",
        "model.sequence_length=8",
        "training.iterations=2",
        "training.batch_size=2",
        "training.validation_examples=2",
    ]
    run = tmp_path / "run"
    assert main(["train", "quick", "--out", str(run), "--set", *settings]) == 0
    num_parameters = json.loads((run / "summary.json").read_text())["num_parameters"]
    # Per id, 8 weights in the embedding, 8 in the head, and a bias there; the rest is small.
    assert LARGE * 17 < num_parameters < LARGE * 17 + 10_000
