"""Iterations per second on one device: a plain training loop against `brx` at several P.

The plain loop is what one would write without brx, in the way of nanoGPT: the whole model compiled, autocast, a clip,
fused AdamW, batches copied to the device asynchronously. Each variant has the device to itself, one after the other.

    python -m benchmarks.gpu_speed paper-95m --stages 1 32 [--set KEY=VALUE ...] [--out results/gpu]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Table
from brx.config.loading import load_config
from brx.config.schema import RunConfig
from brx.data.batches import Prefetcher
from brx.model.stage import initialize, whole_model
from brx.train.build import assemble
from brx.train.device import autocast, choose_device, set_up
from brx.train.recorder import Utilization

COMPARED = ("pipedream", "basis-rotation")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or a file")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 32], metavar="P")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each variant; the median counts")
    parser.add_argument(
        "--iterations", type=int, default=50, help="in each of them (a multiple of the refresh interval)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    options = parser.parse_args()
    config = load_config(options.config, [*options.overrides, "pipeline.stages=1"])
    device, _ = choose_device(config.runtime.device)
    set_up(config.runtime, device, 1)
    utilization = Utilization(config, device)
    tokens = config.training.batch_size * config.model.sequence_length

    rates = {"plain loop": measure(lambda: plain_loop(config, device), options.rounds, options.iterations)}
    for method in COMPARED:
        for stages in options.stages:
            overrides = [*options.overrides, f"optimizer.method={method}", f"pipeline.stages={stages}"]
            variant = load_config(options.config, overrides)
            rates[f"{method}, P = {stages}"] = measure(
                lambda variant=variant: engine_loop(variant, device),  # type: ignore[misc]
                options.rounds,
                options.iterations,
            )
    table = Table("speed", ["variant", "iterations/s", "tokens/s", "MFU", "ratio to plain loop", "ratio to own P = 1"])
    for name, rate in rates.items():
        mfu = utilization.mfu(rate * tokens)
        own = rates.get(f"{name.rpartition(' = ')[0]} = 1", rate)
        share = "" if mfu is None else f"{mfu:.1%}"
        ratios = (f"{rate / rates['plain loop']:.3f}", f"{rate / own:.3f}")
        table.add(name, f"{rate:.2f}", f"{rate * tokens:,.0f}", share, *ratios)
    table.write(
        f"Speed of {options.config} on one device: {config.runtime.precision}, compile {config.runtime.compile}",
        f"Median of {options.rounds} times {options.iterations} iterations, after as many to warm up.",
        folder=options.out,
    )


def measure(make: Callable[[], Callable[[int], Tensor]], rounds: int, iterations: int) -> float:
    """Iterations per second of a loop that returns its last loss; the loop is dropped afterwards."""
    run = make()
    rates = []
    for turn in range(rounds + 1):
        started = time.perf_counter()
        run(iterations).item()  # waits for the device
        if turn:  # the first turn warms up
            rates.append(iterations / (time.perf_counter() - started))
    del run
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return statistics.median(rates)


def random_batches(config: RunConfig, device: torch.device) -> Prefetcher:
    """Random tokens by way of the trainer's prefetcher."""
    shape = (config.training.batch_size, config.model.sequence_length + 1)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(iteration)
        tokens = torch.randint(config.data.vocabulary_size, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Prefetcher(batch, device)


def plain_loop(config: RunConfig, device: torch.device) -> Callable[[int], Tensor]:
    """Model, backward pass, clip, fused AdamW."""
    model = whole_model(config.model, config.data.vocabulary_size)
    initialize(model, config.model.blocks, config.training.seed)
    model.to(device)
    if config.runtime.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, weight_decay=0.01, fused=True)
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


def engine_loop(config: RunConfig, device: torch.device) -> Callable[[int], Tensor]:
    """The delay engine, as the trainer uses it."""
    engine = assemble(config, random_batches(config, device).batch, device=device).engine
    done = 0

    def run(iterations: int) -> Tensor:
        nonlocal done
        last = done + iterations
        loss = torch.empty(0)
        for result in engine.run(done + 1, lambda: last):
            assert result.loss is not None
            loss = result.loss
        done = last
        return loss

    return run


if __name__ == "__main__":
    main()
