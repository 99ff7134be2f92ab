"""Both passes of a micro-batch as a CUDA graph. It is recorded once and then replayed, so that the
host launches one graph instead of thousands of kernels.

A graph holds kernels and addresses, but nothing that the host does. So everything that differs
between micro-batches happens outside of it: the micro-batch is copied into tensors that stay where
they are, each stage's version of the weights is copied into the weights in use
(`StageVersions.bind`), and the results are copied out.

Shape legend: B examples, S positions.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from brx.errors import RunError
from brx.optim.graphs import CudaGraphMaker, Graph, GraphMaker
from brx.pipeline.versions import StageVersions

# How many passes of a kind run without a graph before one is recorded. They fill caches, choose
# kernels and compile blocks, which no recording may contain.
NUM_WARM_UPS = 3


@dataclass(frozen=True)
class PassResults:
    """What both passes of a micro-batch give besides gradients."""

    loss: Tensor  # (), mean cross-entropy in nats
    auxiliary_losses: Tensor | None  # per stage with a mixture of experts; None if there is none
    grad_norms: Tensor | None  # (stages,), with the last micro-batch of an update; else None

    def copied(self) -> "PassResults":
        """Copies, which the next replay does not overwrite."""
        return PassResults(
            self.loss.clone(),
            None if self.auxiliary_losses is None else self.auxiliary_losses.clone(),
            None if self.grad_norms is None else self.grad_norms.clone(),
        )


Passes = Callable[[int, Tensor, Tensor], PassResults]
"""Both passes of a micro-batch: its number (from 1), token ids and next tokens, each (B, S)."""


@dataclass(frozen=True)
class _Kind:
    """What decides the work of a micro-batch. Micro-batches of one kind share a graph."""

    inputs: torch.Size
    targets: torch.Size
    # Its place in its update: the gradients of the first micro-batch begin the sum, those of the
    # last one end it.
    is_first: bool
    ends_update: bool


@dataclass
class _Recorded:
    """Passes of one kind, and the tensors through which they are reached from outside."""

    inputs: Tensor  # (B, S)
    targets: Tensor  # (B, S)
    graph: Graph
    results: PassResults
    # The newest weights, and the gradients that they have after the passes.
    gradients: list[tuple[nn.Parameter, Tensor | None]]
    border: "_Border"


@dataclass
class _Border:
    """Tensors that a graph reads or writes at the addresses that they had when it was recorded."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name
    addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = [tensor.data_ptr() for tensor in self.tensors.values()]

    def moved(self) -> str | None:
        """The first tensor that lies elsewhere now; None if all are where they were."""
        columns = zip(self.tensors.items(), self.addresses, strict=True)
        for (name, tensor), address in columns:
            if tensor.data_ptr() != address:
                return name
        return None


class GraphedPasses:
    """Runs both passes of micro-batches, by a recorded graph where there is one.

    The first `NUM_WARM_UPS` micro-batches of a kind run without a graph. The next one is recorded,
    and from then on its graph is replayed. A micro-batch of another shape is of another kind.

    Args:
        stages: all stages; the pipeline has one device.
        passes: runs both passes of a micro-batch and collects its gradients. With the last
            micro-batch of an update, it also clips them.
        make_graph: makes a graph of a function; by default a CUDA graph.

    `run` raises RunError for passes that no graph can hold: they draw random numbers on the host,
    make new buffers, or make the host wait for the device. It also does so if a tensor has moved
    since they were recorded.
    """

    def __init__(
        self, stages: Sequence[StageVersions], passes: Passes, make_graph: GraphMaker | None = None
    ) -> None:
        self._stages = list(stages)
        self._passes = passes
        self._make_graph = make_graph or CudaGraphMaker(stages[0].device)
        self._accumulation = stages[0].delay.accumulation
        self._num_met: Counter[_Kind] = Counter()
        self._recorded: dict[_Kind, _Recorded] = {}

    def run(
        self,
        micro_batch: int,
        inputs: Tensor,  # (B, S)
        targets: Tensor,  # (B, S)
    ) -> PassResults:
        """Run both passes of a micro-batch (from 1). All stages must be bound to its weights."""
        index = (micro_batch - 1) % self._accumulation
        kind = _Kind(inputs.shape, targets.shape, index == 0, index == self._accumulation - 1)
        recorded = self._recorded.get(kind)
        if recorded is None:
            self._num_met[kind] += 1
            if self._num_met[kind] <= NUM_WARM_UPS:
                with self._check_replayable():
                    return self._passes(micro_batch, inputs, targets)
            recorded = self._record(micro_batch, inputs, targets)
            self._recorded[kind] = recorded
        else:
            name = recorded.border.moved()
            if name is not None:
                raise RunError(f"runtime.graphs: {name} has moved since the passes were recorded")
        return _replay(recorded, inputs, targets)

    def _record(self, micro_batch: int, inputs: Tensor, targets: Tensor) -> _Recorded:
        own_inputs, own_targets = inputs.clone(), targets.clone()
        border = self._border()
        results: list[PassResults] = []

        def work() -> None:
            results.append(self._passes(micro_batch, own_inputs, own_targets))

        try:
            graph = self._make_graph(work)
        except RuntimeError as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(
                f"runtime.graphs: the passes cannot be recorded ({first_line[:200]}); set it to "
                f"false"
            ) from error
        gradients = []
        for stage in self._stages:
            gradients += [(weight, weight.grad) for weight in stage.newest.values()]
        return _Recorded(own_inputs, own_targets, graph, results[0], gradients, border)

    @contextmanager
    def _check_replayable(self) -> Iterator[None]:
        """RunError if the passes that run in this context did what a replay would not repeat."""
        random_numbers = _host_generators()
        buffers = self._buffers()
        border = _Border(buffers)
        yield
        if _host_generators() != random_numbers:
            raise RunError(
                "runtime.graphs: the model draws random numbers on the host, which a replay would "
                "repeat; draw them on the device, or set it to false"
            )
        now = self._buffers()
        renewed = [name for name, buffer in now.items() if buffer is not buffers.get(name)]
        name = renewed[0] if renewed else border.moved()
        if name is not None:
            raise RunError(
                f"runtime.graphs: {name} is another tensor after a pass, which a replay would not "
                f"see; change it in place, or set runtime.graphs to false"
            )

    def _border(self) -> _Border:
        tensors = self._buffers()
        for stage in self._stages:
            columns = zip(stage.newest.items(), stage.in_use, strict=True)
            for (name, newest), in_use in columns:
                tensors[f"stage {stage.index}, {name}"] = newest
                tensors[f"stage {stage.index}, {name} in use"] = in_use
        return _Border(tensors)

    def _buffers(self) -> dict[str, Tensor]:
        buffers = {}
        for stage in self._stages:
            for name, buffer in stage.module.named_buffers():
                buffers[f"stage {stage.index}, buffer {name}"] = buffer
        return buffers


def _replay(
    recorded: _Recorded,
    inputs: Tensor,  # (B, S)
    targets: Tensor,  # (B, S)
) -> PassResults:
    recorded.inputs.copy_(inputs)
    recorded.targets.copy_(targets)
    recorded.graph.replay()
    for weight, gradient in recorded.gradients:
        weight.grad = gradient
    return recorded.results.copied()


def _host_generators() -> tuple[object, bytes]:
    """The states of Python's and torch's generators on the host."""
    return random.getstate(), torch.get_rng_state().numpy().tobytes()
