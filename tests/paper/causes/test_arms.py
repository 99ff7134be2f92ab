"""How runs of the study are told apart."""

import pytest

from brx.config.loading import preset_with
from brx.paper.causes.arms import ARMS, arm_of, delay_of
from tests.paper.causes.runs import DELAYS


def test_arms_of_all_sweeps_are_known():
    configs = [preset_with("similar", settings) for settings in ARMS.values()]
    assert [arm_of(config) for config in configs] == list(ARMS)


@pytest.mark.parametrize("delay", DELAYS)
def test_delays_are_told_apart(delay):
    assert delay_of(preset_with("similar", DELAYS[delay]).pipeline) == delay
