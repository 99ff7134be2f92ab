"""torch's generic optimizer tests, adapted: its cases for AdamW (they ship with torch), given to
`BasisRotation`. Each case runs twice: rotated, and as a group with `rotate=False`. `NOT_APPLICABLE`
names the cases left out."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter

from brx.optim import BasisRotation
from tests.optim.helpers import give_gradients, random, train

cases = pytest.importorskip(
    "torch.testing._internal.common_optimizers",
    reason="torch's own test cases need the package expecttest",
)

NOT_APPLICABLE = {
    "amsgrad": "there is no AMSGrad of a rotated second moment, whose basis changes",
    "foreach": "there is one implementation, by whole batches, and no option to choose another",
    "fused": "the same",
    "differentiable": "the same; a step is not differentiated",
    "capturable": "refreshes ask the device and cannot be captured in a CUDA graph",
    "betas must be either both floats or both Tensors": "either kind is taken as a number",
}
MESSAGES = {
    "Tensor lr must be 1-element": "Invalid lr=tensor",
    "Invalid beta parameter at index 0: 1.0": "Invalid betas=",
    "Invalid weight_decay value: -1": "Invalid weight_decay=-1",
}


def applies(case):
    return not any(name in text for name in NOT_APPLICABLE for text in {*case.kwargs, case.desc})


INPUTS = [case for case in cases.optim_inputs_func_adamw("cpu") if applies(case)]
ERRORS = [
    error
    for error in cases.optim_error_inputs_func_adamw("cpu", torch.float32)
    if applies(error.optimizer_error_input)
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
every_input = pytest.mark.parametrize("case", INPUTS, ids=lambda case: case.desc)
rotated_or_not = pytest.mark.parametrize("rotate", [True, False], ids=["rotated", "not rotated"])


def matrices(*shapes, dtype=torch.float32):
    return [Parameter(random(*shape, seed=k, dtype=dtype)) for k, shape in enumerate(shapes)]


def optimizer_of(parameters, case, rotate, **options):
    return BasisRotation(parameters, **{**case.kwargs, "rotate": rotate, **options})


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.optimizer_error_input.desc)
def test_errors(case):
    given = case.optimizer_error_input
    params = [Parameter(torch.randn(1, 1))] if given.params is None else given.params
    expect = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
    with expect(case.error_type, match=MESSAGES.get(case.error_regex, case.error_regex)):
        BasisRotation(params, **given.kwargs)


SAVED = [
    *((case, torch.float32, {}) for case in INPUTS),
    *((INPUTS[0], dtype, {}) for dtype in DTYPES[1:]),
    (INPUTS[0], torch.float32, {"source": "1st"}),
    (INPUTS[0], torch.float32, {"geometry": "unilateral"}),
]


def read_back(content):
    """What torch loads of what it saved."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def dtypes_of(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [{name: value.dtype for name, value in state.items()} for state in states]


@rotated_or_not
@pytest.mark.parametrize(("case", "dtype", "options"), SAVED)
@pytest.mark.parametrize("saved_after", [1, 13])
def test_copies_continue_as_the_original_does(case, rotate, dtype, options, saved_after):
    parameters = matrices((4, 4), (3, 5), (2, 3, 3), dtype=dtype)
    optimizer = optimizer_of(parameters, case, rotate, frequency=4, **options)
    train(optimizer, parameters, 0, saved_after)
    saved, loaded = read_back((optimizer.state_dict(), parameters))
    resumed = BasisRotation(loaded)
    resumed.load_state_dict(saved)
    copies = [
        (loaded, resumed),
        copy.deepcopy((parameters, optimizer)),
        pickle.loads(pickle.dumps((parameters, optimizer))),
    ]
    train(optimizer, parameters, saved_after, saved_after + 5)
    for series, its in copies:
        train(its, series, saved_after, saved_after + 5)
        assert [parameter.dtype for parameter in series] == [dtype] * 3
        assert all(map(torch.equal, series, parameters))
        assert dtypes_of(its) == dtypes_of(optimizer)


@rotated_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_have_the_dtype_of_the_arithmetic(dtype, rotate):
    parameters = matrices((4, 4), (3, 5), dtype=dtype)
    optimizer = BasisRotation(parameters, rotate=rotate)
    train(optimizer, parameters, 0, 3)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for dtypes in dtypes_of(optimizer):
        dtypes.pop("step")
        dtypes.pop("num_failed_refreshes", None)
        assert set(dtypes.values()) == {expected}


