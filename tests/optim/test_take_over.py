"""A training that goes on from another optimizer's state."""

import pytest
import torch

from brx.optim import BasisRotation, param_groups
from tests.optim.helpers import random
from tests.optim.test_param_groups import assert_equal, go, two_models


@pytest.fixture
def after_adamw():
    """A model after 20 updates of AdamW and 4 of the optimizer that took over, with that; and a
    model after 24 updates of AdamW."""
    model, other = two_models()
    adamw, twin = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, other))
    go(model, adamw, 0, 20)
    go(other, twin, 0, 24)
    optimizer = BasisRotation(param_groups(model), lr=0.01, frequency=10, first_refresh=5)
    optimizer.take_over(adamw)
    go(model, optimizer, 20, 24)
    return model, optimizer, other


def test_adamw_is_continued(after_adamw):
    model, _, other = after_adamw
    assert_equal(model, other, rtol=0, atol=1e-6)


def test_loading_its_state_names_take_over():
    model, other = two_models()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    go(model, adamw, 0, 1)
    optimizer = BasisRotation(other, lr=0.01)
    with pytest.raises(ValueError, match=r"load its state into AdamW, and call take_over\(it\)$"):
        optimizer.load_state_dict(adamw.state_dict())


def test_default_device_of_the_program_does_not_matter():
    model, _ = two_models()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    go(model, adamw, 0, 3)
    optimizer = BasisRotation(param_groups(model), lr=0.01)
    with torch.device("meta"):
        optimizer.take_over(adamw)
    go(model, optimizer, 3, 12)
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_first_basis_counts_from_the_take_over(after_adamw):
    model, optimizer, _ = after_adamw
    go(model, optimizer, 24, 25)  # the fifth update since then
    state = optimizer.state[model[0].weight]
    U, L = state["left_basis"], state["left_covariance"]
    torch.testing.assert_close(U.T @ U, torch.eye(5), rtol=0, atol=1e-5)
    rotated = U.T @ L @ U
    bound = 1e-6 * float(rotated.max())
    torch.testing.assert_close(rotated, rotated.diag().diag(), rtol=0, atol=bound)


@pytest.mark.filterwarnings("ignore:4 parameters")
def test_most_updates_of_a_group_count():
    model, _ = two_models()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    go(model, adamw, 0, 20)
    adamw.state[model[2].weight]["step"] -= 10
    optimizer = BasisRotation(model.named_parameters(), first_refresh=5)
    with pytest.warns(UserWarning, match="matrices with 10, 20 updates in one group"):
        optimizer.take_over(adamw)
    assert [group["first_refresh"] for group in optimizer.param_groups] == [25]


def test_soap_is_continued_in_its_bases():
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    options = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-12}
    model, other = two_models()
    first, twin = (
        soap(one.parameters(), precondition_frequency=100, **options) for one in (model, other)
    )
    go(model, first, 0, 15)
    go(other, twin, 0, 18)
    optimizer = BasisRotation(param_groups(model, rotate=["2.weight"]), frequency=None, **options)
    optimizer.take_over(first)
    go(model, optimizer, 15, 18)
    assert_equal(model, other, rtol=0, atol=1e-5)


def test_optimizer_without_state_is_refused():
    model, _ = two_models()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="SGD has no state"):
        BasisRotation(param_groups(model)).take_over(sgd)


def test_unknown_optimizer_is_refused():
    model, _ = two_models()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    go(model, sgd, 0, 1)
    optimizer = BasisRotation(param_groups(model))
    told = r"0.weight of shape \(5, 6\): the state of torch.optim.SGD is not known"
    with pytest.raises(ValueError, match=told):
        optimizer.take_over(sgd)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"geometry": "unilateral"}, "bases of left, right are no state of left"),
        ({"as_published": True}, "as_published starts in its own way"),
    ],
)
def test_bases_that_do_not_fit_are_refused(options, told):
    model, _ = two_models()
    soap = pytest.importorskip("pytorch_optimizer").SOAP(model.parameters(), lr=0.1)
    go(model, soap, 0, 2)
    with pytest.raises(ValueError, match=told):
        BasisRotation(param_groups(model), **options).take_over(soap)


def test_bases_of_a_stack_of_matrices_are_refused():
    # SOAP has a basis for each of the three dimensions.
    stack = torch.nn.Parameter(torch.ones(3, 3, 3))
    soap = pytest.importorskip("pytorch_optimizer").SOAP([stack], lr=0.1)
    for time in range(2):
        stack.grad = random(3, 3, 3, seed=time)
        soap.step()
    with pytest.raises(ValueError, match="bases of left, right are no state of"):
        BasisRotation([stack]).take_over(soap)


def counts_after(make, dtype):
    model, _ = two_models()
    previous = make(model.parameters())
    go(model, previous, 0, 301)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        optimizer = BasisRotation(param_groups(model))
        optimizer.take_over(previous)
    finally:
        torch.set_default_dtype(before)
    return {int(state["step"]) for state in optimizer.state.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_counted_exactly(dtype):
    assert counts_after(torch.optim.AdamW, dtype) == {301}


def test_debiased_averages_become_moments():
    library = pytest.importorskip("pytorch_optimizer")
    assert counts_after(library.StableAdamW, torch.float32) == {301}
    moments = []
    for kind in (library.StableAdamW, torch.optim.AdamW):
        model, _ = two_models()
        previous = kind(model.parameters(), lr=0.0, betas=(0.9, 0.999))
        for time in range(20):
            for parameter in model.parameters():
                parameter.grad = random(*parameter.shape, seed=time)
            previous.step()
        optimizer = BasisRotation(param_groups(model))
        optimizer.take_over(previous)
        state = optimizer.state[model[0].weight]
        moments.append((state["step"], state["exp_avg"], state["exp_avg_sq"]))
    torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-7)


def test_amsgrad_is_refused():
    model, _ = two_models()
    adamw = torch.optim.AdamW(model.parameters(), amsgrad=True)
    go(model, adamw, 0, 1)
    with pytest.raises(ValueError, match="AMSGrad"):
        BasisRotation(param_groups(model)).take_over(adamw)


def test_amsgrad_of_one_group_is_refused():
    model, _ = two_models()
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "amsgrad": True},
    ]
    adamw = torch.optim.AdamW(groups)
    go(model, adamw, 0, 1)
    with pytest.raises(ValueError, match=r"parameter 2\..*AMSGrad"):
        BasisRotation(param_groups(model)).take_over(adamw)


def test_momentum_of_the_other_sign_is_refused():
    model, _ = two_models()
    adamw = torch.optim.AdamW(model.parameters(), maximize=True)
    go(model, adamw, 0, 1)
    with pytest.raises(ValueError, match="only one of the two optimizers maximizes"):
        BasisRotation(param_groups(model)).take_over(adamw)


def test_subclass_of_a_known_optimizer_is_refused():
    model, _ = two_models()
    own = type("MyAdamW", (torch.optim.AdamW,), {})(model.parameters())
    go(model, own, 0, 1)
    with pytest.raises(ValueError, match="MyAdamW is not known here"):
        BasisRotation(param_groups(model)).take_over(own)


def test_state_dict_in_place_of_an_optimizer_is_refused():
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    saved = torch.optim.AdamW([parameter]).state_dict()
    with pytest.raises(ValueError, match="of type dict: must be an optimizer, into which a saved"):
        BasisRotation([parameter]).take_over(saved)
