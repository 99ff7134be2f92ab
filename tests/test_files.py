"""Files are replaced whole or not at all."""

import pytest

from brx.errors import RunError
from brx.files import replacing, write_text


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (ZeroDivisionError("why"), ZeroDivisionError, "why"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672]"),
            RunError,
            "cannot be written: no space",
        ),
        (
            OSError(28, "full"),
            RunError,
            "file: cannot be written: full; what was there before is unchanged",
        ),
    ],
)
def test_what_fails_on_the_way_leaves_the_old_content_and_nothing_else(
    tmp_path, error, told, message
):
    def write():
        with replacing(path) as file:
            file.write(b"new")
            raise error

    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(told, match=message):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
