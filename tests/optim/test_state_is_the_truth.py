"""`optimizer.state` and `param_groups` decide: what is replaced, cleared, swapped, changed or
loaded counts."""

import copy
from functools import partial

import pytest
import torch

from brx.optim import BasisRotation
from tests.optim.helpers import give_gradients, parameters, random, train


def weights_after(num_steps, interfere=lambda optimizer, time: None, **options):
    series = parameters(3, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, frequency=3, **options)
    for time in range(num_steps):
        interfere(optimizer, time)
        train(optimizer, series, time, time + 1)
    return [parameter.detach() for parameter in series], optimizer


def test_new_tensors_of_the_same_values_go_on_and_other_values_count():
    def offload(optimizer, time):
        for state in optimizer.state.values():
            state.update({name: tensor.clone() for name, tensor in state.items()})

    undisturbed = weights_after(13)[0]
    assert all(map(torch.equal, weights_after(13, offload)[0], undisturbed))

    def forget_momentum(optimizer, time, in_place=False):
        for state in optimizer.state.values() if time == 11 else ():
            state["exp_avg"] = (
                state["exp_avg"].zero_() if in_place else torch.zeros_like(state["exp_avg"])
            )

    in_place = partial(forget_momentum, in_place=True)
    replaced, written = (weights_after(13, change)[0] for change in (forget_momentum, in_place))
    assert all(map(torch.equal, replaced, written))
    assert not torch.equal(replaced[0], undisturbed[0])

    def set_step(optimizer, time):
        for state in optimizer.state.values() if time == 4 else ():
            state["step"].fill_(8)  # the next update is the ninth, and 3 divides 9

    before, after = (
        next(iter(weights_after(*of)[1].state.values())) for of in ((4,), (5, set_step))
    )
    assert int(after["step"]) == 9
    assert not torch.equal(after["left_basis"], before["left_basis"])


def test_cleared_state_starts_anew():
    cleared, optimizer = weights_after(
        6, lambda optimizer, time: time == 4 and optimizer.state.clear()
    )
    series = [torch.nn.Parameter(weight.clone()) for weight in weights_after(4)[0]]
    train(BasisRotation(series, lr=0.01, frequency=3), series, 4, 6)
    assert all(map(torch.equal, cleared, series))
    assert int(optimizer.state_dict()["state"][0]["step"]) == 2


@pytest.mark.parametrize(
    "change", [{"betas": (0.5, 0.9)}, {"eps": 0.1}, {"maximize": True}, {"lr": 0.3}]
)
def test_option_changed_in_one_of_two_groups_changes_that_group_alone(change):
    one, other = parameters(2, 6, 4)
    together = BasisRotation([{"params": [one]}, {"params": [other]}], lr=0.01)
    alone = parameters(2, 6, 4)
    separate = [BasisRotation([parameter], lr=0.01) for parameter in alone]
    for time in range(14):
        if time == 11:
            together.param_groups[1].update(change)
            separate[1].param_groups[0].update(change)
        train(together, [one, other], time, time + 1)
        give_gradients(alone, time)
        for optimizer in separate:
            optimizer.step()
    torch.testing.assert_close(alone, [one, other], rtol=0, atol=1e-7)


def test_numbers_as_tensors_changed_in_place_and_betas_as_a_list():
    as_tensors, as_numbers = (parameters(2, 6, 4) for _ in range(2))
    rate = torch.tensor(0.02)
    groups = [
        {"params": as_tensors[:1], "lr": rate},
        {"params": as_tensors[1:], "lr": 0.01, "rotate": False},
    ]
    first = BasisRotation(groups, betas=[0.8, 0.9], weight_decay=torch.tensor(0.5))
    groups = [
        {"params": as_numbers[:1], "lr": 0.02},
        {"params": as_numbers[1:], "lr": 0.01, "rotate": False},
    ]
    second = BasisRotation(groups, betas=(0.8, 0.9), weight_decay=0.5)
    for time in range(3):
        second.param_groups[0]["lr"] = rate.fill_(0.02 / (time + 1)).item()
        train(first, as_tensors, time, time + 1)
        train(second, as_numbers, time, time + 1)
    torch.testing.assert_close(as_tensors, as_numbers, rtol=0, atol=1e-7)


