"""Documents: of packages, against a plain list of their files; of files and the hub; drawn by seed
and text alone."""

import importlib
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from brx.config.schema import DataConfig
from brx.data import prepare, sources
from brx.data.sources import (
    PUBLISHED_VERSIONS,
    documents,
    is_sampled,
    is_validation,
    local_files,
    notes_on_files,
)
from brx.errors import RunError, UserError
from tests.data.helpers import texts, write_rows

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
DOCUMENTS = texts(700)
as_published = pytest.mark.skipif(
    {name: metadata.version(name) for name in PUBLISHED_VERSIONS} != PUBLISHED_VERSIONS,
    reason="other versions than constraints.txt",
)


def read(source, **settings):
    return list(documents(DataConfig(source=str(source), **settings)))


def test_published_versions_are_the_pinned_ones():
    pinned = dict(line.split("==") for line in CONSTRAINTS.read_text().split())
    assert {name: pinned[name] for name in PUBLISHED_VERSIONS} == PUBLISHED_VERSIONS


@as_published
def test_published_corpus_has_the_published_fingerprint(tmp_path, capsys):
    data = prepare.prepare(DataConfig(directory=str(tmp_path)))
    assert data.fingerprint == sources.PUBLISHED_FINGERPRINT
    assert "published" not in capsys.readouterr().err  # no note about other versions
    assert data.train.num_tokens > 130_000 * 128


@pytest.fixture(scope="module")
def package_texts():
    return list(sources.package_sources())


def test_corpus_is_the_packages_files_without_tests(package_texts):
    expected = set()
    for name in PUBLISHED_VERSIONS:
        root = Path(importlib.import_module(name).__file__).parent
        for path in root.rglob("*.py"):
            inside = path.relative_to(root).as_posix()
            is_test = re.search(r"(^|/)(tests|test-examples|benchmarks)/", inside)
            if not is_test and inside not in sources.BUILD_FILES:
                expected.add(path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n"))
    assert set(package_texts) == expected


@pytest.mark.parametrize("name", PUBLISHED_VERSIONS)
def test_every_part_of_the_corpus_holds_all_packages(name, package_texts):
    """Validation examples are spread evenly over the held-out documents, and `data.tokens` takes
    the first ones."""
    tenth = len(package_texts) // 10
    for start in range(0, 9 * tenth, tenth):
        part = "".join(package_texts[start : start + tenth])
        assert re.search(rf"^(from|import) {name}\b", part, re.M)


@pytest.fixture
def versions_are(monkeypatch):
    """Makes brx believe that these versions of the packages are installed."""

    def versions_are(versions):
        for module in (prepare, sources):
            monkeypatch.setattr(module, "installed_versions", lambda: versions)

    return versions_are


OTHER_VERSIONS = PUBLISHED_VERSIONS | {"scipy": "1.18.0"}


def small_corpus(tmp_path):
    """The packages, up to a few tokens."""
    return DataConfig(directory=str(tmp_path), tokens=20_000, validation_fraction=0.5)


def test_published_packages_need_no_note(versions_are, tmp_path, capsys):
    versions_are(PUBLISHED_VERSIONS)
    prepare.prepare(small_corpus(tmp_path))
    assert "published" not in capsys.readouterr().err


def test_other_packages_have_another_folder(versions_are, tmp_path):
    config = small_corpus(tmp_path)
    versions_are(PUBLISHED_VERSIONS)
    published = prepare.token_folder(config)
    versions_are(OTHER_VERSIONS)
    assert prepare.token_folder(config) != published


def test_other_packages_are_named(versions_are, tmp_path, capsys):
    versions_are(OTHER_VERSIONS)
    prepare.prepare(small_corpus(tmp_path))
    line = (
        "data.source: packages: scipy 1.18.0 instead of 1.17.1: not the corpus of the published "
        "results"
    )
    assert capsys.readouterr().err.count(line) == 1


def test_quiet_preparation_names_no_packages(versions_are, tmp_path, capsys):
    versions_are(OTHER_VERSIONS)
    prepare.prepare(small_corpus(tmp_path), quiet=True)
    assert capsys.readouterr().err == ""


def test_changed_files_of_packages_are_noticed(versions_are, tmp_path, capsys, monkeypatch):
    versions_are(PUBLISHED_VERSIONS)
    monkeypatch.setattr(sources, "package_sources", lambda: (f"document {n}" for n in range(100)))
    prepare.prepare(DataConfig(directory=str(tmp_path)))
    message = "data.source: packages: files of the installed packages were changed"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "ask", [sources.installed_versions, lambda: list(sources.package_sources())]
)
def test_missing_package_is_named(ask, monkeypatch):
    monkeypatch.setitem(PUBLISHED_VERSIONS, "no_such_package", "1.0")
    message = r"^data\.source: packages: no_such_package is not installed"
    with pytest.raises(UserError, match=message):
        ask()


EVERYTHING = texts(5000)


