"""What delay costs in time: one brx iteration at P = 1, 2, 4, 8, 16 against a plain PyTorch loop of
the same model.

All variants take turns in one process, so that the ratios hold when the machine's speed drifts.

    python -m benchmarks.engine [--threads 1] [--rounds 12] [--iterations 10]
"""

import statistics
from collections.abc import Callable

import torch

from benchmarks.report import Table, parser_of, random_tokens, ratio, runner, take_turns
from brx.config.loading import Settings, apply_overrides
from brx.config.schema import RunConfig
from brx.model.stage import whole_model
from brx.pipeline.engine import Engine
from brx.train.build import assemble

BLOCKS, WIDTH, SEQUENCE, BATCH, VOCABULARY = 16, 64, 64, 8, 256
STAGES = (1, 2, 4, 8, 16)

micro_batch = random_tokens(BATCH, SEQUENCE, VOCABULARY)


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, threads=1, rounds=12, iterations=10).parse_args()
    torch.set_num_threads(options.threads)

    variants: dict[str, Callable[[int], object]] = {"plain loop": plain_loop(config_for(1))}
    engines = {}
    for stages in STAGES:
        engines[stages] = assemble(config_for(stages), micro_batch).engine
        variants[f"brx, P = {stages}"] = runner(engines[stages])
    times = take_turns(variants, options.rounds, options.iterations)
    columns = [
        "variant",
        "ms / iteration (median)",
        "ratio to plain loop",
        "ratio to P = 1",
        "rings / formula",
    ]
    table = Table("engine", columns)
    for name in variants:
        stages = next((count for count in STAGES if name == f"brx, P = {count}"), None)
        table.add(
            name,
            f"{1e3 * statistics.median(times[name]):.2f}",
            f"{ratio(times[name], times['plain loop']):.3f}",
            f"{ratio(times[name], times['brx, P = 1']):.3f}",
            "" if stages is None else f"{ring_share(engines[stages]):.3f}",
        )
    table.write(
        f"{BLOCKS} blocks, d {WIDTH}, sequence {SEQUENCE}, batch {BATCH}, fp32, AdamW, "
        f"{options.threads} thread(s)"
    )


def config_for(stages: int, settings: Settings | None = None) -> RunConfig:
    """The configuration of the measurement, with other settings."""
    content = {
        "model": {"blocks": BLOCKS, "width": WIDTH, "heads": 2, "sequence_length": SEQUENCE},
        "pipeline": {"stages": stages},
        "training": {"iterations": 100_000, "batch_size": BATCH},
        "logging": {"update_norms": False},
    }
    return apply_overrides(
        content, [f"{key}={value}" for key, value in (settings or {}).items()], "benchmark"
    )


def plain_loop(config: RunConfig) -> Callable[[int], None]:
    """An ordinary training loop without brx: model, backward pass, clipping, fused AdamW."""
    model = whole_model(config.model, VOCABULARY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def run(iterations: int) -> None:
        for t in range(iterations):
            loss = model(*micro_batch(t)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return run


def ring_share(engine: Engine) -> float:
    """Measured bytes of the weight versions, over the formula sum (tau + 1) x stage size (M = 1).

    The last stage (tau = 0) needs no ring: its live weights are its only version.
    """
    formula = held = 0
    for stage in engine.stages:
        size = sum(weight.nbytes for weight in stage.newest.values())
        formula += (stage.delay.tau + 1) * size
        held += stage.slots.nbytes if stage.delay.tau else size
    return held / formula


if __name__ == "__main__":
    main()
