"""Every benchmark can be imported: none of them runs in the other tests."""

import importlib
import pkgutil

import pytest

import benchmarks

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
)


@pytest.mark.parametrize("name", MODULES)
def test_benchmark_can_be_imported(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("brx", "benchmarks", "tests"):
            raise
        pytest.skip(f"{error.name} is not installed")