def test_parameters_that_join_and_leave_do_not_touch_the_others():
    (trained, frozen), (alone, _) = (parameters(2, 6, 4) for _ in range(2))
    optimizer, single = BasisRotation([trained, frozen]), BasisRotation([alone])
    train(optimizer, [trained], 0, 5)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, [trained], 5, 11)
    assert set(optimizer.state) == {trained}  # a frozen one has none
    train(optimizer, [trained, frozen], 11, 14)
    new = torch.nn.Parameter(random(6, 4, seed=9))
    optimizer.param_groups[0]["params"][1] = new
    assert [
        row.num_state for row in BasisRotation([trained, frozen.requires_grad_(False)]).summary()
    ] == [152, 0]
    frozen.requires_grad_()
    BasisRotation(
        [trained, torch.nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), False)]
    )  # quantized and frozen
    before = frozen.detach().clone(), new.detach().clone()
    train(optimizer, [trained, new], 14, 15)
    assert torch.equal(frozen, before[0])
    assert not torch.equal(new, before[1])
    assert [int(optimizer.state[p]["step"]) for p in (trained, frozen, new)] == [15, 3, 1]
    # Nor does what is left of the old one keep the memory of the batch that it was in.
    assert optimizer.state[frozen]["exp_avg"].untyped_storage().nbytes() == frozen.nbytes
    train(single, [alone], 0, 15)
    torch.testing.assert_close(trained, alone, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "state", "told"),
    [
        ({"frequency": 0}, {}, "frequency"),
        ({"geometry": "both"}, {}, "geometry"),
        ({"betas": (0.9, 1.0)}, {}, "betas"),
        (
            {"geometry": "unilateral"},
            {},
            r"parameter 0 of group 0 .*the state has .*geometry='unilateral'",
        ),
        ({}, {"exp_avg": torch.zeros(4)}, r"exp_avg \(4,\)"),
    ],
)
def test_what_does_not_fit_on_the_way_is_told_and_nothing_moves(options, state, told):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series)
    train(optimizer, series, 0, 1)
    optimizer.param_groups[0].update(options)
    optimizer.state[series[0]].update(state)
    before = copy.deepcopy(([p.detach() for p in series], optimizer.state_dict()["state"]))
    with pytest.raises(ValueError, match=told):
        train(optimizer, series, 1, 2)
    torch.testing.assert_close(
        ([p.detach() for p in series], optimizer.state_dict()["state"]), before, rtol=0, atol=0
    )


def trained(num_steps=3, **options):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, **options)
    train(optimizer, series, 0, num_steps)
    return series, optimizer


def test_options_that_a_checkpoint_lacks_take_their_defaults():
    series, optimizer = trained()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        names = ("maximize", "rotate", "max_dim", "flatten")
        for name in (*names, "rotation_precision", "covariance_precision"):
            del group[name]
    other, kept = (
        BasisRotation(series, rotation_precision="bf16"),
        saved["state"][0]["exp_avg"].clone(),
    )
    other.load_state_dict(saved)
    assert other.param_groups[0]["rotation_precision"] == "bf16"  # of the constructor
    assert other.param_groups[0]["max_dim"] == 16_384
    train(other, series, 3, 4)
    assert torch.equal(saved["state"][0]["exp_avg"], kept)  # what is loaded is a copy


def test_load_that_fails_says_why_and_changes_nothing():
    series, optimizer = trained(geometry="unilateral")
    adamw = torch.optim.AdamW(series)
    adamw.step()
    bad_option = trained(geometry="unilateral")[1].state_dict()
    bad_option["param_groups"][0]["frequency"] = 0
    two_groups = BasisRotation([{"params": [p]} for p in parameters(2, 6, 4)]).state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    for saved, told in (
        (adamw.state_dict(), r"exp_avg \(6, 4\), .*need exp_avg"),
        (two_groups, r"\[1, 1\] parameters"),
        (bad_option, "frequency=0"),
    ):
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(saved)
        torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
        assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    train(optimizer, series, 3, 4)


def test_saved_state_copies_the_bases_alone_and_can_be_written_as_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    series, optimizer = trained()
    saved = optimizer.state_dict()
    for number, parameter in enumerate(series):
        for name, tensor in saved["state"][number].items():
            kept = optimizer.state[parameter][name]
            assert tensor is kept or (name.endswith("_basis") and torch.equal(tensor, kept))
    flat = {
        f"{number}.{name}": value
        for number, own in saved["state"].items()
        for name, value in own.items()
    }
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    read = safetensors.load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(read[key], value) for key, value in flat.items())
