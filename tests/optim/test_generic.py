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
    "betas must be either both floats or both "
    "Tensors": "numbers of either kind are taken as numbers",
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
    e
    for e in cases.optim_error_inputs_func_adamw("cpu", torch.float32)
    if applies(e.optimizer_error_input)
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
    is_warning = issubclass(case.error_type, Warning)
    with (pytest.warns if is_warning else pytest.raises)(
        case.error_type, match=MESSAGES.get(case.error_regex, case.error_regex)
    ):
        BasisRotation(params, **given.kwargs)


SAVED = [(case, DTYPES[0], {}) for case in INPUTS] + [
    (INPUTS[0], dtype, {}) for dtype in DTYPES[1:]
]
SAVED += [
    (INPUTS[0], DTYPES[0], {"source": "1st"}),
    (INPUTS[0], DTYPES[0], {"geometry": "unilateral"}),
]


@rotated_or_not
@pytest.mark.parametrize(("case", "dtype", "options"), SAVED)
@pytest.mark.parametrize("saved_after", [1, 13])
def test_state_dict_continues_as_if_nothing_had_happened(case, rotate, dtype, options, saved_after):
    parameters = matrices((4, 4), (3, 5), (2, 3, 3), dtype=dtype)
    optimizer = optimizer_of(parameters, case, rotate, frequency=4, **options)
    train(optimizer, parameters, 0, saved_after)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), parameters), file)
    file.seek(0)
    saved, others = torch.load(file, weights_only=True)
    other = BasisRotation(others)
    other.load_state_dict(saved)
    twins, twin = copy.deepcopy((parameters, optimizer))
    pickled_parameters, pickled = pickle.loads(pickle.dumps((parameters, optimizer)))
    for one, its in (
        (optimizer, parameters),
        (other, others),
        (twin, twins),
        (pickled, pickled_parameters),
    ):
        train(one, its, saved_after, saved_after + 5)
    for parameter, *same in zip(parameters, others, twins, pickled_parameters, strict=True):
        assert parameter.dtype == dtype
        assert all(torch.equal(parameter, one) for one in same)
    for own, loaded in zip(
        *(one.state_dict()["state"].values() for one in (optimizer, other)), strict=True
    ):
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        assert {
            own[name].dtype for name in own if name not in ("step", "num_failed_refreshes")
        } == {expected}
        assert {name: own[name].dtype for name in own} == {
            name: loaded[name].dtype for name in loaded
        }


@every_input
@rotated_or_not
def test_step_leaves_gradients_as_they_are_and_is_nothing_without(case, rotate):
    parameters = matrices((4, 4), (3, 5))
    optimizer = optimizer_of(parameters, case, rotate, frequency=2)
    optimizer.step()
    assert all(map(torch.equal, parameters, matrices((4, 4), (3, 5))))
    assert not optimizer.state_dict()["state"]
    for time in range(6):
        give_gradients(parameters, time)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
        assert all(map(torch.equal, [parameter.grad for parameter in parameters], before))
    after, state = copy.deepcopy(
        ([p.detach() for p in parameters], optimizer.state_dict()["state"])
    )
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert all(map(torch.equal, parameters, after))
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@rotated_or_not
def test_hooks_and_names_of_step_state_dict_and_loading(rotate):
    def with_other_rate(_, state_dict):
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.5
        changed["state"][0]["step"] = 3  # as a number
        return changed

    first, second = matrices((4, 4), (3, 5))
    optimizer, calls = BasisRotation([("first", first), ("second", second)], rotate=rotate), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(with_other_rate)
    optimizer.register_load_state_dict_post_hook(
        lambda one: calls.append(int(one.state[first]["step"]))
    )
    train(optimizer, [first, second], 0, 1)
    saved = optimizer.state_dict()
    assert saved.pop("extra") == 1
    optimizer.load_state_dict(saved)
    assert calls == ["before", "after", "save", 3]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [group["param_names"] for group in optimizer.param_groups] == [["first", "second"]]
    train(optimizer, [first, second], 1, 2)
    assert int(optimizer.state[first]["step"]) == 4


@rotated_or_not
def test_complex_parameters_are_refused(rotate):
    assert (len(INPUTS), len(ERRORS)) >= (4, 8)  # there are cases above
    with pytest.raises(ValueError, match="real floating-point"):
        BasisRotation([Parameter(torch.zeros(2, 2, dtype=torch.complex64))], rotate=rotate)
