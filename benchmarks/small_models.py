"""The cost of basis rotation with small models: the time of an iteration divided by AdamW's, at the
sizes of laptop runs.

The smallest model is the preset `laptop`'s, and the one of width 64 is `similar`'s. `brx claims`
uses their times to turn iterations into hours. Nesterov is timed in its fastest implementation, so
that no method gains from a slow baseline. All methods take turns in one process, so that the ratios
hold when the machine's speed drifts.

    python -m benchmarks.small_models [--threads 1] [--rounds 12] [--iterations 20]
        (a multiple of 10)
"""

import statistics

import torch
from torch.optim import NAdam

from benchmarks.report import Table, parser_of, random_tokens, ratio, runner, take_turns
from brx.config.loading import Settings, preset_with
from brx.paper.scales import MAIN, VARIANTS
from brx.pipeline.engine import Engine
from brx.train.build import assemble

PRESET = "laptop"
SIZES = ((32, 8, 1), (32, 8, 8), (64, 8, 8), (32, 32, 1), (32, 32, 32))
"""(width, blocks, stages)."""
TIMED: dict[str, Settings] = {
    **{name: VARIANTS[name] for name in (*MAIN, "basis-rotation 2nd/unilateral")},
    "basis-rotation, covariance at refreshes": {
        **VARIANTS["basis-rotation"],
        "optimizer.covariance": "refresh",
    },
}


def main() -> None:
    """Measure and print."""
    options = parser_of(__doc__, threads=1, rounds=12, iterations=20).parse_args()
    torch.set_num_threads(options.threads)
    table = Table(
        "small_models",
        ["width", "blocks", "stages", "method", "ms / iteration (median)", "ratio to AdamW"],
    )
    for size in SIZES:
        variants = {name: runner(make_engine(*size, settings)) for name, settings in TIMED.items()}
        times = take_turns(variants, options.rounds, options.iterations)
        for name, turns in times.items():
            numbers = (
                f"{1e3 * statistics.median(turns):.2f}",
                f"{ratio(turns, times['pipedream']):.2f}",
            )
            table.add(*map(str, size), name, *numbers)
    table.write(
        f"preset {PRESET}: sequence 32, batch 4, fp32, frequency 10; {options.threads} thread(s)",
        "nesterov: torch's NAdam over all parameters at once (foreach), the fastest that torch has "
        "on a CPU; brx's runs"
        " there go parameter by parameter, torch's default, which rounds otherwise.",
    )


def make_engine(width: int, blocks: int, stages: int, settings: Settings) -> Engine:
    """The preset `laptop` at another size, on one device."""
    size = {
        "model.width": width,
        "model.blocks": blocks,
        "pipeline.stages": stages,
        "training.iterations": 100_000,
    }
    config = preset_with(PRESET, {**size, **settings})
    assembly = assemble(
        config, random_tokens(config.training.batch_size, config.model.sequence_length)
    )
    for optimizer in assembly.updater.optimizers:
        if isinstance(optimizer, NAdam):
            for group in optimizer.param_groups:
                group["foreach"] = True
    return assembly.engine


if __name__ == "__main__":
    main()
