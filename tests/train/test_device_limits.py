"""What the machine lacks is said in one line."""

import resource
from pathlib import Path

import pytest
import torch

from brx.config.loading import preset_with
from brx.config.schema import RuntimeConfig
from brx.errors import RunError, UserError
from brx.planning.free_memory import free_memory
from brx.train.build import assemble
from brx.train.device import check_compiler, out_of_memory_in_one_line

CPU = torch.device("cpu")


def test_missing_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(UserError, match="there is no /nonexistent; install it, set CXX"):
        check_compiler(RuntimeConfig(compile=True), CPU)


def test_every_engine_needs_its_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    config = preset_with("laptop", {"runtime.compile": "whole"})
    with pytest.raises(UserError, match="there is no /nonexistent"):
        assemble(config, lambda n: None)


def test_without_compilation_no_compiler_is_needed(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    check_compiler(RuntimeConfig(compile=False), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline.stages": 4, "pipeline.devices": 2},
            r"runtime\.compile: whole needs pipeline\.devices 1 \(got 2\)",
        ),
        ({"model.moe": {"experts": 2}}, r"runtime\.compile: whole takes no mixture of experts"),
    ],
)
def test_whole_graph_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        preset_with("laptop", {**settings, "runtime.compile": "whole"})


def test_limit_on_address_space_counts(monkeypatch):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 10**9
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    where = "under the limit of a process (ulimit -v)"
    (left,) = (free for free in free_memory(CPU) if free.where == where)
    assert left.num_bytes == pytest.approx(1e9, rel=0.2)
    assert not left.is_shared


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nframe 1"),
    ],
)
def test_refused_memory_is_one_line(error):
    with (
        pytest.raises(RunError, match=r"^out of memory: .*; brx plan shows") as told,
        out_of_memory_in_one_line(),
    ):
        raise error
    assert "\n" not in str(told.value)


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shape"), out_of_memory_in_one_line():
        raise RuntimeError("shape")
