"""Marks the tests of the optimizer's arithmetic, which also run with other kernels (`make
test-numerics`)."""

from pathlib import Path

import pytest

WITHOUT_ARITHMETIC = ("test_sharded.py", "test_trainers.py", "test_generic.py")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in WITHOUT_ARITHMETIC:
            item.add_marker(pytest.mark.numerics)
