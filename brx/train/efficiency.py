"""How well a run uses its devices: model FLOPs utilization, and the time that refreshes of a basis take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from brx.config import schema
from brx.config.schema import RunConfig
from brx.model.sizes import training_flops
from brx.planning.device_peaks import peak_flops


class Utilization:
    """MFU: the model's multiplications per second as a share of the devices' peak (PaLM, arXiv:2204.02311, appendix B).

    Recomputation and the method's own products do not count; of a mixture, the chosen experts do.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        tokens = config.training.batch_size * config.model.sequence_length
        flops = training_flops(config.model, config.data.vocabulary_size, config.training.batch_size)
        self.flops_per_token = flops / tokens
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        peak = peak_flops(name, config.runtime.precision)
        self._peak = None if peak is None else peak * config.pipeline.devices

    def mfu(self, tokens_per_second: float) -> float | None:
        """The utilization at this rate; None where the devices' peak is not known."""
        return None if self._peak is None else tokens_per_second * self.flops_per_token / self._peak


class RefreshTime:
    """What a refresh of the basis adds to an update: mean time of updates with one, less mean time of those without.

    Of the updates after the first basis, which takes eigenvectors (`first_refresh`). Known only where all stages
    refresh in the same iterations.
    """

    def __init__(self, config: RunConfig) -> None:
        optimizer = config.optimizer
        self._frequency: int | None = None
        if isinstance(optimizer, schema.BasisRotationConfig) and not optimizer.staggered:
            self._frequency = optimizer.frequency if optimizer.refresh_schedule == "uniform" else None
            self._first = optimizer.first_refresh
        self._totals = {True: 0.0, False: 0.0}
        self._counts = {True: 0, False: 0}

    def see(self, iteration: int, update_seconds: float) -> None:
        """Take in an update's time."""
        if self._frequency is not None and iteration > self._first:
            has_refresh = iteration % self._frequency == 0
            self._totals[has_refresh] += update_seconds
            self._counts[has_refresh] += 1

    @property
    def seconds(self) -> float | None:
        """The difference; None as long as one of the two kinds has not been seen."""
        if not all(self._counts.values()):
            return None
        with_refresh, without = (self._totals[kind] / self._counts[kind] for kind in (True, False))
        return with_refresh - without


@dataclass(frozen=True)
class Efficiency:
    """Both of them, for one run."""

    utilization: Utilization
    refresh: RefreshTime

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> Self:
        return cls(Utilization(config, device), RefreshTime(config))
