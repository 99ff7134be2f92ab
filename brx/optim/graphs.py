"""Steps of `BasisRotation` as CUDA graphs: the device's work is recorded once and replayed, so that
the host launches one graph instead of hundreds of kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from .basis_rotation import BasisRotation
from .step_plan import Plan

# If this many steps had different signatures, gradients are assumed to move from step to step.
MAX_SIGNATURES = 64


class MovingGradientsError(RuntimeError):
    """No step is like another, since gradients do not stay at their addresses."""


class Graph(Protocol):
    """Recorded work of a device."""

    def replay(self) -> object: ...


GraphMaker = Callable[[Callable[[], None]], Graph]
"""Records what a function does on the device, without doing it there."""


class CudaGraphMaker:
    """Records CUDA graphs of a device's work, which all use the same memory in turn.

    Results that another graph needs must therefore be written to tensors that exist before.

    Args:
        device: where the work runs. It need not be the current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, work: Callable[[], None]) -> Graph:
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            # A graph holds what runs on its stream. torch's default for that is a stream of the
            # device that was current first, and work on another device would not be recorded.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls can spoil the recording: another one may fetch data meanwhile.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(
                graph,
                pool=self._pool,  # type: ignore[arg-type]
                stream=self._stream,
                capture_error_mode="thread_local",
            ),
        ):
            work()
        return graph


class GraphedSteps:
    """Takes an optimizer's steps, replaying those that it has recorded.

    The device does the same in all steps with one signature (`Plan.signature`): it renews the same
    bases, with the same options, from gradients at the same addresses. Numbers that change from
    step to step (rates, limits, counts) are read from the device's memory. The first step with a
    signature runs normally, the second is recorded, and all later ones are replayed. Steps with a
    first basis always run normally, because its decomposition waits for the device.

    A bad gradient changes nothing. No step waits for the device, not even a refresh, so the error
    comes up to `gradient_guard.LONGEST_WAIT` steps later.

    Args:
        optimizer: its parameters are whole on one CUDA device, and their gradients stay at the same
            addresses: zero them in place, `zero_grad(set_to_none=False)`.
        make_graph: makes the graphs; by default CUDA graphs with memory of their own.
        device_type: the type of the parameters' device.

    Raises ValueError for parameters that lie elsewhere, for none, or for `as_published`.
    """

    def __init__(
        self,
        optimizer: BasisRotation,
        make_graph: GraphMaker | None = None,
        device_type: str = "cuda",
    ) -> None:
        self._optimizer = optimizer
        self._recorded: dict[object, Graph] = {}
        # Plans are kept, because a signature names their objects by identity, which must not be
        # reused.
        self._plans: dict[object, Plan] = {}
        devices: set[torch.device] = set()
        for group in optimizer.param_groups:
            if group["as_published"]:
                raise ValueError(
                    "as_published computes with numbers on the host: no graph holds it"
                )
            devices |= {parameter.device for parameter in group["params"]}
        if len(devices) > 1 or any(device.type != device_type for device in devices):
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"graphs hold steps on one CUDA device; parameters are on {found}")
        if make_graph is None and not devices:
            raise ValueError("the optimizer has no parameters, so there is no step to record")
        self._make_graph = make_graph or CudaGraphMaker(*devices)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> None:
        """Take a step, as `BasisRotation.step` without a closure.

        Raises BadGradientError for gradients of earlier steps, MovingGradientsError where gradients
        do not stay at their addresses.
        """
        with self._optimizer.planned_step() as plan:
            if plan.num_first_bases:
                self._optimizer.run(plan)
                return
            self._optimizer.check_flags()
            signature = plan.signature
            if signature not in self._plans:
                self._keep(signature, plan)
                self._run(plan)
                return
            if signature not in self._recorded:
                work = partial(self._run, plan)
                self._recorded[signature] = self._make_graph(work)
            self._recorded[signature].replay()
            self._optimizer.count_unread_flag()

    def _run(self, plan: Plan) -> None:
        self._optimizer.run(plan, without_waiting=True)

    def _keep(self, signature: object, plan: Plan) -> None:
        """Keep the plan of a signature that occurs for the first time."""
        if len(self._plans) >= MAX_SIGNATURES and not self._recorded:
            raise MovingGradientsError(
                f"{MAX_SIGNATURES} steps, and no two alike: gradients have to stay at their "
                f"addresses (zero_grad(set_to_none=False)) for graphs to hold a step"
            )
        self._plans[signature] = plan
