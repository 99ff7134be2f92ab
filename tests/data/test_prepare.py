"""Token files: every document once, in order, to the same bytes wherever a preparation is
interrupted."""

import json
import os
import shutil
from collections import namedtuple
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brx.config.schema import DataConfig
from brx.data import prepare as preparing
from brx.data import sources, token_file
from brx.data.prepare import SPLITS, TokenWriter, prepare, remove, token_folder, tokenized
from brx.data.sources import is_validation
from brx.data.token_file import (
    GPT2_END_OF_TEXT,
    TokenFile,
    gpt2_encoding,
    make_tokenizer,
    sha256,
)
from brx.errors import RunError, UserError
from tests.data.helpers import local_config, run_python, texts, write_rows
from tests.train.helpers import files_of_at_most

DOCUMENTS = texts(300)


def naive(documents, tokenizer="bytes", fraction=0.1, seed=0):
    """What the files should hold, by a plain loop."""
    encoding = gpt2_encoding()
    splits = {False: [], True: []}
    for text in documents:
        tokens = (
            [*text.encode(), 0]
            if tokenizer == "bytes"
            else [*encoding.encode_ordinary(text), GPT2_END_OF_TEXT]
        )
        splits[is_validation(text, fraction, seed)] += tokens
    return splits[False], splits[True]


def ids(data):
    return data.train.tokens.tolist(), data.validation.tokens.tolist()


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_files_hold_every_document_once(tmp_path, tokenizer):
    data = prepare(local_config(tmp_path, DOCUMENTS, tokenizer=tokenizer), workers=3)
    assert ids(data) == naive(DOCUMENTS, tokenizer)
    assert data.train.sidecar.num_documents + data.validation.sidecar.num_documents == len(
        DOCUMENTS
    )


def test_few_documents_are_in_memory():
    read = []
    pairs = tokenized(
        make_tokenizer("bytes"), (read.append(1) or "0123456789" for _ in range(1000)), 2
    )
    for number in range(1, 20):
        next(pairs)
        assert len(read) <= number + preparing.DOCUMENTS_AHEAD
    pairs.close()


@pytest.fixture(params=[1000, 5001])
def limited(request, tmp_path):
    """Settings with a budget of tokens."""
    return local_config(tmp_path, DOCUMENTS, tokens=request.param, validation_fraction=0.5)


def test_budget_is_met_exactly(limited):
    train, _ = naive(DOCUMENTS, fraction=0.5)
    assert prepare(limited).train.tokens.tolist() == train[: limited.tokens]


def test_validation_ends_with_the_budget(limited):
    _, validation = naive(DOCUMENTS, fraction=0.5)
    found = prepare(limited).validation
    assert 0 < found.num_tokens < len(validation)
    assert found.tokens.tolist() == validation[: found.num_tokens]


def test_preparation_stopped_at_its_end_takes_nothing_further(limited, tmp_path, monkeypatch):
    expected = prepare(limited.model_copy(update={"directory": str(tmp_path / "elsewhere")}))
    with monkeypatch.context() as patch:
        patch.setattr(preparing, "sha256", None)  # after the last document
        with pytest.raises(TypeError):
            prepare(limited)
    found = prepare(limited)
    assert found.train.sidecar == expected.train.sidecar
    assert found.validation.sidecar == expected.validation.sidecar


def test_preparation_says_that_it_is_done(tmp_path, capsys):
    prepare(local_config(tmp_path, DOCUMENTS))
    assert "prepared" in capsys.readouterr().err


def test_quiet_preparation_says_nothing(tmp_path, capsys):
    config = local_config(tmp_path, DOCUMENTS)
    capsys.readouterr()  # version of the library that wrote the corpus
    prepare(config, quiet=True)
    assert capsys.readouterr().err == ""


def test_prepared_files_are_found_again(tmp_path, monkeypatch, capsys):
    config = local_config(tmp_path, DOCUMENTS)
    first = prepare(config)
    capsys.readouterr()
    monkeypatch.setattr(preparing, "documents", None)  # would fail if it were used
    assert prepare(config).fingerprint == first.fingerprint
    assert capsys.readouterr().err == ""


def test_damaged_files_are_told(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config)
    os.truncate(token_folder(config) / "validation.bin", 10)
    with pytest.raises(
        UserError, match=r"validation\.bin: holds 10 bytes.*; remove \S+ to prepare it again$"
    ):
        prepare(config)


def test_tokens_that_are_the_source_are_never_to_be_removed(tmp_path):
    # They may be the only copy of somebody's tokens.
    folder = tmp_path / "tokens"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match=r"train\.json: .*; docs/how-to\.md") as caught:
        prepare(DataConfig(source=str(folder)))
    assert "remove" not in str(caught.value)


