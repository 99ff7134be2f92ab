"""The free memory of a machine is the least of what the host and the limits leave."""

import pytest
import torch

from brx.planning import free_memory as module
from brx.planning.free_memory import Free, free_memory

CPU = torch.device("cpu")

OLD = {
    "memory.limit_in_bytes": "900",
    "memory.usage_in_bytes": "100",
    "memory.stat": "inactive_file 1\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 5\ninactive_file 50\n",
            },
            350,
        ),
        ({"memory.max": "1000", "memory.current": "1200"}, 0),
        ({"memory.max": "max", "memory.current": "700"}, None),
        ({f"memory/{name}": text for name, text in OLD.items()}, 801),
        (
            {
                "memory/" + name: text + "total_inactive_file 20\n" * ("stat" in name)
                for name, text in OLD.items()
            },
            820,
        ),
        ({}, None),
    ],
)
def test_free_memory_of_a_container(files, expected, tmp_path, monkeypatch):
    assert all(free.num_bytes > 2**20 for free in free_memory(CPU))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(module, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(module, "_available_on_host", lambda: None)
    group = "under the control group's limit"
    left = [free for free in free_memory(CPU) if free.where == group]
    assert left == ([] if expected is None else [Free(expected, group, is_shared=True)])
