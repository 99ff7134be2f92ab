import os
import shutil
from collections import namedtuple

import pytest

from brx.data import prepare as preparing
from brx.data.prepare import prepare, token_folder, tokenized
from brx.data.sources import is_validation
from brx.data.tokenizers import GPT2_END_OF_TEXT, gpt2_encoding, make_tokenizer
from brx.errors import RunError, UserError
from tests.data.helpers import local_config, run_python, texts, write_rows

DOCUMENTS = texts(300)


def naive(documents, tokenizer="bytes", fraction=0.1, seed=0):
    """What the files should hold, by a plain loop."""
    encoding = gpt2_encoding()
    splits = {False: [], True: []}
    for text in documents:
        tokens = [*text.encode(), 0] if tokenizer == "bytes" else [*encoding.encode_ordinary(text), GPT2_END_OF_TEXT]
        splits[is_validation(text, fraction, seed)] += tokens
    return splits[False], splits[True]


def ids(data):
    return data.train.tokens.tolist(), data.validation.tokens.tolist()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK_CHARACTERS", 2000)


@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", 256), ("gpt2", 50257)])
def test_the_files_hold_every_document_once(tmp_path, tokenizer, size):
    data = prepare(local_config(tmp_path, DOCUMENTS, tokenizer=tokenizer), workers=0)
    train, validation = naive(DOCUMENTS, tokenizer)
    assert ids(data) == (train, validation)
    assert data.vocabulary_size == size
    assert data.train.sidecar.num_documents + data.validation.sidecar.num_documents == len(DOCUMENTS)
    assert data.train.sidecar.num_tokens == data.train.num_tokens == len(train)


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_threads_give_what_one_gives_in_order(monkeypatch, tokenizer):
    tokenize = make_tokenizer(tokenizer)
    alone, together = ([pair for c in tokenized(tokenize, DOCUMENTS, n) for pair in c] for n in (1, 3))
    assert [text for text, _ in together] == DOCUMENTS
    assert [tokens.tolist() for _, tokens in together] == [tokens.tolist() for _, tokens in alone]


def test_few_documents_are_in_memory(monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK_CHARACTERS", 10)
    read = []
    chunks = tokenized(make_tokenizer("bytes"), (read.append(1) or "0123456789" for _ in range(1000)), 2)
    for number in range(1, 20):
        next(chunks)
        assert len(read) <= number + 1
    chunks.close()


@pytest.mark.parametrize("tokens", [1000, 1001, 5000])
def test_the_budget_is_met_exactly(tmp_path, tokens):
    config = local_config(tmp_path, DOCUMENTS, tokens=tokens, validation_fraction=0.5)
    data = prepare(config, workers=0)
    train, validation = naive(DOCUMENTS, fraction=0.5)
    assert data.train.tokens.tolist() == train[:tokens]
    assert 0 < data.validation.num_tokens < len(validation)
    assert data.validation.tokens.tolist() == validation[: data.validation.num_tokens]


def test_found_again_without_work(tmp_path, monkeypatch, capsys):
    config = local_config(tmp_path, DOCUMENTS)
    elsewhere = config.model_copy(update={"directory": str(tmp_path / "quiet")})
    first = prepare(elsewhere, quiet=True)
    assert capsys.readouterr().err == ""
    assert prepare(config).fingerprint == first.fingerprint
    assert "prepared" in capsys.readouterr().err
    monkeypatch.setattr(preparing, "documents", None)  # would fail if it were used
    again = prepare(config)
    assert again.fingerprint == first.fingerprint
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "change", [{"tokenizer": "gpt2"}, {"tokens": 5000}, {"validation_fraction": 0.2}, {"split_seed": 1}]
)
def test_whatever_changes_the_content_changes_the_folder(tmp_path, change):
    config = local_config(tmp_path, DOCUMENTS)
    changed = config.model_copy(update=change)
    assert token_folder(changed) != token_folder(config)
    assert prepare(changed, workers=0).fingerprint != prepare(config).fingerprint


