"""How often the paper's claims are a `yes` in worlds where neither methods nor delay do anything.

In a world every run falls along one curve. A seed shifts all runs of it alike, and every run has
noise of its own, whose size is drawn, by experiment, from what the committed runs of `similar` show
between seeds. `brx claims` then judges these runs as it judges real ones: by the protocol's first
rule and by the strict one, with two seeds and with three. Claims from measurements at checkpoints,
toy problems and formulas are from no runs, and left out.

    python -m benchmarks.claims_null [--worlds 200]        # 1 to 2 hours on one core
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.report import Table, parser_of
from brx.paper.claims import CLAIMS, Claim, judge
from brx.paper.scales import SCALES, Experiments
from brx.runs import comparison
from brx.runs.experiments import by_experiment
from brx.runs.folder import SEED
from brx.runs.slowdown import last_quarter_loss

Series = NDArray[np.float64]

SCALE = SCALES["similar"]
SEED_COUNTS = (2, 3)
NUM_POINTS = 800  # recorded iterations of a run
NOISE = 0.15  # nats, of single recorded losses
LEVELS = 0.02  # nats, standard deviation of what a seed shifts in all of its runs
MOST = 0.05  # the share of worlds in which a strict rule may say yes


@dataclass(frozen=True)
class Curve:
    """The values that `brx claims` reads from a run."""

    iterations: Series
    train_loss: Series


@dataclass(frozen=True)
class World:
    """Runs of every experiment in which nothing has an effect."""

    runs: pd.DataFrame
    curves: dict[str, Curve]

    @classmethod
    def draw(
        cls,
        template: pd.DataFrame,  # a row per experiment
        spreads: Series,  # nats
        num_seeds: int,
        rng: np.random.Generator,
    ) -> "World":
        """Draw a world. Each experiment gets one of `spreads`, the standard deviations between
        seeds."""
        levels = rng.normal(scale=LEVELS, size=num_seeds)
        frames = []
        curves: dict[str, Curve] = {}
        for experiment, spread in zip(
            template.index, rng.choice(spreads, size=len(template)), strict=True
        ):
            for seed, level in enumerate(levels):
                run = f"{experiment}, seed {seed}"
                shift = level + rng.normal(scale=spread)
                curves[run] = draw_curve(template.loc[experiment, "last_iteration"], shift, rng)
                frames.append(
                    {
                        "run": run,
                        "experiment": experiment,
                        SEED: seed,
                        "val_loss": float(curves[run].train_loss[-NUM_POINTS // 50 :].mean()),
                    }
                )
        drawn = pd.DataFrame(frames).set_index("run")
        others = template.drop(columns=[SEED, "val_loss"])
        runs = drawn.join(others, on="experiment")
        losses = {run: curve.train_loss for run, curve in curves.items()}
        runs["train_loss"] = [float(losses[run][-NUM_POINTS // 50 :].mean()) for run in runs.index]
        runs["last_quarter_loss"] = [last_quarter_loss(losses[run]) for run in runs.index]
        return cls(runs.assign(status="finished", name=list(runs.index)), curves)

    @contextmanager
    def read(self) -> Iterator[Experiments]:
        """The experiments of this world. Within the context, its curves replace recorded ones."""
        with patch.object(comparison, "read_run", lambda path: self.curves[str(path)]):
            yield Experiments(SCALE, self.runs, Path("a world"))


def draw_curve(last_iteration: float, shift: float, rng: np.random.Generator) -> Curve:
    """A power law, as the committed runs have it, shifted, with noise at each recorded loss."""
    iterations = np.linspace(1, float(last_iteration), NUM_POINTS)
    share = iterations / float(last_iteration)
    loss = 1.2 + 1.8 * (share + 0.02) ** -0.35 - 1.6 + shift
    return Curve(iterations, loss + rng.normal(scale=NOISE, size=NUM_POINTS))


def template_of(experiments: Experiments) -> pd.DataFrame:
    """A row per experiment of the committed runs, by its id."""
    rows = [seeds.iloc[[0]] for seeds in by_experiment(experiments.chosen)]
    columns = ["diverged_seeds", "lr_at_edge", "num_rates"]
    return pd.concat(rows).drop(columns=columns).set_index("experiment")


def spreads_of(experiments: Experiments) -> Series:
    """Standard deviations of the final validation loss over seeds, of experiments with three or
    more."""
    spreads = [
        seeds["val_loss"].std(ddof=1)
        for seeds in by_experiment(experiments.chosen)
        if len(seeds) >= max(SEED_COUNTS)
    ]
    return np.array(spreads)


def claims_from_runs(experiments: Experiments) -> list[Claim]:
    """The claims that are judged by the runs of sweeps."""
    outcomes = judge(experiments, CLAIMS)
    return [outcome.claim for outcome in outcomes if outcome.runs]


def main() -> None:
    options = parser_of(__doc__, worlds=200).parse_args()
    experiments = Experiments.load(SCALE)
    template, spreads = template_of(experiments), spreads_of(experiments)
    claims = claims_from_runs(experiments)
    first: Counter[tuple[str, int]] = Counter()
    strict: Counter[tuple[str, int]] = Counter()
    for number in range(options.worlds):
        for num_seeds in SEED_COUNTS:
            rng = np.random.default_rng([number, num_seeds])
            with World.draw(template, spreads, num_seeds, rng).read() as world:
                for outcome in judge(world, claims):
                    key = outcome.claim.name, num_seeds
                    first[key] += outcome.verdict == "yes"
                    strict[key] += outcome.strict_verdict == "yes"
    of_first = [f"first rule, {n} seeds" for n in SEED_COUNTS]
    of_strict = [f"strict, {n} seeds" for n in SEED_COUNTS]
    table = Table("claims_null", ["claim", *of_first, *of_strict])
    names = [claim.name for claim in claims]
    for name in names:
        counts = [of[name, n] for of in (first, strict) for n in SEED_COUNTS]
        table.add(name, *(f"{count / options.worlds:.1%}" for count in counts))
    sums = [
        sum(of[name, n] for name in names) / options.worlds
        for of in (first, strict)
        for n in SEED_COUNTS
    ]
    table.add(f"sum of {len(names)} claims", *(f"{total:.2f}" for total in sums))
    too_often = [name for name in names if strict[name, SEED_COUNTS[-1]] > MOST * options.worlds]
    table.write(
        f"Share of {options.worlds} worlds without effect in which a claim is a yes",
        "The last row is the mean number of claims that are a yes in a world.",
        f"Standard deviations between seeds: median {np.median(spreads):.3f}, largest "
        f"{spreads.max():.3f} nats.",
        f"Strictly a yes in more than {MOST:.0%} with {SEED_COUNTS[-1]} seeds: "
        f"{', '.join(too_often) or 'none'}.",
    )


if __name__ == "__main__":
    main()
