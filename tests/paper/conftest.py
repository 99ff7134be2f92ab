"""Made-up runs that all tests of the paper's figures, tables and claims share."""

from itertools import product

import pytest

from brx.cli.main import main
from brx.paper import scales
from brx.paper.claims import CLAIMS, judge
from brx.paper.figures import FIGURES
from tests.paper.helpers import LAPTOP, write_experiment

ENDS = [{"pipeline.stages": P} for P in (1, 32)]


def experiments_of_the_paper():
    """The method and settings of every experiment at the scale `laptop`, except the mixture."""
    deep = {"pipeline.stages": 32}
    most = scales.BASELINES_AND_STRATEGIES
    yield from product(most, [{"pipeline.stages": P} for P in scales.DEPTHS])
    yield from product(scales.PRECONDITIONED, ENDS)
    yield from product(most, [{"pipeline.stages": n, "model.blocks": n} for n in scales.BLOCKS])
    widths = [LAPTOP.models[model].settings for model in ("smaller", "larger")]
    yield from product(scales.MAIN, [{"pipeline.stages": 24, **width} for width in widths])
    stashes = [{**deep, "pipeline.stash": stash} for stash in ("none", "predict")]
    yield from product(scales.MAIN, stashes)
    refreshes = [{"optimizer.frequency": frequency} for frequency in scales.FREQUENCIES]
    refreshes += [
        {"optimizer.refresh_schedule": schedule} for schedule in ("stage-aware", "reversed")
    ]
    yield from product(["basis-rotation"], [deep | refresh for refresh in refreshes])
    for T, end in product(LAPTOP.ladder, ENDS):
        yield from product(scales.LADDER_METHODS, [end | {"training.iterations": T}])
    for P, strength in product((8, 16, 32), scales.COMPENSATIONS):
        yield "delay-compensation", {"pipeline.stages": P, "optimizer.compensation": strength}


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """A folder with made-up runs of all these experiments, which are slower with more delay."""
    folder = tmp_path_factory.mktemp("results") / "laptop"
    for method, settings in experiments_of_the_paper():
        seeds = (0, 1, 2) if settings in ENDS else (0,)
        write_experiment(
            folder, LAPTOP.preset, {**settings, **scales.VARIANTS[method]}, seeds=seeds
        )
    return folder


@pytest.fixture(scope="session")
def experiments(complete):
    """These runs, read once. Tests that look at what was asked for use `experiments.fresh()`."""
    return scales.Experiments.load(LAPTOP, complete)


@pytest.fixture(scope="session")
def outcomes(experiments):
    """All claims by name, compared with those runs."""
    return {outcome.claim.name: outcome for outcome in judge(experiments.fresh(), CLAIMS)}


@pytest.fixture(scope="session")
def drawn(complete, tmp_path_factory):
    """A folder with all figures from those runs, as `brx plot all` draws them: laid out, but not
    rendered."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "matplotlib.figure.Figure.savefig",
            lambda figure, file, **options: file.write(b"x" * 101),
        )
        from_runs = {
            name: figure for name, figure in FIGURES.items() if figure.is_from_runs_of_scale
        }
        patch.setattr("brx.paper.figures.FIGURES", from_runs)
        assert (
            main(
                ["plot", "all", "--scale", "laptop", "--runs", str(complete), "--out", str(folder)]
            )
            == 0
        )
    return folder
