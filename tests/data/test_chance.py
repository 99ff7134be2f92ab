"""Which documents are drawn: by seed and text alone, in the share that was asked for."""

from brx.config.schema import DataConfig
from brx.data.prepare import prepare
from brx.data.sources import documents, is_sampled, is_validation
from tests.data.helpers import local_config, texts, write_rows


def test_the_split_is_a_function_of_seed_and_text():
    documents = texts(5000)
    held_out = [is_validation(text, 0.1, 0) for text in documents]
    assert 420 < sum(held_out) < 580  # 500, give or take 3.7 standard deviations
    assert held_out == [is_validation(text, 0.1, 0) for text in documents]
    other = [is_validation(text, 0.1, 1) for text in documents]
    assert sum(a and b for a, b in zip(held_out, other, strict=True)) < 100  # 50 by chance
    more = [is_validation(text, 0.2, 0) for text in documents]
    assert all(b or not a for a, b in zip(held_out, more, strict=True))
    assert [is_validation(text, 0.5, 0) for text in ("a", "b", "c", "d", "e", "f")] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]  # on every machine


def test_the_sample_is_independent_of_the_split():
    drawn = [text for text in texts(5000) if is_sampled(text, 0.2, 0)]
    assert 890 < len(drawn) < 1110  # 1,000, give or take 3.9 standard deviations
    assert 60 < sum(is_validation(text, 0.1, 0) for text in drawn) < 140  # 100, give or take 4.2
    other = {text for text in texts(5000) if is_sampled(text, 0.2, 1)}
    assert 140 < len(other & {*drawn}) < 260  # 200 by chance


def test_a_source_gives_the_sampled_documents_in_its_order(tmp_path):
    everything = texts(400)
    path = write_rows(tmp_path / "corpus.jsonl", everything)
    drawn = [text for text in everything if is_sampled(text, 0.3, 5)]
    config = DataConfig(source=str(path), sample_fraction=0.3, sample_seed=5)
    assert list(documents(config)) == drawn
    assert list(documents(config, skip=20)) == drawn[20:]  # as after an interruption


def test_another_sample_is_another_corpus(tmp_path):
    prepared = [
        prepare(local_config(tmp_path, texts(400), sample_fraction=fraction, sample_seed=seed), workers=0)
        for fraction, seed in ((1.0, 0), (0.5, 0), (0.5, 1))
    ]
    assert len({data.fingerprint for data in prepared}) == 3
    assert len({data.train.num_tokens for data in prepared}) == 3
