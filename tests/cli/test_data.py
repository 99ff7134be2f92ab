import pytest

from brx.cli.main import main
from tests.data.helpers import texts, write_rows


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", texts(200))


@pytest.fixture
def prepare(tmp_path, corpus):
    """Runs `brx data prepare` with a configuration that its arguments override."""
    config = tmp_path / "config.yaml"
    directory = tmp_path / "data"
    config.write_text(f"data: {{source: nowhere.txt, tokens: 2000, directory: '{directory}'}}\n")
    options = ["--tokenizer", "gpt2", "--tokens", "3_000", "--workers", "1"]
    return lambda: main(["data", "prepare", str(corpus), *options, "--config", str(config)])


def test_arguments_win_over_the_configuration(prepare, tmp_path, corpus, capsys):
    assert prepare() == 0
    folder, train, validation, source, fingerprint = capsys.readouterr().out.splitlines()
    assert folder.startswith(f"{tmp_path}/data/corpus.jsonl-gpt2-")
    assert train.startswith("train: 3,000 tokens, ")
    assert validation.startswith("validation: ")
    assert source == f"source {corpus}, tokenizer gpt2"
    assert fingerprint.startswith("fingerprint ")


def test_prepare_shows_its_speed(prepare, capsys):
    prepare()
    assert "tokens/s" in capsys.readouterr().err


def test_prepare_finds_what_is_prepared(prepare, capsys):
    prepare()
    first = capsys.readouterr().out
    assert prepare() == 0
    assert capsys.readouterr() == (first, "")


def test_info_prints_what_prepare_printed(prepare, capsys, printed):
    prepare()
    prepared = capsys.readouterr().out
    folder = prepared.splitlines()[0]
    assert printed("data", "info", folder) == prepared


@pytest.fixture
def folders(tmp_path, corpus, printed):
    """A folder of an unfinished preparation, and two that are complete, in the order of a list."""
    directory = tmp_path / "data"
    arguments = ("data", "prepare", corpus, "--directory", str(directory))
    for seed in range(2):
        printed(*arguments, "--set", f"data.split_seed={seed}")
    kept, removed = sorted(directory.glob("[!.]*"))
    unfinished = directory / f".{kept.name}x.partial"
    unfinished.mkdir()
    (unfinished / "note.json").write_text("{}")
    return unfinished, kept, removed


def test_list_has_every_folder(folders, printed):
    *lines, total = printed("data", "list", folders[0].parent).splitlines()
    assert [line.split()[2] for line in lines] == [str(folder) for folder in folders]
    assert "in 3 folders of token files" in total


def test_list_marks_unfinished_folders(folders, printed):
    first, *_ = printed("data", "list", folders[0].parent).splitlines()
    assert first.endswith("(unfinished)")


def test_remove_takes_complete_or_unfinished_folders(folders, printed):
    unfinished, kept, removed = folders
    printed("data", "remove", unfinished, removed)
    assert [path for path in kept.parent.iterdir() if path.is_dir()] == [kept]


def test_remove_takes_the_lock_file(folders, printed):
    *_, removed = folders
    printed("data", "remove", removed)
    assert not removed.with_name(f".{removed.name}.lock").exists()


def test_folder_with_other_files_is_kept(folders, refused):
    _, kept, _ = folders
    (kept / "thesis.tex").write_text("")
    refused("data", "remove", kept)
    assert (kept / "thesis.tex").exists()
