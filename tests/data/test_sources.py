import datasets
import huggingface_hub
import pytest

from brx.config.schema import DataConfig
from brx.data import sources
from brx.data.sources import documents, local_files
from brx.errors import RunError, UserError
from tests.data.helpers import texts, write_rows

DOCUMENTS = texts(700)


def read(source, **settings):
    return list(documents(DataConfig(source=str(source), **settings)))


def test_skip_leaves_out_the_first(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", DOCUMENTS)
    assert list(documents(DataConfig(source=str(path)), skip=300)) == DOCUMENTS[300:]
    assert list(documents(DataConfig(source=str(path)), skip=1000)) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_documents_and_empty_ones_are_left_out(tmp_path, suffix):
    path = write_rows(tmp_path / f"a{suffix}", ["", *DOCUMENTS, "", "last"], field="content")
    assert read(path, text_field="content") == [*DOCUMENTS, "last"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_holds_no_documents(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / "b.txt").write_text("text")
    assert "".join(read(tmp_path)).strip() == "text"


def test_a_small_text_file_is_a_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\nthree é".encode())
    assert read(tmp_path / "a.txt") == ["one\r\ntwo\nthree é"]


@pytest.mark.parametrize("line", ["word " * 20 + "\n", "中" * 777 + "\n", "no line ends at all "])
def test_a_long_text_file_is_cut_at_line_ends(tmp_path, line):
    text = line * 3000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = read(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= 2 * sources.TEXT_PIECE
    if line.endswith("\n"):
        assert all(piece.endswith("\n") for piece in pieces)


def test_folders_and_patterns(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "deep.txt").write_text("deep")
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / "odd [1].txt").write_text("odd")
    (tmp_path / "notes.md").write_text("not this")
    write_rows(tmp_path / "a.jsonl", ["row"])
    assert read(tmp_path) == ["row", "deep", "odd", "z"]
    assert read(tmp_path / "*.txt") == ["odd", "z"]
    assert read(tmp_path / "**" / "*.txt") == ["deep", "odd", "z"]
    assert read(tmp_path / "odd [1].txt") == ["odd"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", r"missing\.txt: no such file"),
        ("missing/deeper/file", r"file: no such file"),
        ("*.txt", r"\*\.txt: the pattern matches no file"),
        ("table.csv", r"table\.csv: unknown kind of file; known are \.txt, \.jsonl, \.parquet"),
        ("*.csv", r"table\.csv: unknown kind of file; known are \.txt, \.jsonl, \.parquet"),
        ("folder", r"folder: the folder holds no \.txt, \.jsonl, \.parquet file"),
        ("binary/bin.txt", r"bin\.txt: not UTF-8 text"),
        ("binary/nul.txt", r"nul\.txt: holds NUL characters: not a text file"),
        ("binary/bad.jsonl", r"bad\.jsonl: cannot be read: "),
        ("binary/bad.parquet", r"bad\.parquet: cannot be read: "),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path, name, message):
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "bin.txt").write_bytes(b"abc\xff\xfe")
    (tmp_path / "binary" / "nul.txt").write_bytes(b"abc\0def")
    (tmp_path / "binary" / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "binary" / "bad.parquet").write_text("not parquet")
    with pytest.raises(UserError, match=rf"^data\.source: \S*{message}") as caught:
        read(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_missing_field_is_told_with_those_that_exist(tmp_path, suffix):
    path = write_rows(tmp_path / f"a{suffix}", ["x"], field="content")
    with pytest.raises(UserError, match=r"^data\.text_field: \S+ has no field 'text'; its fields are content, id$"):
        read(path)


def test_a_field_without_text_is_told_with_its_value(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    with pytest.raises(UserError, match=r"^data\.text_field: \S+: 'text' holds None where text is expected"):
        read(path)
    path.write_text('{"text": 17}\n')
    with pytest.raises(UserError, match=r"'text' holds 17 where text is expected"):
        read(path)


def test_names_of_datasets():
    assert local_files("openwebtext") is None
    assert local_files("someone/some-corpus_1.0") is None


class Hub:
    """A hub that holds one dataset, as a local file."""

    def __init__(self, monkeypatch, path):
        self.asked = []
        self.load = datasets.load_dataset
        self.path = path
        self.script_only = False
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda api, name, timeout: None)
        monkeypatch.setattr(datasets, "load_dataset", self.load_dataset)

    def load_dataset(self, name, *, split, streaming, revision=None):
        self.asked.append((name, revision))
        if self.script_only and revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return self.load("parquet", data_files=str(self.path), split=split, streaming=streaming)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return Hub(monkeypatch, write_rows(tmp_path / "hub.parquet", DOCUMENTS))


def test_a_dataset_on_the_hub(hub):
    assert read("someone/corpus") == DOCUMENTS
    assert read("openwebtext") == DOCUMENTS
    assert hub.asked == [("someone/corpus", None), ("Skylion007/openwebtext", None)]


def test_a_dataset_that_is_a_script_is_read_in_its_converted_form(hub):
    hub.script_only = True
    assert read("openwebtext") == DOCUMENTS
    assert hub.asked == [("Skylion007/openwebtext", None), ("Skylion007/openwebtext", "refs/convert/parquet")]


def test_a_wrong_field_on_the_hub(hub):
    with pytest.raises(UserError, match=r"someone/corpus has no field 'body'; its fields are id, text"):
        read("someone/corpus", text_field="body")


def test_a_hub_out_of_reach_is_told_in_one_line(monkeypatch):
    def unreachable(api, name, timeout):
        raise ConnectionError("[Errno -2] Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(
        UserError, match=r"^data\.source: openwebtext: no such file, and .* cannot be reached: Conn"
    ) as e:
        read("openwebtext")
    assert "\n" not in str(e.value)


def test_a_stream_that_breaks_off_can_be_gone_on_with(hub, monkeypatch):
    def breaking(rows, text_field, where):
        yield "first"
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(sources, "_texts", breaking)
    stream = documents(DataConfig(source="openwebtext"))
    assert next(stream) == "first"
    with pytest.raises(RunError, match="openwebtext: the stream broke off: ConnectionResetError: peer went away"):
        next(stream)
