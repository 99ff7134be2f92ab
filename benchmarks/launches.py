"""Operations per iteration and phase: the kernels that a GPU would have to launch.

They are counted on the CPU, for a model with as many blocks and stages as `paper-95m` but small
matrices, because the counts hardly depend on sizes. Views and empty tensors are not counted. An
operation on a list of tensors (`_foreach_...`, `_fused_...`) counts once.

    python -m benchmarks.launches
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import Table, parser_of, random_tokens
from brx.config.loading import Settings, apply_overrides
from brx.config.schema import RunConfig
from brx.methods.updater import MethodUpdater, Step
from brx.optim import BasisRotation
from brx.pipeline import engine as engine_module
from brx.pipeline.gradients import Gradients
from brx.pipeline.versions import StageVersions
from brx.train.build import Assembly, assemble

BLOCKS, STAGES, FREQUENCY = 32, 32, 4
_WITHOUT_KERNELS = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::promote_types")
PASSES, BIND_STORE, COLLECT, CLIP, ADAMW, ROTATION, CHECKS = PHASES = (
    "forward and backward pass",
    "bind and store",
    "collect gradients",
    "clip",
    "AdamW",
    "basis rotation",
    "look for numbers that are not finite (CPU only)",
)
VARIANTS: dict[str, Settings] = {
    "AdamW, fp32": {"optimizer.method": "pipedream"},
    "AdamW, bf16": {"optimizer.method": "pipedream", "runtime.precision": "bf16"},
    "basis rotation, bf16": {
        "optimizer.method": "basis-rotation",
        "optimizer.frequency": FREQUENCY,
        "runtime.precision": "bf16",
    },
}


def main() -> None:
    """Count and print."""
    parser_of(__doc__).parse_args()
    columns = ["variant", "phase", "P = 1", f"P = {STAGES}", "more per stage"]
    table = Table("launches", columns)
    for name, settings in VARIANTS.items():
        one, many = (count(config_for(stages, settings)) for stages in (1, STAGES))
        for phase in PHASES:
            if one[phase] or many[phase]:
                table.add(name, phase, *_row(one[phase], many[phase]))
        table.add(name, "in all", *_row(one.total(), many.total()))
        if "basis-rotation" in settings.values():
            one, many = (
                count(config_for(stages, settings), refresh=True) for stages in (1, STAGES)
            )
            phase = f"{ROTATION}, in an iteration with a refresh"
            table.add(name, phase, *_row(one[ROTATION], many[ROTATION]))
    table.write(
        f"operations per iteration; {BLOCKS} blocks, one micro-batch per update, pipeline delays"
    )


def _row(one: int, many: int) -> tuple[str, str, str]:
    return str(one), str(many), f"{(many - one) / STAGES:.1f}"


def config_for(stages: int, settings: Settings | None = None, *, blocks: int = BLOCKS) -> RunConfig:
    """The configuration whose operations are counted, with some settings changed."""
    content = {
        "model": {"blocks": blocks, "width": 16, "heads": 2, "sequence_length": 8},
        "pipeline": {"stages": stages},
        "training": {"iterations": 100_000, "batch_size": 2},
        "logging": {"update_norms": False},
    }
    overrides = [f"{key}={value}" for key, value in (settings or {}).items()]
    return apply_overrides(content, overrides, "benchmark")


def count(config: RunConfig, *, refresh: bool = False) -> Counter[str]:
    """The operations of one iteration by phase: an ordinary one, or one with a refresh.

    It runs on one thread, because the count would miss what basis rotation does on other threads of
    the CPU."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _count(config, FREQUENCY if refresh else FREQUENCY - 1)
    finally:
        torch.set_num_threads(num_threads)


def _count(config: RunConfig, counted: int) -> Counter[str]:
    """The operations of iteration number `counted` by phase.

    An optimizer's state is made in iteration 1 and the first bases in iteration 2; refreshes are at
    multiples of the frequency."""
    training, sequence = config.training, config.model.sequence_length
    assembly = assemble(config, random_tokens(training.batch_size, sequence))
    for _ in assembly.engine.run(1, lambda: counted - 1):
        pass
    with counting(assembly) as operations:
        for _ in assembly.engine.run(counted, lambda: counted):
            pass
    return operations


class _Operations(TorchDispatchMode):
    """Counts operations by the phase that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.phase = PASSES

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not _launches_nothing(function):
            self.counts[self.phase] += 1
        return function(*args, **(kwargs or {}))

    def during(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, but its operations are counted under `phase`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return call(*args, **kwargs)
            finally:
                self.phase = before

        return counted


def _launches_nothing(function: Any) -> bool:
    """Whether an operation only makes a view of its argument, or memory without contents."""
    name = function.name()
    if name.startswith(_WITHOUT_KERNELS) or not name.startswith("aten::"):
        return True
    results = function._schema.returns
    aliases = [result.alias_info for result in results if result.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@contextmanager
def counting(assembly: Assembly) -> Iterator[Counter[str]]:
    """Count the operations inside the block by phase. The assembly is useless afterwards."""
    operations = _Operations()
    places: list[tuple[Any, str, str]] = [
        (StageVersions, "bind", BIND_STORE),
        (StageVersions, "bind_backward", BIND_STORE),
        (StageVersions, "record_update", BIND_STORE),
        (Gradients, "hand_over", COLLECT),
        (Gradients, "accumulate", COLLECT),
        (Gradients, "clip", CLIP),
        (engine_module, "check_finite", CHECKS),
    ]
    updater = assembly.updater
    assert isinstance(updater, MethodUpdater)

    def counted(optimizer: Optimizer, step: Step) -> Step:
        phase = ROTATION if isinstance(optimizer, BasisRotation) else ADAMW
        return operations.during(phase, step)

    updater.wrap_steps(counted)
    with ExitStack() as stack:
        for owner, name, phase in places:
            call = operations.during(phase, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, call))
        stack.enter_context(operations)
        yield operations.counts


if __name__ == "__main__":
    main()