def held_out(documents, fraction=0.1, seed=0):
    return [text for text in documents if is_validation(text, fraction, seed)]


def sampled(documents, seed=0):
    return [text for text in documents if is_sampled(text, 0.2, seed)]


def test_fraction_of_documents_is_held_out():
    assert 420 < len(held_out(EVERYTHING)) < 580  # 500, give or take 3.7 standard deviations


def test_seeds_hold_out_independent_documents():
    assert len(held_out(held_out(EVERYTHING), seed=1)) < 100  # 50 by chance


def test_larger_fraction_keeps_the_held_out_documents():
    smaller = held_out(EVERYTHING, 0.1)
    assert held_out(smaller, 0.2) == smaller


def test_split_is_the_same_on_every_machine():
    assert held_out("abcdef", 0.5) == ["b", "d"]


def test_fraction_of_documents_is_sampled():
    assert 890 < len(sampled(EVERYTHING)) < 1110  # 1,000, give or take 3.9 standard deviations


def test_sample_is_independent_of_the_split():
    # 100, give or take 4.2 standard deviations
    assert 60 < len(held_out(sampled(EVERYTHING))) < 140


def test_seeds_draw_independent_samples():
    assert 140 < len(sampled(sampled(EVERYTHING), seed=1)) < 260  # 200 by chance


def test_sampled_documents_keep_their_order(tmp_path):
    path = write_rows(tmp_path / "corpus.jsonl", DOCUMENTS)
    drawn = [text for text in DOCUMENTS if is_sampled(text, 0.3, 5)]
    config = DataConfig(source=str(path), sample_fraction=0.3, sample_seed=5)
    assert list(documents(config)) == drawn
    assert list(documents(config, skip=20)) == drawn[20:]  # as after an interruption
    assert list(documents(config, skip=1000)) == []


@pytest.fixture(params=[".jsonl", ".parquet"])
def table(tmp_path, request):
    """A file of rows, whose texts are in the field `content`; some are empty."""
    path = tmp_path / f"a{request.param}"
    return write_rows(path, ["", *DOCUMENTS, "", "last"], field="content")


def test_rows_with_a_text_are_documents(table):
    assert read(table, text_field="content") == [*DOCUMENTS, "last"]


def test_missing_field_is_told_with_the_others(table):
    message = r"^data\.text_field: \S+ has no field 'text'; its fields are content, id$"
    with pytest.raises(UserError, match=message):
        read(table)


@pytest.mark.parametrize("line", ["word " * 20 + "\n", "中" * 777 + "\n", "no line ends at all "])
def test_long_text_file_is_cut_at_line_ends(tmp_path, line):
    text = line * 3000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = read(tmp_path / "a.txt")
    assert "".join(pieces) == text
    assert len(pieces) > 1
    if line.endswith("\n"):
        assert all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("line", ["word " * 20 + "\n", "no line ends at all "])
def test_pieces_of_a_text_file_are_bounded(tmp_path, line):
    (tmp_path / "a.txt").write_text(line * 3000)
    assert max(map(len, read(tmp_path / "a.txt"))) <= 2 * sources.TEXT_PIECE


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("text\ufeff", encoding="utf-8-sig")
    assert read(tmp_path / "a.txt") == ["text\ufeff"]  # elsewhere it is a character


LINES = "one\r\ntwo\nthree é"


@pytest.fixture
def mixed(tmp_path):
    """A folder with files of all kinds, in which some names hold brackets."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "deep.txt").write_text("deep")
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / "odd [1].txt").write_text("odd")
    (tmp_path / "notes.md").write_text("not this")
    for name, content in (("0.jsonl", ""), ("1.jsonl", "\n\n"), ("2.txt", "")):  # without documents
        (tmp_path / name).write_text(content)
    (tmp_path / "y.txt").write_bytes(LINES.encode())
    write_rows(tmp_path / "a1.parquet", ["row"])
    rows = '{"text": "2021-01-01", "id": 0}\n\n{"id": {"of": []}, "text": "b\\n"}'
    (tmp_path / "a[1].jsonl").write_text(rows)  # whose other field may vary
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["row", "2021-01-01", "b\n", "deep", "odd", LINES, "z"]),
        ("*.txt", ["odd", LINES, "z"]),
        ("**/*.txt", ["deep", "odd", LINES, "z"]),
        ("odd [1].txt", ["odd"]),
    ],
)
def test_files_are_read_in_sorted_order(pattern, expected, mixed):
    assert read(mixed / pattern) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no such file"),
        ("*.txt", None, "the pattern matches no file"),
        ("table.csv", b"a,b\n", r"unknown kind of file; known are \.txt, \.jsonl, \.parquet"),
        ("*.csv", b"a,b\n", r"unknown kind of file"),
        (
            "",
            b"a,b\n",
            r"the folder holds no \.txt, \.jsonl, \.parquet file, but table\.csv \(docs/how-to\.md",
        ),
        ("bin.txt", b"abc\xff\xfe", "cannot be read: not UTF-8 text; convert it first"),
        ("nul.txt", b"abc\0def", "holds NUL characters: not a text file"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r':2: must be a JSON object, is {"text":$'),
        ("array.jsonl", b'["a"]', r':1: must be a JSON object, is \["a"\]$'),
        ("bad.parquet", b"not parquet", "cannot be read: "),
        (
            "null.jsonl",
            b'{"text": "a"}\n{"text": null}\n',
            "'text' holds None where text is expected",
        ),
    ],
)
def test_bad_file_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / ("table.csv" if name in ("", "*.csv") else name)).write_bytes(content)
    with pytest.raises(
        UserError, match=rf"^data\.\w+: \S*{Path(name).suffix}.*{message}"
    ) as caught:
        read(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one dataset, as a local file: the requests that it received, and whether only a
    converted copy exists."""
    state, load = SimpleNamespace(asked=[], script_only=False), datasets.load_dataset
    path = write_rows(tmp_path / "hub.parquet", DOCUMENTS)

    def load_dataset(name, *, split, streaming, revision=None):
        state.asked.append((name, revision))
        if state.script_only and revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
        return load("parquet", data_files=str(path), split=split, streaming=streaming)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda api, name, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return state


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("someone/some-corpus_1.0", "someone/some-corpus_1.0"),
        ("openwebtext", "Skylion007/openwebtext"),
    ],
)
def test_dataset_on_the_hub_is_read(name, asked, hub):
    assert read(name) == DOCUMENTS
    assert hub.asked == [(asked, None)]


