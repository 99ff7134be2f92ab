import pytest

from brx.cli.main import main
from tests.data.helpers import texts, write_rows


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "corpus.jsonl", texts(200))


def test_prepare_and_info(tmp_path, corpus, capsys, printed):
    config = tmp_path / "config.yaml"  # arguments win
    config.write_text(
        f"data: {{source: nowhere.txt, tokens: 2000, directory: '{tmp_path / 'data'}'}}\n"
    )
    options = [
        "--tokenizer",
        "gpt2",
        "--tokens",
        "3_000",
        "--workers",
        "1",
        "--config",
        str(config),
    ]
    assert main(["data", "prepare", str(corpus), *options]) == 0
    prepared = capsys.readouterr()
    folder, train, validation, source, fingerprint = prepared.out.splitlines()
    assert folder.startswith(f"{tmp_path}/data/corpus.jsonl-gpt2-")
    assert train.startswith("train: 3,000 tokens, ")
    assert validation.startswith("validation: ")
    assert source == f"source {corpus}, tokenizer gpt2"
    assert fingerprint.startswith("fingerprint ")
    assert "tokens/s" in prepared.err
    assert main(["data", "prepare", str(corpus), *options]) == 0
    assert capsys.readouterr() == (prepared.out, "")
    assert printed("data", "info", folder) == prepared.out


def test_list_and_remove(tmp_path, corpus, printed, refused):
    directory = tmp_path / "data"
    for seed in range(2):
        printed(
            "data",
            "prepare",
            corpus,
            "--directory",
            str(directory),
            "--set",
            f"data.split_seed={seed}",
        )
    kept, removed = sorted(directory.glob("[!.]*"))
    unfinished = directory / f".{kept.name}x.partial"
    unfinished.mkdir()
    (unfinished / "note.json").write_text("{}")
    listed = printed("data", "list", directory).splitlines()
    assert [line.split()[2] for line in listed[:-1]] == list(map(str, (unfinished, kept, removed)))
    assert listed[0].endswith("(unfinished)")
    assert "in 3 folders of token files" in listed[-1]
    printed("data", "remove", unfinished, removed)
    assert [path.name for path in directory.iterdir() if path.is_dir()] == [kept.name]
    assert not (directory / f".{removed.name}.lock").exists()
    (kept / "thesis.tex").write_text("")
    refused("data", "remove", kept)  # nothing but token files is removed
    assert (kept / "thesis.tex").exists()
