"""torch's generic optimizer tests, adapted: its cases for AdamW (they ship with torch), given to `BasisRotation`.

Each case runs twice: rotated, and as a group with `rotate=False`. torch's own parameters are vectors as well as
matrices; here they are matrices, or vectors where they are not rotated. `NOT_APPLICABLE` names the cases left out.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR

from brx.optim import BasisRotation

cases = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's own test cases need the package expecttest"
)

NOT_APPLICABLE = {
    "amsgrad": "there is no AMSGrad of a rotated second moment, whose basis changes",
    "foreach": "there is one implementation, by whole batches, and no option to choose another",
    "fused": "the same",
    "differentiable": "the same; a step is not differentiated",
    "capturable": "refreshes ask the device and cannot be captured in a CUDA graph",
    "betas must be either both floats or both Tensors": "numbers of either kind are taken as numbers",
}
MESSAGES = {"Invalid beta parameter at index 0: 1.0": "Invalid beta parameter at index 0"}
MESSAGES["Invalid weight_decay value: -1"] = "Invalid weight_decay=-1"


def applies(case):
    told = {*case.kwargs, case.desc}
    return not any(name in text for name in NOT_APPLICABLE for text in told)


INPUTS = [case for case in cases.optim_inputs_func_adamw("cpu") if applies(case)]
ERRORS = [e for e in cases.optim_error_inputs_func_adamw("cpu", torch.float32) if applies(e.optimizer_error_input)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

every_input = pytest.mark.parametrize("case", INPUTS, ids=lambda case: case.desc)
rotated_or_not = pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "not rotated"])


def matrices(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def optimizer_of(parameters, case, rotate, **options):
    return BasisRotation(parameters, **{**case.kwargs, "rotate": rotate, **options})


def test_enough_cases_apply():
    assert len(INPUTS) >= 4
    assert len(ERRORS) >= 8


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.optimizer_error_input.desc)
def test_errors(case):
    given = case.optimizer_error_input
    params = [Parameter(torch.randn(1, 1))] if given.params is None else given.params
    message = MESSAGES.get(case.error_regex, case.error_regex)
    if issubclass(case.error_type, Warning):
        with pytest.warns(case.error_type, match=message):
            BasisRotation(params, **given.kwargs)
    else:
        with pytest.raises(case.error_type, match=message):
            BasisRotation(params, **given.kwargs)


SCHEDULERS = [
    lambda optimizer: StepLR(optimizer, gamma=0.9, step_size=10),
    lambda optimizer: LinearLR(optimizer, start_factor=0.4, total_iters=4),
    lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=40),  # moves the betas, too
    ReduceLROnPlateau,
]


@rotated_or_not
@pytest.mark.parametrize(
    ("case", "scheduler"), [*((case, None) for case in INPUTS), *((INPUTS[0], scheduler) for scheduler in SCHEDULERS)]
)
def test_goes_in_the_right_direction(case, rotate, scheduler):
    weight, bias = matrices((10, 5), (10, 2))
    features = torch.randn(5, generator=torch.Generator().manual_seed(1))
    optimizer = optimizer_of([weight, bias], case, rotate)
    schedule = scheduler(optimizer) if scheduler else None

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(features) + bias[:, 0]).square().sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(40):
        loss = optimizer.step(closure)
        if isinstance(schedule, ReduceLROnPlateau):
            schedule.step(loss.detach())
        elif schedule:
            schedule.step()
    assert (closure().item() > first) == bool(case.kwargs.get("maximize"))


@rotated_or_not
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, DTYPES[0]) for case in INPUTS), *((INPUTS[0], dtype) for dtype in DTYPES[1:])]
)
def test_state_dict_continues_as_if_nothing_had_happened(case, rotate, dtype):
    parameters = matrices((4, 4), (3, 5), (2, 3, 3), dtype=dtype)
    optimizer = optimizer_of(parameters, case, rotate, frequency=4)
    for seed in range(13):
        give_gradients(parameters, seed)
        optimizer.step()
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), parameters), file)
    file.seek(0)
    saved, others = torch.load(file, weights_only=True)
    other = BasisRotation(others)
    other.load_state_dict(saved)
    twins, twin = copy.deepcopy((parameters, optimizer))
    pickled_parameters, pickled = pickle.loads(pickle.dumps((parameters, optimizer)))
    for seed in range(13, 18):
        for one, its in ((optimizer, parameters), (other, others), (twin, twins), (pickled, pickled_parameters)):
            give_gradients(its, seed)
            one.step()
    for parameter, *same in zip(parameters, others, twins, pickled_parameters, strict=True):
        assert all(torch.equal(parameter, one) for one in same)
    for state, loaded in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert state.keys() == loaded.keys()
        assert all(state[name].dtype == loaded[name].dtype for name in state)


@every_input
@rotated_or_not
def test_step_is_nothing_without_gradients(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert all(map(torch.equal, parameters, before))
    assert not optimizer.state_dict()["state"]
    give_gradients(parameters)
    optimizer.step()
    after, state = copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert all(map(torch.equal, parameters, after))
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@every_input
@rotated_or_not
def test_zero_gradients_only_decay(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate)
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    group = optimizer.param_groups[0]
    for parameter, value in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), value * (1 - float(group["lr"]) * group["weight_decay"]))


@every_input
@rotated_or_not
def test_gradients_are_left_as_they_are(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate, frequency=2)
    for seed in range(12):
        give_gradients(parameters, seed)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
        assert all(map(torch.equal, [parameter.grad for parameter in parameters], before))


@every_input
@rotated_or_not
def test_hooks_of_step_state_dict_and_loading(case, rotate):
    parameters = matrices((4, 4))
    optimizer, calls = optimizer_of(parameters, case, rotate), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    give_gradients(parameters)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved.pop("extra") == 1
    optimizer.load_state_dict(saved)
    assert calls == ["before", "after", "save", "loaded"]


@every_input
@rotated_or_not
def test_named_parameters(case, rotate):
    first, second = matrices((4, 4), (3, 5))
    optimizer = optimizer_of([("first", first), ("second", second)], case, rotate)
    give_gradients([first, second])
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["first", "second"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["first", "second"]


@rotated_or_not
def test_groups_have_their_own_rate_and_decay(rotate):
    fast, slow = matrices((4, 4), (4, 4))
    groups = [{"params": [fast], "lr": 0.1}, {"params": [slow], "lr": 0.0, "weight_decay": 0.9}]
    optimizer = BasisRotation(groups, rotate=rotate)
    before = fast.detach().clone(), slow.detach().clone()
    give_gradients([fast, slow])
    optimizer.step()
    assert not torch.equal(fast, before[0])
    assert torch.equal(slow, before[1])


@rotated_or_not
def test_tensor_rate_that_is_changed_in_place(rotate):
    as_tensor, as_float = matrices((4, 4)), matrices((4, 4))
    rate = torch.tensor(0.01)
    first = BasisRotation(as_tensor, lr=rate, rotate=rotate)
    second = BasisRotation(as_float, lr=0.01, rotate=rotate)
    for seed in range(3):
        rate.fill_(0.01 / (seed + 1))
        second.param_groups[0]["lr"] = rate.item()
        for optimizer, parameters in ((first, as_tensor), (second, as_float)):
            give_gradients(parameters, seed)
            optimizer.step()
    assert torch.equal(as_tensor[0], as_float[0])


@rotated_or_not
def test_step_saved_as_a_number_can_be_loaded(rotate):
    parameters = matrices((4, 4))
    optimizer = BasisRotation(parameters, rotate=rotate)
    give_gradients(parameters)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 1
    optimizer.load_state_dict(saved)
    give_gradients(parameters)
    optimizer.step()
    assert int(optimizer.state[parameters[0]]["step"]) == 2


@rotated_or_not
def test_dtypes_side_by_side(rotate):
    parameters = [matrices((4, 4), dtype=dtype)[0] for dtype in DTYPES]
    optimizer = BasisRotation(parameters, rotate=rotate, frequency=2)
    for seed in range(12):
        give_gradients(parameters, seed)
        optimizer.step()
    for parameter, dtype in zip(parameters, DTYPES, strict=True):
        assert parameter.dtype == dtype
        assert torch.isfinite(parameter).all()


@rotated_or_not
def test_scaled_gradients_and_a_scaler_that_skips(rotate):
    parameter = matrices((4, 4))[0]
    optimizer = BasisRotation([parameter], rotate=rotate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = parameter.detach().clone()
    scaler.scale((parameter * float("inf")).sum()).backward()
    scaler.step(optimizer)  # finds the infinity and leaves the step out
    scaler.update()
    assert torch.equal(parameter, before)
    optimizer.zero_grad()
    scaler.scale(parameter.square().sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(parameter, before)


def test_complex_parameters_are_refused():
    for rotate in (True, False):
        with pytest.raises(ValueError, match="real floating-point"):
            BasisRotation([Parameter(torch.zeros(2, 2, dtype=torch.complex64))], rotate=rotate)


def test_representation_lists_the_options():
    assert "frequency: 10" in repr(BasisRotation(matrices((4, 4))))
