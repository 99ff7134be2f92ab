"""Every method against its library optimizer in a plain loop; what a method refuses, in one
line."""

import math
import re
import sys
from inspect import getsource
from pathlib import Path
from typing import get_args

import pytest
import torch

from brx.config.schema import CustomConfig, OptimizerConfig, TrainingConfig
from brx.errors import RunError, UserError
from brx.methods.bf16_products import fast_bf16_products
from brx.methods.table import CUSTOM, METHODS, find_method
from brx.methods.updater import MethodUpdater, lr_factor
from brx.model.stage import whole_model
from brx.plot.style import METHOD_LOOKS
from tests.methods.test_custom import updater_with_gradients
from tests.pipeline.test_engine import (
    library_optimizers,
    make_config,
    make_versions,
    micro_batch,
    run_engine,
)

pytestmark = pytest.mark.usefixtures("own_code")
BUILT_IN = [name for name in METHODS if name != CUSTOM]
MOE = ["model.moe.experts=4", "model.moe.every=2"]


@pytest.mark.parametrize(
    ("update", "factor"),
    # 2.7 iterations of warm-up are three; the cosine ends at the floor.
    [(1, 1 / 3), (3, 1.0), (4, 0.1 + 0.45 * (1 + math.cos(math.pi / 222))), (225, 0.1)],
)
def test_learning_rate_at_the_ends_of_its_schedule(update, factor):
    training = TrainingConfig(iterations=225, warmup_fraction=0.012, final_lr_fraction=0.1)
    assert lr_factor(update, training) == pytest.approx(factor)


@pytest.mark.numerics
@pytest.mark.parametrize("extra", [[], MOE], ids=["dense", "mixture"])
@pytest.mark.parametrize("method", ["soap", "muon", "scion"])
def test_baseline_is_the_librarys_optimizer(method, extra):
    # P = 1, constant learning rate, no clipping: nothing but the optimizer is left.
    constant = [
        "training.final_lr_fraction=1.0",
        "training.warmup_fraction=0.0",
        "training.clip=1e9",
    ]
    rest_lr = 0.003 if method == "muon" else 0.001
    rates = ["optimizer.lr=0.001", *(["optimizer.rest_lr=0.003"] if method == "muon" else [])]
    config = make_config(method, 1, "exact", 24, *rates, *constant, *extra)
    _, versions = run_engine(config, 24)
    model = whole_model(config.model, config.data.vocabulary_size, seed=0)
    optimizers, members = library_optimizers(method, dict(model.named_parameters()), 0.001, rest_lr)
    for t in range(1, 25):
        _, loss, auxiliary = model(*micro_batch(t))
        (loss if auxiliary is None else loss + auxiliary).backward()
        for view, stack, place in members:
            view.grad = stack.grad[place]
        with fast_bf16_products(model.parameters()):  # rounded like brx's
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    assert bool(members) == bool(extra)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, versions[0].newest[name]), name


@pytest.mark.parametrize("method", ["soap", "scion"])
def test_missing_package_is_named(method, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    config = make_config(method, 2, "exact")
    with pytest.raises(UserError, match="package pytorch-optimizer: pip install pytorch-optimizer"):
        MethodUpdater(config, make_versions(config))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("no.such:Class", "optimizer.method no.such:Class: no.such cannot be imported: No module"),
        (
            "torch.optim:Adamm",
            "Adamm is no Method and no torch.optim.Optimizer of torch.optim, did you mean 'Adam'?",
        ),
        ("json:dumps", "dumps is no Method and no torch.optim.Optimizer of json (there: none)"),
        ("torch.optim:LBFGS", "torch.optim:LBFGS: its step needs a closure"),
        (
            "torch.optim:SGD, arguments: {momentun: 0.9}",
            "takes no argument 'momentun' (known: momentum, dampening,",
        ),
        (
            "torch.optim:SGD, arguments: {momentum: -1.0}",
            "SGD refuses them: Invalid momentum value: -1.0",
        ),
        ("torch.optim:SGD, arguments: {lr: 1}", "arguments must not hold lr: set optimizer.lr"),
        ("torch.optim:Muon", "torch.optim:Muon: its constructor: Muon only supports 2D parameters"),
    ],
)
def test_wrong_custom_optimizer_is_one_line(optimizer, message):
    with pytest.raises(UserError, match=rf"\A.*{re.escape(message)}.*\Z"):
        updater_with_gradients(
            make_config("pipedream", 2, "exact", 24, f"optimizer={{method: {optimizer}}}"), 0.0
        )


def test_refused_gradient_ends_the_run_in_one_line():
    _, updater = updater_with_gradients(make_config("basis-rotation", 2, "exact"), float("nan"))
    with pytest.raises(
        RunError,
        match=r"iteration 7: parameter blocks\.0\.attention\.query\.weight of shape .* NaN",
    ):
        updater.step(7)