@every_input
@rotated_or_not
def test_step_leaves_gradients_as_they_are(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate, frequency=2)
    for time in range(6):
        give_gradients(parameters, time)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
        assert all(map(torch.equal, [parameter.grad for parameter in parameters], before))


@every_input
@rotated_or_not
def test_first_step_without_gradients_does_nothing(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate)
    optimizer.step()
    assert all(map(torch.equal, parameters, matrices((4, 4), (3, 5))))
    assert not optimizer.state_dict()["state"]


@every_input
@rotated_or_not
def test_later_step_without_gradients_does_nothing(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate, frequency=2)
    train(optimizer, parameters, 0, 6)
    before = copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    after = [p.detach() for p in parameters], optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@rotated_or_not
def test_steps_in_inference_mode_are_ordinary_ones(rotate):
    parameters, expected = matrices((4, 4), (3, 5)), matrices((4, 4), (3, 5))
    optimizer = BasisRotation(parameters, rotate=rotate, frequency=3)
    for time in range(8):
        with torch.inference_mode(time % 2 == 0):
            train(optimizer, parameters, time, time + 1)
    train(BasisRotation(expected, rotate=rotate, frequency=3), expected, 0, 8)
    assert all(map(torch.equal, parameters, expected))


@rotated_or_not
def test_parameters_without_numbers_are_refused(rotate):
    parameter = Parameter(torch.zeros(3, 5, device="meta"))
    optimizer = BasisRotation([parameter], rotate=rotate)
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ValueError, match="on the meta device: a step needs numbers"):
        optimizer.step()


def expanded():
    return Parameter(torch.zeros(1, 5).expand(3, 5))


def made_in_inference_mode():
    with torch.inference_mode():
        return Parameter(torch.zeros(3, 5))


def of_one_byte():
    return Parameter(torch.zeros(3, 5).to(torch.float8_e4m3fn))


@rotated_or_not
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (expanded, "its elements share memory"),
        (made_in_inference_mode, "made in inference mode"),
        (of_one_byte, "float8_e4m3fn: BasisRotation takes parameters of real numbers with 16 bits"),
    ],
)
def test_parameters_that_no_step_can_write_are_refused(make, told, rotate):
    with pytest.raises(ValueError, match=told):
        BasisRotation([make()], rotate=rotate)
    BasisRotation([make().requires_grad_(False)], rotate=rotate)


@pytest.fixture
def calls():
    return []


@pytest.fixture(params=[True, False], ids=["rotated", "not rotated"])
def named(request):
    """Two parameters with names, and their optimizer."""
    series = matrices((4, 4), (3, 5))
    names = ["first", "second"]
    return series, BasisRotation(zip(names, series, strict=True), rotate=request.param)


def test_hooks_of_a_step_are_called(named, calls):
    series, optimizer = named
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, series, 0, 1)
    assert calls == ["before", "after"]


def test_hooks_of_saving_are_called(named, calls):
    series, optimizer = named
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    train(optimizer, series, 0, 1)
    assert optimizer.state_dict()["extra"] == 1
    assert calls == ["save"]


def test_hooks_of_loading_are_called(named, calls):
    def with_other_rate(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.5
        changed["state"][0]["step"] = 3  # as a number
        return changed

    series, optimizer = named
    train(optimizer, series, 0, 1)
    optimizer.register_load_state_dict_pre_hook(with_other_rate)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: calls.append(int(loaded.state[series[0]]["step"]))
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [3]
    assert optimizer.param_groups[0]["lr"] == 0.5
    train(optimizer, series, 1, 2)
    assert int(optimizer.state[series[0]]["step"]) == 4


def test_names_outlast_a_load(named):
    series, optimizer = named
    train(optimizer, series, 0, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["param_names"] for group in optimizer.param_groups] == [["first", "second"]]


def test_torch_ships_its_cases():
    assert (len(INPUTS), len(ERRORS)) >= (4, 8)


@rotated_or_not
def test_tensors_around_tensors_are_refused(rotate):
    kind = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    weight = Parameter(kind(torch.zeros(2, 2), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="plain tensors and DTensors, but this is a TwoTensor"):
        BasisRotation([weight], rotate=rotate)
    BasisRotation([weight.requires_grad_(False)], rotate=rotate)  # frozen ones are left alone


@rotated_or_not
def test_complex_parameters_are_refused(rotate):
    with pytest.raises(ValueError, match="of real numbers"):
        BasisRotation([Parameter(torch.zeros(2, 2, dtype=torch.complex64))], rotate=rotate)
