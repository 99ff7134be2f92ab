"""The text of `brx plan`: what it refuses of a model of the user's own."""

import pytest

from brx.config.loading import load_config
from brx.config.user_code import allowed
from brx.errors import UserError
from brx.planning.planned_run import PlannedRun
from brx.planning.report import memory_report, plan_report

MODEL = """
from torch import nn

class Half(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width // 2)

    def forward(self, x):
        return self.linear(x)

class Mine(nn.Module):
    def __init__(self, vocabulary_size, sequence_length, blocks, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary_size, width)
        self.blocks = nn.ModuleList(Half(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary_size)
"""


@pytest.fixture
def narrowing(tmp_path):
    """A run whose blocks return half of the stream."""
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    with allowed():
        yield load_config("quick", [f"model.class={path}:Mine"])


@pytest.mark.parametrize(
    "report", [lambda config: plan_report(PlannedRun(config, None, None, None)), memory_report]
)
def test_a_stream_that_changes_its_shape_is_refused(narrowing, report):
    with pytest.raises(UserError, match=r"blocks\.0 returns a stream of shape"):
        report(narrowing)
