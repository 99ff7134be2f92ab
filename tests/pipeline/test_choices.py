"""The choices of a configuration are those that the code of the pipeline knows, and every text that
lists them has all."""

from typing import get_args

import pytest

from brx.config.schema import DelayName, PipelineConfig
from brx.errors import UserError
from brx.pipeline.delay import delays_of
from brx.pipeline.delayed_arguments import check_settings
from brx.pipeline.forecasts import FORECAST_RULES, Forecast
from tests.pipeline.loops import STASHES

DELAYS = get_args(DelayName)


def choices(setting):
    return get_args(PipelineConfig.model_fields[setting].annotation)


def test_stash_modes_of_a_configuration_are_the_pipelines():
    assert choices("stash") == STASHES


def test_forecasts_of_a_configuration_are_the_pipelines():
    literal, none = choices("forecast")
    assert none is type(None)
    assert get_args(literal) == get_args(Forecast) == tuple(FORECAST_RULES)


def test_places_of_rings_are_those_of_delayed():
    for place in choices("rings"):
        check_settings(1, "exact", None, place)
    with pytest.raises(UserError, match=f"rings must be one of {', '.join(choices('rings'))}, "):
        check_settings(1, "exact", None, "elsewhere")


@pytest.mark.parametrize("name", DELAYS)
def test_every_named_delay_is_known(name):
    assert len(delays_of(name, 4, 2)) == 4


@pytest.mark.parametrize("name", DELAYS)
def test_every_named_delay_is_where_the_choices_are_listed(name, printed):
    with pytest.raises(ValueError, match=rf"must be [\w, ]*\b{name}\b"):
        delays_of("another", 4)
    assert f"`{name}`" in delays_of.__doc__
    assert f"`{name}`" in PipelineConfig.model_fields["delay"].description
    assert name in printed("schedule", "--help")
