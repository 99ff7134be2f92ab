"""Made-up measurements from which answers follow by plain arithmetic."""

from brx.planning.schedules import EqualStages
from brx.planning.verdict import Question
from brx.runs.time_to_loss import Experiment, Measurements

LOSSES = [3.02, 3.0, 2.98]


def experiment(method, delay, to_losses, **others):
    """A method at a delay. `to_losses` has the iterations to each of `LOSSES`: a number (or None),
    or a list with one per seed."""
    rows = [row if isinstance(row, list) else [row] for row in to_losses]
    usual = {
        "settings": {},
        "lr": 0.1,
        "num_rates": 3,
        "seconds": 1.0,
        "seeds": list(range(len(rows[0]))),
    }
    return Experiment(method=method, delay=delay, iterations=rows, **usual | others)


def of(*experiments, examples=1):
    """Measurements of these experiments."""
    about = {"source": "runs", "model": "4 blocks", "examples": examples, "last_iteration": 1000}
    return Measurements(**about, losses=LOSSES, experiments=list(experiments))


MEASURED = of(
    experiment("pipedream", 0, [90, 100, 110]),
    experiment("pipedream", 3, [180, 200, 220], seconds=1.1),
    experiment("pipedream", 15, [700, 900, None], num_rates=1),
    experiment("muon", 0, [70, 80, 90], seconds=1.5),
    experiment("muon", 31, [400, 500, 600], seconds=1.6),
)
PIPEDREAM = [one for one in MEASURED.experiments if one.method == "pipedream"]


def asked(loss, num_stages, num_micro_batches, *, examples=1, costs=None):
    """The question for a pipeline of equal stages."""
    devices = EqualStages(num_stages, num_micro_batches, examples)
    return Question(loss, num_stages, num_micro_batches, devices, costs or {})


def fresh_and_delayed(fresh, delayed, method="pipedream"):
    """Measurements of one method without delay and at a delay of 3. Each argument has an iteration
    per seed, which is the same for all losses."""
    return of(experiment(method, 0, [fresh] * 3), experiment(method, 3, [delayed] * 3))
