"""The state of a cell, by its folder."""

from unittest.mock import Mock

import pytest

from brx.errors import UserError
from brx.sweep import state
from brx.sweep.spec import Sweep
from tests.sweep.helpers import end, write_sweep


@pytest.fixture
def done(tmp_path):
    """A cell that is done."""
    cell = Sweep.load(write_sweep(tmp_path)).cells[0]
    end(cell)
    return cell


def test_configuration_of_a_cell_is_parsed_once(done, monkeypatch):
    parsed = Mock(side_effect=state.load_config)
    monkeypatch.setattr(state, "load_config", parsed)
    assert [state.state_of(done), state.state_of(done)] == [state.State.DONE] * 2
    parsed.assert_called_once()


def test_changed_configuration_of_a_cell_is_seen(done):
    state.state_of(done)
    config = done.folder / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="differs from what the sweep asks for"):
        state.state_of(done)
