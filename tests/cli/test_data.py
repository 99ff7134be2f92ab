import pytest

from brx.cli.main import main
from tests.data.helpers import texts, write_rows


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", texts(200))


def test_prepare_and_info(tmp_path, corpus, capsys):
    options = ["--tokenizer", "gpt2", "--tokens", "3_000", "--workers", "1", "--directory", str(tmp_path / "data")]
    assert main(["data", "prepare", str(corpus), *options]) == 0
    prepared = capsys.readouterr()
    folder, train, validation, source, fingerprint = prepared.out.splitlines()
    assert folder.startswith(f"{tmp_path}/data/corpus.jsonl-gpt2-")
    assert train.startswith("train: 3,000 tokens, ")
    assert validation.startswith("validation: ")
    assert source == f"source {corpus}, tokenizer gpt2"
    assert fingerprint.startswith("fingerprint ")
    assert "prepared" in prepared.err
    assert "tokens/s" in prepared.err

    assert main(["data", "prepare", str(corpus), *options]) == 0
    again = capsys.readouterr()
    assert again.out == prepared.out
    assert again.err == ""
    assert main(["data", "info", folder]) == 0
    assert capsys.readouterr().out == prepared.out


def test_list_and_remove(tmp_path, corpus, capsys):
    directory = tmp_path / "data"
    for seed in range(2):
        assert (
            main(["data", "prepare", str(corpus), "--directory", str(directory), "--set", f"data.split_seed={seed}"])
            == 0
        )
    kept, removed = sorted(directory.glob("[!.]*"))
    unfinished = directory / f".{kept.name}x.partial"
    unfinished.mkdir()
    (unfinished / "note.json").write_text("{}")
    capsys.readouterr()
    assert main(["data", "list", str(directory)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in listed[:-1]] == list(map(str, (unfinished, kept, removed)))
    assert listed[0].endswith("(unfinished)")
    assert "in 3 folders of token files" in listed[-1]
    assert main(["data", "remove", str(unfinished), str(removed)]) == 0
    assert [path.name for path in directory.iterdir() if path.is_dir()] == [kept.name]
    assert not (directory / f".{removed.name}.lock").exists()


@pytest.mark.parametrize("content", [[], ["thesis.tex", "train.json"]])
def test_nothing_but_token_files_is_removed(tmp_path, capsys, content):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in content:
        (folder / name).write_text("")
    assert main(["data", "remove", str(folder)]) == 2
    assert capsys.readouterr().err == f"brx: {folder}: no folder of token files; brx data list names them\n"
    assert sorted(path.name for path in folder.iterdir()) == content


def test_settings_come_from_the_configuration_and_arguments_win(tmp_path, corpus, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(f"data: {{source: nowhere.txt, tokens: 2000, directory: '{tmp_path}'}}\n")
    assert main(["data", "prepare", str(corpus), "--config", str(config), "--set", "data.split_seed=3"]) == 0
    assert "train: 2,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "missing.txt"], "data.source: missing.txt: no such file"),
        (["prepare", "--tokens", "0"], "data.tokens"),
        (["prepare", "--tokenizer", "words"], "data.tokenizer"),
        (["prepare", "--workers", "-1"], "--workers: input should be greater than or equal to 0"),
        (["info", "missing"], "missing: no such folder; token files are made with brx data prepare"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
