"""Made-up runs that all tests of the paper's figures, tables and claims share."""

import pytest

from brx.cli.main import main
from brx.paper.claim_list import CLAIMS
from brx.paper.claims import judge
from brx.paper.figures import FIGURES
from brx.paper.scales import (
    BASELINES_AND_STRATEGIES,
    COMPENSATIONS,
    FREQUENCIES,
    LADDER_METHODS,
    MAIN,
    SCALES,
    VARIANTS,
    Experiments,
)
from tests.paper.helpers import write_experiment

LAPTOP = SCALES["laptop"]
DEEP = {"pipeline.stages": 32}


@pytest.fixture(scope="session")
def complete(tmp_path_factory):
    """Made-up runs of every experiment at the scale of a laptop but for the mixture; slower with more delay."""
    folder = tmp_path_factory.mktemp("results") / "laptop"
    for method in VARIANTS:
        for stages in LAPTOP.depths if method in BASELINES_AND_STRATEGIES else (1, 32):
            if method != "delay-compensation":
                seeds = (0, 1, 2) if stages in (1, 32) else (0,)
                write_experiment(folder, LAPTOP.preset, {"pipeline.stages": stages, **VARIANTS[method]}, seeds=seeds)
        if method in BASELINES_AND_STRATEGIES:
            for blocks in LAPTOP.blocks:
                settings = {"pipeline.stages": blocks, "model.blocks": blocks, **VARIANTS[method]}
                write_experiment(folder, LAPTOP.preset, settings)
    for method in MAIN:
        for model in ("smaller", "larger"):
            settings = {"pipeline.stages": 24, **LAPTOP.models[model].settings, **VARIANTS[method]}
            write_experiment(folder, LAPTOP.preset, settings)
        for stash in ("none", "predict"):
            write_experiment(folder, LAPTOP.preset, {**DEEP, "pipeline.stash": stash, **VARIANTS[method]})
    for frequency in FREQUENCIES:
        settings = {**DEEP, "optimizer.frequency": frequency, **VARIANTS["basis-rotation"]}
        write_experiment(folder, LAPTOP.preset, settings)
    for refresh_schedule in ("stage-aware", "reversed"):
        settings = {**DEEP, "optimizer.refresh_schedule": refresh_schedule, **VARIANTS["basis-rotation"]}
        write_experiment(folder, LAPTOP.preset, settings)
    for iterations in LAPTOP.lengths:
        for method in LADDER_METHODS:
            for stages in (1, 32):
                settings = {"training.iterations": iterations, "pipeline.stages": stages}
                write_experiment(folder, LAPTOP.preset, {**settings, **VARIANTS[method]})
    for strength in COMPENSATIONS:
        for stages in (8, 16, 32):
            settings = {"optimizer.compensation": strength, "pipeline.stages": stages}
            write_experiment(folder, LAPTOP.preset, {**settings, **VARIANTS["delay-compensation"]})
    for method in MAIN:
        for stages in (1, 32):
            settings = {"pipeline.stages": stages, "optimizer.lr": 3e-3, **VARIANTS[method]}
            write_experiment(folder.with_name("laptop-rates"), LAPTOP.preset, settings, val_loss=0.0, slowness=2)
    return folder


@pytest.fixture(scope="session")
def experiments(complete):
    """Those runs, read once; tests that count what was asked for take it `fresh`."""
    return Experiments.load(LAPTOP, complete)


@pytest.fixture(scope="session")
def outcomes(experiments):
    """All claims beside those runs, by name."""
    return {outcome.claim.name: outcome for outcome in judge(experiments.fresh(), CLAIMS)}


@pytest.fixture(scope="session")
def drawn(complete, tmp_path_factory):
    """A folder with all figures that are from those runs, small, as `brx plot all` draws them."""
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brx.plot.style.DPI", 30)
        from_runs = {name: figure for name, figure in FIGURES.items() if not figure.draw_to}
        patch.setattr("brx.paper.publishing.FIGURES", from_runs)
        assert main(["plot", "all", "--runs", str(complete), "--out", str(folder)]) == 0
    return folder
