"""The set-ups that the tests of the landscapes share."""

from brx.config.loading import PRESETS, load_yaml_as
from brx.toy.angles import SweepConfig
from brx.toy.quadratic import QuadraticConfig
from brx.toy.spiral import SpiralConfig


def preset(name, kind, **changes):
    return load_yaml_as(PRESETS / "toy" / f"{name}.yaml", kind).model_copy(update=changes)


QUADRATIC = preset("quadratic", QuadraticConfig, other_starts=12)
SWEEP = preset("sweep", SweepConfig)
SHORT_SPIRAL = preset(
    "spiral-small-steps", SpiralConfig, start_radius=1.5, end_radius=1.15, measurements=150
)
"""A quarter turn around one aligned angle."""