CHANGES = (
    {},
    {"tokenizer": "gpt2"},
    {"tokens": 5000},
    {"validation_fraction": 0.2},
    {"split_seed": 1},
    {"sample_fraction": 0.5},
    {"sample_fraction": 0.5, "sample_seed": 1},
)
"""Of settings: each gives other tokens."""


def test_every_change_of_the_tokens_has_its_folder(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    folders = {token_folder(config.model_copy(update=change)) for change in CHANGES}
    assert len(folders) == len(CHANGES)


def test_every_change_of_the_tokens_has_its_fingerprint(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    found = {prepare(config.model_copy(update=change)).fingerprint for change in CHANGES}
    assert len(found) == len(CHANGES)


def test_changed_source_is_prepared_anew(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    before = prepare(config).fingerprint
    write_rows(tmp_path / "corpus.parquet", DOCUMENTS[:250])
    after = prepare(config)
    assert after.fingerprint != before
    assert ids(after) == naive(DOCUMENTS[:250])


def test_fingerprint_does_not_depend_on_the_place(tmp_path):
    found = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        found.add(prepare(local_config(tmp_path / name, DOCUMENTS)).fingerprint)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("documents", "settings", "message"),
    [
        ([""], {}, r"^data\.source: \S+: too small: 0 documents"),
        (
            ["only one"],
            {},
            r"^data\.source: \S+: too small: 1 document gave 1 for training and 0 for validation",
        ),
        (
            DOCUMENTS,
            {"tokens": 9},
            r"too small: 1 document gave .* \(data\.validation_fraction 0\.1, data\.tokens 9",
        ),
        (
            DOCUMENTS,
            {"tokens": 10**6},
            r"^data\.tokens: 1,000,000 .* asked for, \S+ holds \d\d,\d{3} \(and \d,\d{3} ",
        ),
        (
            DOCUMENTS,
            {"text_field": "body"},
            r"^data\.text_field: \S+ has no field 'body'; its fields are id, text$",
        ),
    ],
)
def test_refused_source_leaves_no_token_files(tmp_path, documents, settings, message):
    with pytest.raises(UserError, match=message):
        prepare(local_config(tmp_path, documents, **settings))
    assert list((tmp_path / "data").glob("[!.]*")) == []


def test_small_text_file_is_told_what_its_documents_are(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n" * 4000)
    with pytest.raises(
        UserError, match=r"3 documents gave .*; a \.txt file counts as documents of "
    ):
        prepare(DataConfig(source=str(tmp_path / "a.txt"), directory=str(tmp_path / "data")))


def test_disk_with_too_little_room_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1_500_000_000)
    )
    monkeypatch.setattr(preparing, "documents", None)
    config = local_config(tmp_path, DOCUMENTS, tokens=10**9, validation_fraction=0.1)
    message = r"^data\.directory: \S+: 1,000,000,000 .* need 2\.22 GB, 1\.50 GB are free$"
    with pytest.raises(UserError, match=message):
        prepare(config)


def test_directory_that_is_a_file_is_told(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    (tmp_path / "data").write_text("a file")
    with pytest.raises(RunError, match=r"^\S+data\S+: cannot be written: "):
        prepare(config)


# A process that prepares what its arguments name, and after each commit waits for a line (or for
# the end of its input).
STEPWISE = """
import sys
from brx.config.schema import DataConfig
from brx.data import prepare

prepare.DOCUMENTS_PER_COMMIT = 20
commit = prepare.TokenWriter.commit
def stepwise_commit(writer):
    commit(writer)
    print("committed", flush=True)
    sys.stdin.readline()
prepare.TokenWriter.commit = stepwise_commit
source, directory, tokenizer = sys.argv[1:]
config = DataConfig(source=source, directory=directory, tokenizer=tokenizer)
prepare.prepare(config, workers=2)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Settings whose preparation was killed after 100 documents."""
    config = local_config(tmp_path_factory.mktemp("killed"), DOCUMENTS, tokenizer="gpt2")
    with run_python(STEPWISE, config.source, config.directory, "gpt2") as process:
        assert process.stdout.readline() == "committed\n"
        for _ in range(4):
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "committed\n"
        process.kill()  # while it waits
    return config


@pytest.fixture
def killed_copy(killed, tmp_path):
    """Such settings of a test's own."""
    directory = shutil.copytree(killed.directory, tmp_path / "data")
    return killed.model_copy(update={"directory": str(directory)})


def test_killed_preparation_has_no_folder(killed):
    assert not token_folder(killed).exists()


def test_killed_preparation_ends_with_the_same_files(killed_copy):
    assert ids(prepare(killed_copy)) == naive(DOCUMENTS, "gpt2")


def test_killed_preparation_reads_no_document_again(killed_copy, monkeypatch):
    skipped = []
    documents = preparing.documents

    def watched(config, skip):
        skipped.append(skip)
        return documents(config, skip=skip)

    monkeypatch.setattr(preparing, "documents", watched)
    prepare(killed_copy)
    assert skipped == [100]


def test_finished_preparation_leaves_no_partial_files(killed_copy, tmp_path):
    prepare(killed_copy)
    assert not list((tmp_path / "data").glob(".*.partial"))


def test_second_preparation_waits_for_the_first(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    first = run_python(STEPWISE, config.source, config.directory, "bytes")
    assert first.stdout.readline() == "committed\n"
    second = run_python(STEPWISE, config.source, config.directory, "bytes")
    assert (
        second.stderr.readline()
        == f"waiting for another process that prepares {token_folder(config)}\n"
    )
    for process in (first, second):
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert ids(prepare(config)) == naive(DOCUMENTS)


@pytest.fixture
def filled(tmp_path):
    """Settings whose preparation has ended because the disk was full, and what it said."""
    config = local_config(tmp_path, DOCUMENTS)
    with files_of_at_most(20_000), pytest.raises(RunError) as ended:
        prepare(config)
    return config, str(ended.value)


def test_full_file_system_is_one_line(filled):
    config, told = filled
    assert told.startswith(
        f"{token_folder(config)}: cannot be written: File too large; once that is mended"
    )
    assert "\n" not in told


def test_failed_close_closes_both_files(tmp_path):
    writer = TokenWriter(tmp_path / "partial")
    for split in SPLITS:
        writer.append(split, np.arange(10))
    files = list(writer._files.values())
    with files_of_at_most(4), pytest.raises(OSError, match="File too large"):
        writer.close()
    assert [file.closed for file in files] == [True, True]


def test_preparation_continues_once_there_is_room(filled):
    config, _ = filled
    assert ids(prepare(config)) == naive(DOCUMENTS)


def to_ids(half):
    return np.frombuffer(half, "<u2")


def below_gpt2s_size(half):
    """Twice as many bytes, whose tokens all exist in GPT-2's vocabulary of 50,257."""
    return (to_ids(half + half) % 50_257).astype("<u2").tobytes()


entries = st.lists(
    st.tuples(st.sampled_from(SPLITS), st.binary(max_size=6).map(below_gpt2s_size)),
    max_size=30,
)


def finished(folder, writer):
    writer.finish("test", "gpt2", folder)
    return {split: (folder / f"{split}.bin").read_bytes() for split in SPLITS}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(
    entries=entries, commits=st.sets(st.integers(0, 30)), interruptions=st.sets(st.integers(0, 30))
)
def test_interrupted_writer_gives_the_same_files(tmp_path_factory, entries, commits, interruptions):
    tmp_path = tmp_path_factory.mktemp("writing")
    expected = {
        split: b"".join(tokens for to, tokens in entries if to == split) for split in SPLITS
    }
    left = set(interruptions)
    while True:
        with closing(TokenWriter(tmp_path / "partial")) as writer:
            # The exit flushes what was not committed: the next writer has to cut that off.
            for place in range(writer.written.documents_read, len(entries)):
                if place in left:
                    left.remove(place)
                    break
                writer.append(entries[place][0], to_ids(entries[place][1]))
                if place in commits:
                    writer.commit()
            else:
                assert finished(tmp_path / "done", writer) == expected
                break
    for split in SPLITS:
        file = TokenFile.load(tmp_path / "done" / f"{split}.bin")
        assert file.sidecar.num_documents == sum(to == split for to, _ in entries)
    assert not (tmp_path / "partial").exists()


def write_two_documents(partial):
    with closing(TokenWriter(partial)) as writer:
        writer.append("train", to_ids(b"abcd"))
        writer.append("validation", to_ids(b"ef"))
        writer.commit()


def assert_starts_anew(tmp_path):
    with closing(TokenWriter(tmp_path / "partial")) as writer:
        assert writer.written.documents_read == 0
        writer.append("train", to_ids(b"gh"))
        assert finished(tmp_path / "done", writer) == {"train": b"gh", "validation": b""}


UNKNOWN_KEY = json.dumps({"documents_read": 2, "splits": {"train": {"x": 1}}})


@pytest.mark.parametrize("note", ["", "[]", "{", '{"documents_read": 2}', UNKNOWN_KEY])
def test_damaged_note_means_a_new_start(note, tmp_path):
    write_two_documents(tmp_path / "partial")
    (tmp_path / "partial" / "note.json").write_text(note)
    assert_starts_anew(tmp_path)


def test_file_shorter_than_noted_means_new_start(tmp_path):
    write_two_documents(tmp_path / "partial")
    (tmp_path / "partial" / "train.bin").write_bytes(b"ab")
    assert_starts_anew(tmp_path)


def test_token_folder_may_be_the_source(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    prepared = prepare(config)
    elsewhere = shutil.copytree(token_folder(config), tmp_path / "elsewhere")
    source = config.model_copy(update={"source": str(elsewhere)})
    assert prepare(source).fingerprint == prepared.fingerprint


def test_token_folder_of_another_tokenizer_is_refused(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config)
    other = {"source": str(token_folder(config)), "tokenizer": "gpt2"}
    with pytest.raises(
        UserError, match=r"data.tokenizer: gpt2, but .* set data.tokenizer to bytes"
    ):
        prepare(config.model_copy(update=other))


def test_validation_tokens_of_another_tokenizer_are_refused(tmp_path):
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config)
    sidecar = token_folder(config) / "validation.json"
    sidecar.write_text(sidecar.read_text().replace('"bytes"', '"gpt2"'))
    source = config.model_copy(update={"source": str(token_folder(config))})
    with pytest.raises(UserError, match=r"data.tokenizer: bytes, but validation.bin in .* gpt2"):
        prepare(source)


def test_link_to_token_files_is_not_removed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match=r"link: is a link to .*real; name that folder"):
        remove(tmp_path / "link")
    assert (tmp_path / "real").is_dir()


def test_hash_is_computed_again_on_request(tmp_path, monkeypatch):
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config)
    hashed = []
    monkeypatch.setattr(token_file, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    prepare(config)
    assert hashed == []
    prepare(config, always_hash=True)
    assert hashed == ["train.bin", "validation.bin"]


@pytest.fixture
def gone(tmp_path):
    """Settings whose token files are there while the source is gone, and the data's fingerprint."""
    config = local_config(tmp_path, DOCUMENTS)
    prepare(config.model_copy(update={"split_seed": 1}))  # another run's
    fingerprint = prepare(config).fingerprint
    os.remove(config.source)
    return config, fingerprint


def test_token_files_outlive_their_source(gone, capsys):
    config, fingerprint = gone
    assert prepare(config, fingerprint=fingerprint).fingerprint == fingerprint
    assert "is gone; the run goes on with the token files" in capsys.readouterr().err


@pytest.mark.parametrize("documents", [DOCUMENTS[:-1], [*DOCUMENTS, "one more"]])
def test_token_files_outlive_a_change_of_their_source(tmp_path, documents, capsys):
    config = local_config(tmp_path, DOCUMENTS)
    fingerprint = prepare(config).fingerprint
    write_rows(tmp_path / "corpus.parquet", documents)
    capsys.readouterr()
    assert prepare(config, fingerprint=fingerprint).fingerprint == fingerprint
    assert "has changed; the run goes on with the token files" in capsys.readouterr().err
    assert prepare(config).fingerprint != fingerprint  # another run takes the new text


def test_source_of_this_name_is_taken_first(tmp_path, capsys):
    config = local_config(tmp_path, DOCUMENTS)
    copy = tmp_path / "copy.parquet"
    shutil.copy(config.source, copy)
    prepare(config.model_copy(update={"source": str(copy)}))  # the same tokens
    fingerprint = prepare(config).fingerprint
    folder = token_folder(config)
    os.utime(config.source, (0, 0))
    capsys.readouterr()
    prepare(config, fingerprint=fingerprint)
    assert f"that it was trained on, {folder}\n" in capsys.readouterr().err


def test_token_files_outlive_their_packages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "package_sources", lambda: iter(DOCUMENTS))
    config = DataConfig(source="packages", directory=str(tmp_path))
    fingerprint = prepare(config, quiet=True).fingerprint
    monkeypatch.setattr(sources, "find_spec", lambda package: None)
    assert prepare(config, fingerprint=fingerprint).fingerprint == fingerprint
    assert "is gone; the run goes on with the token files" in capsys.readouterr().err


@pytest.mark.parametrize("fingerprint", [None, "0" * 64])
def test_source_that_is_gone_is_told(gone, fingerprint):
    config, _ = gone
    with pytest.raises(UserError, match=r"data\.source: \S+: no such file"):
        prepare(config, fingerprint=fingerprint)


def test_source_out_of_reach_leaves_no_folder(tmp_path, monkeypatch):
    def unreachable(config, skip):
        raise UserError("data.source: openwebtext: cannot be reached")
        yield

    monkeypatch.setattr(preparing, "documents", unreachable)
    config = local_config(tmp_path, DOCUMENTS)
    with pytest.raises(UserError, match="cannot be reached"):
        prepare(config)
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


def test_folder_that_is_gone_is_no_dataset(gone, monkeypatch):
    config, fingerprint = gone
    monkeypatch.setattr(preparing, "documents", None)  # would fail if the hub were asked
    of_folder = config.model_copy(update={"source": "corpus"})
    assert prepare(of_folder, fingerprint=fingerprint).fingerprint == fingerprint
