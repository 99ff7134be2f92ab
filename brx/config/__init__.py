"""Configuration: what a run is (`schema`) and how it is read (`loading`)."""

from brx.config.loading import dump_config, load_config, load_yaml_as
from brx.config.schema import RunConfig

__all__ = ["RunConfig", "dump_config", "load_config", "load_yaml_as"]
