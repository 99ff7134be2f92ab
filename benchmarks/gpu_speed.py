"""Iterations per second on one device: a plain training loop against every method of `brx`, main
ones at several P.

The plain loop is what one would write without brx: blocks compiled, autocast, a clip, fused AdamW,
batches copied to the device asynchronously. Each variant has the device to itself, one after the
other. Ctrl-C keeps what has been measured.

    python -m benchmarks.gpu_speed paper-95m --stages 1 32 [--only basis ...] [--set KEY=VALUE ...]
    [--out results/gpu]
"""

import gc
import statistics
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from benchmarks.report import (
    Table,
    gpu_parser_of,
    quick_first_basis,
    random_tokens,
    runner,
    take_turns,
)
from brx.config.loading import load_config
from brx.config.schema import RunConfig
from brx.data.batches import Prefetcher
from brx.model.stage import whole_model
from brx.train.build import assemble
from brx.train.device import autocast, choose_device, set_up
from brx.train.recorder import Utilization

AT_EVERY_P = {
    "pipedream": [],
    "basis-rotation": [],
    "basis-rotation, TF32 rotations": ["optimizer.rotation_precision=tf32"],
    "basis-rotation, bf16 rotations": ["optimizer.rotation_precision=bf16"],
}
AT_FIRST_P: dict[str, list[str]] = {
    "basis-rotation, covariance at refreshes": ["optimizer.covariance=refresh"],
    "basis-rotation, 1st unilateral": [
        "optimizer.source=1st",
        "optimizer.geometry=unilateral",
        "optimizer.covariance=refresh",
    ],
    **{
        name: []
        for name in ("pipedream-lr", "nesterov", "delay-compensation", "soap", "muon", "scion")
    },
}
"""Overrides by variant; a name begins with its method's."""


def main() -> None:
    """Measure and print."""
    parser = gpu_parser_of(__doc__, rounds=5, iterations=50)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="rows whose names contain one of these texts"
    )
    options = parser.parse_args()
    config = load_config(options.config, [*options.overrides, "pipeline.stages=1"])
    device, _ = choose_device(config.runtime.device)
    set_up(config.runtime, device, 1)
    utilization = Utilization(config, device)
    tokens = config.training.batch_size * config.model.sequence_length

    variants = {"plain loop": lambda: plain_loop(config, device)}
    for name, own in {**AT_EVERY_P, **AT_FIRST_P}.items():
        for stages in options.stages if name in AT_EVERY_P else options.stages[:1]:
            label = f"{name}, P = {stages}"
            if not any(text in label for text in options.only):
                continue
            method = f"optimizer.method={name.partition(',')[0]}"
            variant = load_config(
                options.config, [*options.overrides, method, *own, f"pipeline.stages={stages}"]
            )
            variants[label] = lambda variant=variant: runner(  # type: ignore[misc]
                assemble(variant, random_batches(variant, device).batch, device=device).engine
            )
    rates = {}
    with suppress(KeyboardInterrupt):
        for name, make in variants.items():
            rates[name] = measure(make, options.rounds, options.iterations)
            print(f"{name}: {1e3 / rates[name]:.2f} ms per iteration", flush=True)
    table = Table(
        "speed",
        ["variant", "ms / iteration", "tokens/s", "MFU", "over plain loop", "over own P = 1"],
    )
    for name, rate in rates.items():
        mfu = utilization.mfu(rate * tokens)
        at_first = rates.get(f"{name.rpartition(' = ')[0]} = 1", rate)
        share = "" if mfu is None else f"{mfu:.1%}"
        ratios = (f"{rates['plain loop'] / rate:.3f}", f"{at_first / rate:.3f}")
        table.add(name, f"{1e3 / rate:.2f}", f"{rate * tokens:,.0f}", share, *ratios)
    table.write(
        f"Speed of {options.config} on one device: {config.runtime.precision}, compile "
        f"{config.runtime.compile}",
        f"Median of {options.rounds} times {options.iterations} iterations, after as many to warm "
        f"up; refreshes"
        " (every 10) are in, the first basis is not.",
        folder=options.out,
    )


def measure(
    make: Callable[[], Callable[[int], Tensor | None]], rounds: int, iterations: int
) -> float:
    """Iterations per second of a loop that returns its last loss; the loop is dropped
    afterwards."""
    with quick_first_basis():
        times = take_turns({"": and_wait(make())}, rounds, iterations)[""]
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return 1 / statistics.median(times)


def and_wait(run: Callable[[int], Tensor | None]) -> Callable[[int], None]:
    """The loop, until the device is done."""

    def work(iterations: int) -> None:
        loss = run(iterations)
        assert loss is not None
        loss.item()

    return work


def random_batches(config: RunConfig, device: torch.device) -> Prefetcher:
    """Random tokens by way of the trainer's prefetcher."""
    shape = (config.training.batch_size, config.model.sequence_length)
    return Prefetcher(random_tokens(*shape, config.data.vocabulary_size), device)


def plain_loop(config: RunConfig, device: torch.device) -> Callable[[int], Tensor]:
    """Model, backward pass, clip, fused AdamW."""
    model = whole_model(config.model, config.data.vocabulary_size, config.training.seed)
    model.to(device)
    if config.runtime.compile:
        for block in model.blocks.values():
            block.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, weight_decay=0.01, fused=True
    )
    batches, context = random_batches(config, device), autocast(config.runtime, device)
    done = 0

    def run(iterations: int) -> Tensor:
        nonlocal done
        for _ in range(iterations):
            done += 1
            with context():
                _, loss, auxiliary_loss = model(*batches.batch(done))
            optimizer.zero_grad()
            (loss if auxiliary_loss is None else loss + auxiliary_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
            optimizer.step()
        found: Tensor = loss.detach()
        return found

    return run


if __name__ == "__main__":
    main()