def test_name_on_the_hub_is_no_file():
    assert sources.local_files("openwebtext") is None


def test_missing_field_on_the_hub_is_told(hub):
    message = r"someone/corpus has no field 'body'; its fields are id, text"
    with pytest.raises(UserError, match=message):
        read("someone/corpus", text_field="body")


def test_dataset_of_a_script_is_read_converted(hub):
    hub.script_only = True
    assert read("openwebtext") == DOCUMENTS
    assert hub.asked[-1] == ("Skylion007/openwebtext", "refs/convert/parquet")


def test_stream_that_breaks_off_is_told(hub, monkeypatch):
    def breaking(rows, text_field):
        yield "first"
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(sources, "_texts", breaking)
    stream = documents(DataConfig(source="openwebtext"))
    assert next(stream) == "first"
    message = (
        "openwebtext: the stream broke off: ConnectionResetError: peer went away; prepare again to "
        "go on from here"
    )
    with pytest.raises(RunError, match=message):
        next(stream)


def test_hub_out_of_reach_is_one_line(hub, monkeypatch):
    def unreachable(api, name, timeout):
        raise ConnectionError("[Errno -2] Name or service\nnot known.")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    message = (
        r"^data\.source: openwebtext: no such file, and .* cannot be reached: ConnectionError: "
        r".* service not known; check the name and the network, or name a file or folder$"
    )
    with pytest.raises(UserError, match=message):
        read("openwebtext")


@pytest.fixture
def corpus(tmp_path):
    """A folder with a file, a hidden copy of it, a linked folder, and a link back to itself."""
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for place in (folder / ".ipynb_checkpoints", elsewhere):
        place.mkdir(parents=True)
    for place in (folder / "a.txt", folder / ".ipynb_checkpoints" / "a.txt", elsewhere / "b.txt"):
        place.write_text(f"text of {place.name}")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder)
    return folder


def test_folder_finds_what_a_glob_finds(corpus):
    expected = [corpus / "a.txt", corpus / "linked" / "b.txt"]
    assert local_files(str(corpus)) == expected
    found = local_files(f"{corpus}/**/*.txt")
    assert [file.resolve() for file in found] == [file.resolve() for file in expected]


@pytest.mark.parametrize("pattern", ["", "/**/*.txt"])
def test_hidden_files_are_said_to_be_left_out(corpus, pattern):
    first, *_ = notes_on_files(f"{corpus}{pattern}")
    assert first.startswith("1 hidden file left out, such as ")
    assert ".ipynb_checkpoints" in first


def test_links_are_said_to_be_followed(corpus):
    *_, last = notes_on_files(str(corpus))
    assert last == f"1 file reached through links, such as {corpus}/linked/b.txt"


def test_files_of_other_kinds_are_said_to_be_left_out(corpus):
    for name in ("more.jsonl.gz", "linked/c.csv", ".hidden.csv"):
        (corpus / name).write_bytes(b"rows")
    note = f"2 files of other kinds left out, such as {corpus}/linked/c.csv"
    assert note in notes_on_files(str(corpus))


def test_plain_folder_needs_no_note(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert notes_on_files(str(tmp_path)) == []


def test_other_columns_of_parquet_are_not_read(tmp_path):
    table = pyarrow.table({"text": ["a", "b"], "other": [b"x" * 4000, b"y" * 4000]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    place = parquet.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    assert list(documents(DataConfig(source=str(path)))) == ["a", "b"]
