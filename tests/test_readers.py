"""Damaged or malicious files lead to one line of error and take little memory."""

import io
import os
import random
import tracemalloc
import zipfile

import numpy as np
import pytest

from benchmarks.flipped_files import FORMATS, damaged, outcome
from brx.readers import Damaged, lines_of, parse_json, read_arrays, read_json, read_tensors


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name.split()[0])
def test_damage_ends_in_one_line(one, tmp_path):
    path = tmp_path / "file"
    for number in range(150):
        path.write_bytes(damaged(one.content, random.Random(number)))
        assert outcome(one.read, path) in ("read", "refused"), number


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name.split()[0])
def test_file_in_order_is_read(one, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(one.content)
    assert one.read(path) is not None


def test_byte_order_mark_is_left_out(tmp_path):
    path = tmp_path / "summary.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e400", "larger than any number"),
        ("9" * 400, "a number of 400 digits"),
        ("[" * 100_000, "recursion"),
        ("{", "Expecting property name"),
    ],
)
def test_impossible_json_is_refused(text, message):
    with pytest.raises(Damaged, match=message):
        parse_json(text)


def test_numbers_that_brx_writes_are_read():
    assert parse_json("[1, 2.5, Infinity]") == [1, 2.5, float("inf")]


def test_arrays_equal_those_of_numpy(tmp_path):
    arrays = {
        "matrix": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype="<i2").reshape(3, 2)),
        "empty": np.empty(0, np.float32),
        "scalar": np.array(3, np.uint8),
    }
    np.savez_compressed(tmp_path / "file.npz", **arrays)
    found = read_arrays(tmp_path / "file.npz")
    assert found.keys() == arrays.keys()
    for name, values in arrays.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


def test_array_of_objects_is_refused(tmp_path):
    np.savez(tmp_path / "file.npz", a=np.array([{}], dtype=object))
    with pytest.raises(Damaged, match="holds Python objects"):
        read_arrays(tmp_path / "file.npz")


def peak_of_refusal(path, read):
    tracemalloc.start()
    try:
        with pytest.raises(Damaged) as refused:
            read(path)
        return tracemalloc.get_traced_memory()[1], str(refused.value)
    finally:
        tracemalloc.stop()


def test_zip_bomb_takes_no_memory(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "file.npz", "w", zipfile.ZIP_DEFLATED) as file,
        file.open("steps.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(300):
            member.write(bytes(2**20))
    peak, message = peak_of_refusal(tmp_path / "file.npz", read_arrays)
    assert message == "holds 314,572,800 bytes, more than 268,435,456"
    assert peak < 2**24


def test_shape_without_content_takes_no_memory(tmp_path):
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(tmp_path / "file.npz", "w") as file:
        file.writestr("steps.npy", header.getvalue() + bytes(80))
    peak, message = peak_of_refusal(tmp_path / "file.npz", read_arrays)
    assert "cannot reshape" in message
    assert peak < 2**24


def test_endless_json_takes_no_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b" " * 5000)
    peak, message = peak_of_refusal(path, lambda path: read_json(path, most_bytes=1000))
    assert message == "longer than 1,000 bytes"
    assert peak < 2**20


@pytest.mark.parametrize("read", [read_json, read_arrays, read_tensors])
def test_pipe_is_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(Damaged, match="not an ordinary file"):
        read(tmp_path / "file")


@pytest.mark.parametrize("read", [read_json, read_arrays, read_tensors])
def test_impossible_name_ends_in_one_line(read, tmp_path):
    with pytest.raises(Damaged, match="File name too long"):
        read(tmp_path / ("x" * 256))


def test_endless_line_is_refused():
    with pytest.raises(Damaged, match="a line has more than 10 characters"):
        list(lines_of(io.StringIO("short\n" + "x" * 11), most=10))


def test_lines_keep_their_ends():
    assert list(lines_of(io.StringIO("one\n\nthree"), most=10)) == ["one\n", "\n", "three"]
