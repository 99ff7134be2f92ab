"""Checks all gradients before a step changes anything; on a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from .dtensor import is_sharded, local
from .parameter_state import arithmetic
from .shards import Sharding
from .step_member import StepMember

# Devices on which an ordinary step does not wait: a flag on the device stops it from changing
# anything.
ASYNCHRONOUS_DEVICES = ("cuda",)
# After this many steps the host reads these flags, unless a refresh has made it wait before.
LONGEST_WAIT = 100

BAD = "NaN, infinity, or entries too large to be squared"


class BadGradientError(ValueError):
    """A gradient cannot be used; no parameter was updated by it."""


class GradientGuard:
    """Finds gradients that are sparse, not finite, or have entries whose squares overflow.

    On the CPU, and in a step that waits for the device anyway, a bad gradient raises at once. In an
    ordinary step on a GPU the host does not wait. The step gets a flag that stops it from changing
    anything, and the host reads the flags later.

    Args:
        sharding: makes all ranks of sharded parameters agree.
        describe: a parameter's name and shape for messages.
    """

    def __init__(self, sharding: Sharding, describe: Callable[[Tensor], str]) -> None:
        self._sharding = sharding
        self._describe = describe
        # Ordinary steps since the host last read the flags, and (on the device) the bad ones.
        self._num_unread = 0
        self._num_bad: Tensor | None = None

    def check(
        self, members: Sequence[StepMember], waits_anyway: bool, *, must_not_wait: bool = False
    ) -> Tensor | None:
        """Check the gradients of a step.

        Returns a flag () on the device, which is set if the step must change nothing; None if the
        host has looked already, and the step may go ahead.

        Args:
            waits_anyway: whether the step waits for the device anyway.
            must_not_wait: never read the flags here; `check_unread` will raise for a bad gradient.

        Raises ValueError for a sparse gradient, and BadGradientError for a bad one, in this step or
        in earlier ones whose flags have not been read.
        """
        self._refuse_sparse(members)
        norms = _norms(members)
        flags = self._flags(norms)
        if must_not_wait or (not waits_anyway and self._can_put_off(flags)):
            (flag,) = flags.values()
            return self._put_off(flag)
        num_bad_before = self._read_flags()
        if any(flags.values()):
            self._raise_now(norms, num_bad_before)
        self._raise_if_any(num_bad_before)
        return None

    def check_unread(self) -> None:
        """Read the flags once there are `LONGEST_WAIT` of them; BadGradientError if one is set."""
        if self._num_unread >= LONGEST_WAIT:
            self._raise_if_any(self._read_flags())

    def count_unread(self) -> None:
        """Count a flag that a graph's replay has added to those on the device."""
        self._num_unread += 1

    def _raise_if_any(self, num_bad: int) -> None:
        if num_bad:
            raise BadGradientError(
                f"{num_bad} of the last updates met gradients with {BAD} and changed no parameter"
            )

    def _put_off(self, flag: Tensor) -> Tensor:
        """Add a flag to the count on its device, which the host reads later."""
        if self._num_bad is None or self._num_bad.device != flag.device:
            self._num_bad = torch.zeros((), dtype=torch.int64, device=flag.device)
        self._num_bad += flag
        self._num_unread += 1
        return flag

    def _read_flags(self) -> int:
        """The number of bad steps since the flags were last read; the host waits for the device."""
        if self._num_bad is None or self._num_unread == 0:
            return 0
        num_bad = int(self._num_bad)
        self._num_bad.zero_()
        self._num_unread = 0
        return num_bad

    def _refuse_sparse(self, members: Sequence[StepMember]) -> None:
        for member in members:
            if member.gradient is not None and member.gradient.layout is not torch.strided:
                who = self._describe(member.parameter)
                raise ValueError(f"{who}: its gradient is sparse; give a dense one (sparse=False)")

    def _flags(self, norms: dict[Tensor, Tensor]) -> dict[torch.device, Tensor]:
        """For each device a flag (): whether a gradient there is bad, on any rank."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter, norm in norms.items():
            by_device.setdefault(parameter.device, []).append(norm)
        flags = {}
        for device, norms_there in by_device.items():
            flags[device] = ~torch.stack(norms_there).isfinite().all()
        self._sharding.agree(filter(is_sharded, norms), flags)
        return flags

    def _can_put_off(self, flags: dict[torch.device, Tensor]) -> bool:
        """Whether the host may read the flags of this step later."""
        if len(flags) != 1 or self._num_unread >= LONGEST_WAIT:
            return False
        (device,) = flags
        return device.type in ASYNCHRONOUS_DEVICES

    def _raise_now(self, norms: dict[Tensor, Tensor], num_bad_before: int) -> None:
        who = "a parameter whose shard lies on another rank"
        for parameter, norm in norms.items():
            if not norm.isfinite():
                who = self._describe(parameter)
                break
        before = ""
        if num_bad_before:
            steps = "step" if num_bad_before == 1 else "steps"
            before = f", as in {num_bad_before} {steps} before"
        raise BadGradientError(f"{who}: its gradient has {BAD}; no parameter was updated{before}")


def _norms(members: Sequence[StepMember]) -> dict[Tensor, Tensor]:
    """The norm () of each parameter's gradient: infinite where an entry's square overflows."""
    norms: dict[Tensor, Tensor] = {}
    for (_, dtype), alike in groupby(members, _device_and_dtype):
        gradients = {}
        for member in alike:
            if member.gradient is not None:
                gradients[member.parameter] = local(member.gradient)
        group_norms = torch._foreach_norm(list(gradients.values()), dtype=dtype)
        norms.update(zip(gradients, group_norms, strict=True))
    return norms


def _device_and_dtype(member: StepMember) -> tuple[torch.device, torch.dtype]:
    return member.parameter.device, arithmetic(member.parameter)
