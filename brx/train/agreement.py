"""The check, before the first iteration, that all ranks are about to train the same run."""

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import brx
from brx.config.schema import CustomConfig, RunConfig
from brx.errors import NeighbourLostError, UserError
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.pipeline.world import World
from brx.runs.trajectory import trajectory_of
from brx.train.trackers import MODULES

Facts = Mapping[str, Any]
"""What all ranks must have in common: JSON values by key, such as `optimizer.lr`."""

# Settings that may differ between machines, or that only rank 0 uses.
_MAY_DIFFER = {
    "data.directory",
    "runtime.threads",
    *(f"logging.{setting}" for setting in MODULES),
}


def agree(world: World, facts: Facts) -> None:
    """Compare every rank's facts with rank 0's.

    Raises:
        UserError: some differ. Every rank raises the same line, with the first difference.
    """
    if world.num_ranks == 1:
        return
    everybody = world.gather(facts)  # empty but on rank 0
    difference = world.broadcast(first_disagreement(everybody))
    if difference:
        # No rank may close its connection before all have received the message.
        with contextlib.suppress(NeighbourLostError):
            world.barrier()
        raise UserError(difference)


def first_disagreement(everybody: Sequence[Facts]) -> str:
    """The first fact in which a rank differs from rank 0, in words; empty if there is none."""
    expected = everybody[0] if everybody else {}
    for rank, facts in enumerate(everybody):
        for key in {**expected, **facts}:
            ours, theirs = expected.get(key), facts.get(key)
            if ours != theirs:
                return (
                    f"the ranks disagree: {key} is {ours!r} on rank 0 and {theirs!r} on rank "
                    f"{rank}; start all ranks with the same settings and code"
                )
    return ""


def facts_of(config: RunConfig) -> Facts:
    """The settings and the code with which this rank is about to train."""
    trajectory = trajectory_of(config)
    facts: dict[str, Any] = {}
    for section, values in config.model_dump(mode="json").items():
        # The name of a user's own method is written without its folder in the trajectory.
        for key, value in {**values, **trajectory[section]}.items():
            facts[f"{section}.{key}"] = value
    facts = {key: value for key, value in facts.items() if key not in _MAY_DIFFER}
    facts["version of brx"] = brx.__version__
    facts["trajectory version"] = TRAJECTORY_VERSION
    facts["version of torch"] = torch.__version__
    facts["version of pytorch-optimizer"] = _version("pytorch-optimizer")
    if isinstance(config.optimizer, CustomConfig) and ".py:" not in config.optimizer.method:
        # The settings have the fingerprint of a file; an installed package has a version.
        package = config.optimizer.method.partition(".")[0]
        facts[f"version of {package}"] = _version(package)
    return facts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