@pytest.fixture(scope="module")
def documented():
    """The rows of the table in docs/methods.md, by method."""
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    table = page.partition("\n## ")[0]  # up to the first heading
    rows = {}
    for row in table.splitlines():
        if name := re.match(r"\| `(.+?)` \|", row):
            rows[name[1]] = row
    return rows


def test_documentation_lists_the_methods(documented):
    assert list(documented) == list(METHODS)


def named_in(sentence):
    """The methods that a sentence of the page lists."""
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    return set(re.findall(r"`([\w-]+)`", re.search(sentence, page)[1]))


def test_page_names_the_methods_with_a_rate_for_the_rest():
    with_rate = {name for name in BUILT_IN if "rest_lr" in METHODS[name].section.model_fields}
    assert named_in(r"With (.+), the rest can have its own learning rate") == with_rate


def test_page_names_the_methods_that_need_a_package():
    needing = {name for name in BUILT_IN if "_pytorch_optimizer(" in getsource(type(METHODS[name]))}
    assert named_in(r"\n(.+) need the extra `baselines`") == needing


@pytest.mark.parametrize("name", METHODS)
def test_documentation_names_the_methods_optimizers(name, documented):
    for optimizer in METHODS[name].gets:
        assert re.sub(r"SCION, |the class", "", optimizer).lower() in documented[name].lower()


def test_every_section_of_a_method_has_its_method():
    union, _ = get_args(OptimizerConfig)  # the other is the discriminator
    sections = {}
    for tagged in get_args(union):
        section, tag = get_args(tagged)
        if section is not CustomConfig:
            sections[tag.tag] = section
    assert sections == {name: METHODS[name].section for name in BUILT_IN}


@pytest.mark.parametrize("name", BUILT_IN)
def test_method_has_a_look_of_its_own(name):
    assert name in METHOD_LOOKS


@pytest.mark.parametrize("name", METHODS)
def test_method_is_found_by_its_name(name):
    config = make_config("torch.optim:SGD" if ":" in name else name, 1, "exact")
    assert type(find_method(config)) is type(METHODS[name])
    assert isinstance(config.optimizer, METHODS[name].section)


@pytest.mark.parametrize("name", METHODS)
def test_method_explains_itself(name):
    method = METHODS[name]
    assert all([method.summary, method.source, method.equation, method.gets, method.why])


OPTIONS = {
    "pipedream": "beta1=0.5 beta2=0.5 eps=1e-3 weight_decay=1.0",
    "pipedream-lr": "annealing_fraction=1.0",
    "nesterov": "momentum_decay=0.1 beta1=0.9",
    "delay-compensation": "compensation=0.1",
    "soap": "frequency=2 beta1=0.5 eps=1e-3 rest_lr=0.01",
    "muon": "momentum=0.5 adjust_lr=original weight_decay=1.0 rest_lr=0.01",
    "scion": "momentum=0.5 scale=10.0 rest_scale=100.0 vector_scale=5.0 constrained=false",
    "lion": "lion_betas=[0.5,0.99] lion_betas=[0.9,0.5] beta1=0.5 weight_decay=1.0 rest_lr=0.01",
    "adan": "betas=[0.5,0.92,0.99] betas=[0.98,0.5,0.99] betas=[0.98,0.92,0.5] eps=1e-3 "
    "weight_decay=1.0",
    "basis-rotation": "beta1=0.5 beta2=0.5 eps=1e-3 weight_decay=1.0 rest_lr=0.01 source=1st "
    "geometry=bilateral "
    "first_refresh=3 "
    "frequency=3 covariance=refresh covariance=interval refresh_schedule=stage-aware "
    "refresh_schedule=reversed "
    # make_config has unilateral
    "rotation_precision=tf32 rotation_precision=bf16 covariance_precision=tf32 staggered=true "
    "as_published=true",
}


OF_ADAMW = {"beta1", "beta2", "eps", "weight_decay"}
"""Settings that many methods share. `pipedream` has them all in `OPTIONS`."""


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_option_of_a_method_is_tried(method):
    tried = {option.partition("=")[0] for option in OPTIONS[method].split()}
    shared = {"method", "lr"} | (set() if method == "pipedream" else OF_ADAMW)
    assert METHODS[method].section.model_fields.keys() - shared <= tried


@pytest.mark.parametrize(
    ("method", "option"), [(m, option) for m in OPTIONS for option in OPTIONS[m].split()]
)
def test_every_option_changes_the_run(method, option):
    common = [
        "optimizer.lr=0.001",
        *(["optimizer.frequency=2"] if method == "basis-rotation" else []),
    ]
    stages = 4 if "refresh_schedule" in option else 3
    weights = []
    for overrides in ([], [f"optimizer.{option}"]):
        _, versions = run_engine(make_config(method, stages, "exact", 24, *common, *overrides), 6)
        weights.append(
            torch.cat([w.detach().flatten() for stage in versions for w in stage.newest.values()])
        )
    assert not torch.equal(*weights)
