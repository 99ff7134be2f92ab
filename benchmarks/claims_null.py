"""How often the paper's claims get a `yes` in made-up worlds where neither the method nor the delay
has an effect.

In a world, all runs follow one curve, and each seed shifts all of its runs by the same amount.
Every run also has a shift of its own; each experiment draws the size of these shifts from the
standard deviations between seeds in the committed runs of `similar`. `brx claims` then judges these
runs as it judges real ones: by the protocol's first rule and by the strict one, with the first two
seeds of a world, the first three, and all five. Claims from measurements at checkpoints, toy
problems and formulas use no runs, and are left out.

    python -m benchmarks.claims_null [--worlds 200]        # about 15 minutes on one core
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
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
from brx.runs.slowdown import last_quarter_loss
from brx.runs.trajectory import SEED, decides_trajectory

Series = NDArray[np.float64]

SCALE = SCALES["similar"]
READ = {
    *("architecture", "method", "variant", "unusual", "depth", "last_iteration", "iteration"),
    *("data_fingerprint", "trajectory_version", "examples_per_update"),
    *("optimizer.lr", "pipeline.delay", "pipeline.delay.like"),
}
"""Columns of runs that judging reads by name, except those that a world draws."""
SEED_COUNTS = (2, 3, 5)
FIRST_LOOK, SECOND_LOOK = 3, 5
"""A claim that is open with the first number of seeds may get the second one (protocol, section
16)."""
NUM_POINTS = 800  # recorded iterations of a run
NOISE = 0.15  # nats, of single recorded losses
LEVELS = 0.02  # nats, standard deviation of the shift that a seed gives to all of its runs
MOST = 0.05  # the largest share of worlds in which a strict rule may say yes


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
        """Draw runs with seeds 0, 1, ... of every experiment of the template.

        `spreads` are standard deviations between seeds; each experiment draws one of them."""
        levels = rng.normal(scale=LEVELS, size=num_seeds)
        spread_of_each = rng.choice(spreads, size=len(template))
        lengths = template["last_iteration"]
        rows = []
        curves: dict[str, Curve] = {}
        for experiment, spread in zip(template.index, spread_of_each, strict=True):
            for seed, level in enumerate(levels):
                run = f"{experiment}, seed {seed}"
                shift = level + rng.normal(scale=spread)
                curve = draw_curve(lengths[experiment], shift, rng)
                curves[run] = curve
                losses = curve.train_loss
                final_loss = float(losses[-NUM_POINTS // 50 :].mean())  # over the last 2 %
                rows.append(
                    {
                        "run": run,
                        "experiment": experiment,
                        SEED: seed,
                        "val_loss": final_loss,
                        "train_loss": final_loss,
                        "last_quarter_loss": last_quarter_loss(losses),
                    }
                )
        drawn = pd.DataFrame(rows).set_index("run")
        runs = drawn.astype({"experiment": object}).join(template, on="experiment")
        constant = {"status": "finished", "name": list(runs.index)}
        return cls(runs.assign(**constant).astype(dict.fromkeys(constant, object)), curves)

    @contextmanager
    def read(self, num_seeds: int) -> Iterator[Experiments]:
        """The experiments of this world with its first seeds. Inside the block, its curves are read
        in place of recorded ones."""
        runs = self.runs[self.runs[SEED] < num_seeds]
        with patch.object(comparison, "read_run", lambda path: self.curves[str(path)]):
            yield Experiments(SCALE, runs, Path("a world"))


def draw_curve(last_iteration: float, shift: float, rng: np.random.Generator) -> Curve:
    """A power law like that of the committed runs, shifted, with noise at each recorded loss."""
    iterations = np.linspace(1, float(last_iteration), NUM_POINTS)
    share = iterations / float(last_iteration)
    loss = 1.2 + 1.8 * (share + 0.02) ** -0.35 - 1.6 + shift
    return Curve(iterations, loss + rng.normal(scale=NOISE, size=NUM_POINTS))


def template_of(experiments: Experiments) -> pd.DataFrame:
    """A row per experiment of the committed runs, by its id, with the columns that judging reads.

    Judging a claim takes hundreds of small frames apart and joins them again. With a tenth of the
    columns, and texts as plain objects, that is ten times as fast."""
    rows = pd.concat([seeds.iloc[[0]] for seeds in by_experiment(experiments.chosen)])
    rows = rows.set_index("experiment")
    read = [key for key in rows if key in READ or _tells_apart(rows, key)]
    texts = {key: object for key in read if isinstance(rows[key].dtype, pd.StringDtype)}
    return rows[read].astype(texts)


def _tells_apart(experiments: pd.DataFrame, key: str) -> bool:
    """Whether a column is a setting that decides numbers and differs between experiments."""
    return decides_trajectory(key) and experiments[key].map(repr).nunique() > 1


def spreads_of(experiments: Experiments) -> Series:
    """Standard deviations of the final validation loss over seeds, for experiments with three seeds
    or more."""
    spreads = [
        seeds["val_loss"].std(ddof=1)
        for seeds in by_experiment(experiments.chosen)
        if len(seeds) >= FIRST_LOOK
    ]
    return np.array(spreads)


def claims_from_runs(experiments: Experiments) -> list[Claim]:
    """The claims that are judged by the runs of sweeps."""
    outcomes = judge(experiments, CLAIMS)
    return [outcome.claim for outcome in outcomes if outcome.runs]


@dataclass
class Tally:
    """In how many worlds each claim is a yes."""

    # By the claim's name and the number of seeds.
    first: Counter[tuple[str, int]] = field(default_factory=Counter)  # by the first rule
    strict: Counter[tuple[str, int]] = field(default_factory=Counter)
    # By the claim's name: strictly at the first look, or at the second one if the first leaves it
    # open.
    twice: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: "Tally") -> "Tally":
        self.first += other.first
        self.strict += other.strict
        self.twice += other.twice
        return self


def count_yes(
    template: pd.DataFrame,  # a row per experiment
    spreads: Series,  # nats
    claims: Sequence[Claim],
    worlds: Iterable[int],
) -> Tally:
    """Judge the claims in worlds, given by their numbers, from which alone they are drawn."""
    tally = Tally()
    for number in worlds:
        world = World.draw(template, spreads, max(SEED_COUNTS), np.random.default_rng(number))
        strict: dict[tuple[str, int], str] = {}
        for num_seeds in SEED_COUNTS:
            with world.read(num_seeds) as experiments:
                outcomes = judge(experiments, claims)
            for outcome in outcomes:
                key = outcome.claim.name, num_seeds
                strict[key] = outcome.strict_verdict
                tally.first[key] += outcome.verdict == "yes"
                tally.strict[key] += outcome.strict_verdict == "yes"
        for claim in claims:
            tally.twice[claim.name] += is_yes_at_last(
                strict[claim.name, FIRST_LOOK], strict[claim.name, SECOND_LOOK]
            )
    return tally


def is_yes_at_last(first_look: str, second_look: str) -> bool:
    """Whether a claim ends as a yes, if it is looked at again where the first look leaves it
    open."""
    verdict = second_look if first_look == "open" else first_look
    return verdict == "yes"


def write_tally(
    tally: Tally,
    names: Sequence[str],  # of the claims
    spreads: Series,
    num_worlds: int,
) -> None:
    """Write a row per claim with its shares of yes, and say which strict rules are too easy."""
    rules = {"first rule": tally.first, "strict": tally.strict}
    counts: dict[str, list[int]] = {}  # by column, in the order of names
    for (rule, counter), num_seeds in product(rules.items(), SEED_COUNTS):
        counts[f"{rule}, {num_seeds} seeds"] = [counter[name, num_seeds] for name in names]
    twice = f"strict, {FIRST_LOOK} seeds, and {SECOND_LOOK} if open"
    counts[twice] = [tally.twice[name] for name in names]
    table = Table("claims_null", ["claim", *counts])
    for name, *row in zip(names, *counts.values(), strict=True):
        table.add(name, *(f"{count / num_worlds:.1%}" for count in row))
    means = [f"{sum(column) / num_worlds:.2f}" for column in counts.values()]
    table.add(f"sum of {len(names)} claims", *means)
    most = MOST * num_worlds
    too_often = [name for name in names if tally.strict[name, FIRST_LOOK] > most]
    too_often_at_last = [name for name in names if tally.twice[name] > most]
    table.write(
        f"Share of {num_worlds} worlds without effect in which a claim is a yes",
        "The last row is the mean number of claims that are a yes in a world.",
        f"Standard deviations between seeds: median {np.median(spreads):.3f}, largest "
        f"{spreads.max():.3f} nats.",
        f"Strictly a yes in more than {MOST:.0%} with {FIRST_LOOK} seeds: "
        f"{', '.join(too_often) or 'none'}; with the second look: "
        f"{', '.join(too_often_at_last) or 'none'}.",
    )


def main() -> None:
    options = parser_of(__doc__, worlds=200).parse_args()
    experiments = Experiments.load(SCALE)
    template, spreads = template_of(experiments), spreads_of(experiments)
    claims = claims_from_runs(experiments)
    tally = count_yes(template, spreads, claims, range(options.worlds))
    write_tally(tally, [claim.name for claim in claims], spreads, options.worlds)


if __name__ == "__main__":
    main()