def test_a_changed_source_is_prepared_anew(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    before = prepare(config)
    write_rows(tmp_path / "corpus.parquet", DOCUMENTS[:250])
    after = prepare(config)
    assert after.fingerprint != before.fingerprint
    assert ids(after) == naive(DOCUMENTS[:250])


def test_the_same_content_has_the_same_fingerprint_wherever_it_is(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (prepare(local_config(folder, DOCUMENTS)) for folder in folders)
    assert first.fingerprint == second.fingerprint
    assert prepare(local_config(folders[0], DOCUMENTS, split_seed=5)).fingerprint != first.fingerprint


def test_damaged_files_are_told(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config)
    os.truncate(token_folder(config) / "validation.bin", 10)
    with pytest.raises(UserError, match=r"validation\.bin: holds 10 bytes"):
        prepare(config)


@pytest.mark.parametrize(
    ("documents", "settings", "message"),
    [
        ([""], {}, r"^data\.source: \S+: holds no text$"),
        (["only one"], {}, r"^data\.source: \S+: too small: 1 documents gave 1 for training and 0 for validation"),
        (
            DOCUMENTS,
            {"tokens": 9},
            r"too small: 1 documents gave 1 for .* \(data\.validation_fraction 0\.1, data\.tokens 9",
        ),
        (DOCUMENTS, {"tokens": 10**6}, r"^data\.tokens: 1,000,000 .* asked for, \S+ holds \d\d,\d{3} \(and \d,\d{3} "),
        (DOCUMENTS, {"text_field": "body"}, r"^data\.text_field: \S+ has no field 'body'; its fields are id, text$"),
    ],
)
def test_a_source_that_will_not_do_leaves_no_token_files(tmp_path, documents, settings, message):
    config = local_config(tmp_path, documents, **settings)
    with pytest.raises(UserError, match=message):
        prepare(config)
    assert list((tmp_path / "data").glob("[!.]*")) == []


def test_a_small_disk_is_told_before_the_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1_500_000_000))
    monkeypatch.setattr(preparing, "documents", None)
    config = local_config(tmp_path, DOCUMENTS, tokens=10**9, validation_fraction=0.1)
    with pytest.raises(UserError, match=r"^data\.directory: \S+: 1,000,000,000 .* need 2\.22 GB, 1\.50 GB are free$"):
        prepare(config)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    (tmp_path / "data").write_text("a file")
    with pytest.raises(RunError, match=r"^\S+data\S+: cannot be written: "):
        prepare(config)


# A process that prepares what its arguments name, and after each commit waits for a line (or for the end of its input).
STEPWISE = """
import sys
from brx.config.schema import DataConfig
from brx.data import prepare

prepare.CHUNK_CHARACTERS, prepare.CHUNKS_PER_COMMIT = 2000, 2
commit = prepare.TokenWriter.commit
def stepwise_commit(writer):
    commit(writer)
    print("committed", flush=True)
    sys.stdin.readline()
prepare.TokenWriter.commit = stepwise_commit
settings = dict(source=sys.argv[1], directory=sys.argv[2], tokenizer=sys.argv[3])
if __name__ == "__main__":
    prepare.prepare(DataConfig(**settings), workers=int(sys.argv[4]))
"""


@pytest.mark.parametrize(("tokenizer", "workers"), [("bytes", 0), ("gpt2", 1)])
def test_killed_and_started_again_it_gives_the_same_files(tmp_path, monkeypatch, tokenizer, workers):
    config = local_config(tmp_path, DOCUMENTS, tokenizer=tokenizer)
    process = run_python(STEPWISE, config.source, config.directory, tokenizer, workers)
    assert process.stdout.readline() == "committed\n"
    for _ in range(4):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "committed\n"
    process.kill()  # while it waits
    process.wait()
    assert not token_folder(config).exists()

    read = []
    documents = preparing.documents
    monkeypatch.setattr(preparing, "documents", lambda config, skip: read.append(skip) or documents(config, skip=skip))
    assert ids(prepare(config, workers=0)) == naive(DOCUMENTS, tokenizer)
    assert 0 < read[0] < len(DOCUMENTS)  # it did go on, and did not start afresh
    assert not list((tmp_path / "data").glob(".*.partial"))


def test_two_at_once(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    arguments = (STEPWISE, config.source, config.directory, "bytes", 0)
    first = run_python(*arguments)
    assert first.stdout.readline() == "committed\n"
    second = run_python(*arguments)
    assert second.stderr.readline() == f"waiting for another process that prepares {token_folder(config)}\n"
    for process in (first, second):
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert ids(prepare(config)) == naive(DOCUMENTS)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from brx.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_file_system_that_is_full_is_one_line_and_can_be_gone_on_from(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    arguments = ("data", "prepare", config.source, "--directory", config.directory)
    process = run_python(FULL, *arguments, PYTHONDONTWRITEBYTECODE="1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.startswith(f"brx: {token_folder(config)}: cannot be written: File too large; once that is mended")
    assert len(err.splitlines()) == 1
    assert ids(prepare(config)) == naive(DOCUMENTS)


def test_no_setting_of_the_process_decides_the_tokens(tmp_path):
    digests = set()
    for seed, encoding in (("1", "utf-8"), ("2", "latin-1")):
        code = (
            "import sys; from brx.config.schema import DataConfig; from brx.data.prepare import prepare;"
            "data = prepare(DataConfig(directory=sys.argv[1], tokens=500_000)); print(data.fingerprint)"
        )
        process = run_python(code, tmp_path / seed, PYTHONHASHSEED=seed, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        digests.add(out)
    assert len(digests) == 1
