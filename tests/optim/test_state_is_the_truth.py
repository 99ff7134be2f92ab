"""`optimizer.state` and `param_groups` decide: what is replaced, cleared, swapped, changed or
loaded counts."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from brx.optim import BasisRotation
from tests.optim.helpers import give_gradients, parameters, random, train


def weights_after(num_steps, interfere=lambda optimizer, time: None, **options):
    series = parameters(3, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, frequency=3, **options)
    for time in range(num_steps):
        interfere(optimizer, time)
        train(optimizer, series, time, time + 1)
    return [parameter.detach() for parameter in series], optimizer


def clone_states(optimizer, time):
    """As offloading does between steps."""
    for state in optimizer.state.values():
        state.update({name: tensor.clone() for name, tensor in state.items()})


def replace_momentum(optimizer, time):
    for state in optimizer.state.values():
        if time == 11:
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def zero_momentum_in_place(optimizer, time):
    for state in optimizer.state.values():
        if time == 11:
            state["exp_avg"].zero_()


def set_count_to_8(optimizer, time):
    for state in optimizer.state.values():
        if time == 4:
            state["step"].fill_(8)


def test_cloned_states_change_nothing():
    assert all(map(torch.equal, weights_after(13, clone_states)[0], weights_after(13)[0]))


def test_replaced_state_counts_as_a_written_one():
    replaced, _ = weights_after(13, replace_momentum)
    written, _ = weights_after(13, zero_momentum_in_place)
    assert all(map(torch.equal, replaced, written))


def test_replaced_momentum_changes_the_steps():
    assert not torch.equal(weights_after(13, replace_momentum)[0][0], weights_after(13)[0][0])


def test_written_count_decides_the_next_refresh():
    _, before = weights_after(4)
    _, after = weights_after(5, set_count_to_8)  # the next update is the ninth, and 3 divides 9
    old, new = (next(iter(optimizer.state.values())) for optimizer in (before, after))
    assert int(new["step"]) == 9
    assert not torch.equal(new["left_basis"], old["left_basis"])


def test_cleared_state_starts_anew():
    def clear(optimizer, time):
        if time == 4:
            optimizer.state.clear()

    cleared, optimizer = weights_after(6, clear)
    series = [torch.nn.Parameter(weight.clone()) for weight in weights_after(4)[0]]
    train(BasisRotation(series, lr=0.01, frequency=3), series, 4, 6)
    assert all(map(torch.equal, cleared, series))
    assert int(optimizer.state_dict()["state"][0]["step"]) == 2


@pytest.mark.parametrize(
    "change", [{"betas": (0.5, 0.9)}, {"eps": 0.1}, {"maximize": True}, {"lr": 0.3}]
)
def test_changed_option_concerns_its_group_alone(change):
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


def two_groups(series, rate, **options):
    """One group with the rate, and one that is not rotated."""
    rotated = {"params": series[:1], "lr": rate}
    plain = {"params": series[1:], "lr": 0.01, "rotate": False}
    return BasisRotation([rotated, plain], **options)


def test_tensors_written_in_place_count_as_numbers():
    as_tensors, as_numbers = parameters(2, 6, 4), parameters(2, 6, 4)
    rate = torch.tensor(0.02)
    first = two_groups(as_tensors, rate, betas=[0.8, 0.9], weight_decay=torch.tensor(0.5))
    second = two_groups(as_numbers, 0.02, betas=(0.8, 0.9), weight_decay=0.5)
    for time in range(3):
        second.param_groups[0]["lr"] = rate.fill_(0.02 / (time + 1)).item()
        train(first, as_tensors, time, time + 1)
        train(second, as_numbers, time, time + 1)
    torch.testing.assert_close(as_tensors, as_numbers, rtol=0, atol=1e-7)


def test_parameter_without_gradients_has_no_state():
    trained, frozen = parameters(2, 6, 4)
    optimizer = BasisRotation([trained, frozen])
    train(optimizer, [trained], 0, 5)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, [trained], 5, 11)
    assert set(optimizer.state) == {trained}


def test_summary_counts_no_state_of_frozen_parameters():
    trained, frozen = parameters(2, 6, 4)
    summary = BasisRotation([trained, frozen.requires_grad_(False)]).summary()
    assert [row.num_state for row in summary] == [152, 0]


def test_frozen_parameters_may_be_integers():
    quantized = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), requires_grad=False)
    BasisRotation([*parameters(1, 6, 4), quantized])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("rotate", [True, False])
def test_parameter_that_is_twice_in_a_group_counts_once(rotate):
    (twice,), (once,) = parameters(1, 6, 4), parameters(1, 6, 4)
    train(BasisRotation([twice, twice], frequency=3, rotate=rotate), [twice], 0, 13)
    train(BasisRotation([once], frequency=3, rotate=rotate), [once], 0, 13)
    assert torch.equal(twice, once)


def named_pair():
    first, second = parameters(2, 6, 4)
    return BasisRotation([("first", first), ("second", second)]), first, second


def test_parameter_can_be_appended_to_a_group_with_names():
    optimizer, *series = named_pair()
    series.append(torch.nn.Parameter(random(6, 4, seed=9)))
    optimizer.param_groups[0]["params"].append(series[-1])
    train(optimizer, series, 0, 3)
    assert int(optimizer.state[series[-1]]["step"]) == 3


def test_names_of_other_parameters_are_not_told():
    optimizer, first, _ = named_pair()
    del optimizer.param_groups[0]["params"][1]
    first.grad = torch.full_like(first, torch.nan)
    with pytest.raises(ValueError, match="parameter 0 of group 0"):
        optimizer.step()


def test_group_without_options_is_refused():
    first, second = parameters(2, 6, 4)
    optimizer = BasisRotation([first])
    optimizer.param_groups.append({"params": [second]})
    with pytest.raises(ValueError, match="a parameter group has no betas: add groups with add_"):
        train(optimizer, [first, second], 0, 1)


def test_state_of_no_parameter_is_left_alone():
    series, optimizer = trained()
    optimizer.state["of the program"] = 3
    train(optimizer, series, 3, 4)
    assert optimizer.num_failed_refreshes == 0
    assert optimizer.state_dict()["state"]["of the program"] == 3


@pytest.fixture
def exchanged():
    """Three parameters of one optimizer: one of 15 updates, one of 3 that left, and one that took
    its place for the last update."""
    stayed, left = parameters(2, 6, 4)
    optimizer = BasisRotation([stayed, left])
    train(optimizer, [stayed], 0, 11)
    train(optimizer, [stayed, left], 11, 14)
    joined = torch.nn.Parameter(random(6, 4, seed=9))
    optimizer.param_groups[0]["params"][1] = joined
    before = left.detach().clone()
    train(optimizer, [stayed, joined], 14, 15)
    return optimizer, stayed, (left, before), joined


def test_joined_parameter_is_trained(exchanged):
    optimizer, _, _, joined = exchanged
    assert not torch.equal(joined, random(6, 4, seed=9))
    assert int(optimizer.state[joined]["step"]) == 1


def test_parameter_that_left_is_not_trained(exchanged):
    optimizer, _, (left, before), _ = exchanged
    assert torch.equal(left, before)
    assert int(optimizer.state[left]["step"]) == 3


def test_parameter_that_left_frees_its_batch(exchanged):
    optimizer, _, (left, _), _ = exchanged
    assert optimizer.state[left]["exp_avg"].untyped_storage().nbytes() == left.nbytes


def test_others_train_on_as_if_alone(exchanged):
    _, stayed, _, _ = exchanged
    (alone,) = parameters(1, 6, 4)
    train(BasisRotation([alone]), [alone], 0, 15)
    torch.testing.assert_close(stayed, alone, rtol=0, atol=1e-7)


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
        ({"amsgrad": True}, {}, "amsgrad=True: BasisRotation has no such option"),
        ({"as_published": True}, {}, "as_published cannot change once there is state"),
    ],
)
def test_misfit_in_training_changes_nothing(options, state, told):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series)
    train(optimizer, series, 0, 1)
    optimizer.param_groups[0].update(options)
    optimizer.state[series[0]].update(state)
    before = copy.deepcopy(([p.detach() for p in series], optimizer.state_dict()["state"]))
    with pytest.raises(ValueError, match=told):
        train(optimizer, series, 1, 2)
    after = [p.detach() for p in series], optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def trained(num_steps=3, **options):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, **options)
    train(optimizer, series, 0, num_steps)
    return series, optimizer


def test_options_that_a_checkpoint_lacks_are_the_constructors():
    series, optimizer = trained()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["rotation_precision"], group["max_dim"]
    other = BasisRotation(series, rotation_precision="bf16")
    other.load_state_dict(saved)
    assert other.param_groups[0]["rotation_precision"] == "bf16"
    assert other.param_groups[0]["max_dim"] == 16_384


def test_loaded_state_is_a_copy():
    series, optimizer = trained()
    saved = optimizer.state_dict()
    momentum = saved["state"][0]["exp_avg"].clone()
    other = BasisRotation(series)
    other.load_state_dict(saved)
    train(other, series, 3, 4)
    assert torch.equal(saved["state"][0]["exp_avg"], momentum)


def test_names_are_looked_up_for_messages_alone(monkeypatch):
    # Each look goes through all parameters.
    series, optimizer = trained()
    monkeypatch.setattr(BasisRotation, "_describe", None)
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, series, 3, 4)


def state_of_adamw():
    series = parameters(2, 6, 4)
    adamw = torch.optim.AdamW(series)
    train(adamw, series, 0, 1)
    return adamw.state_dict()


def state_of_two_groups():
    return BasisRotation([{"params": [p]} for p in parameters(2, 6, 4)]).state_dict()


def state_of_a_json_file():
    saved = trained(geometry="unilateral")[1].state_dict()
    return {**saved, "state": {str(number): own for number, own in saved["state"].items()}}


def state_with_a_bad_option():
    state = trained(geometry="unilateral")[1].state_dict()
    state["param_groups"][0]["frequency"] = 0
    return state


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (state_of_adamw, r"exp_avg \(6, 4\), .*need exp_avg"),
        (state_of_two_groups, r"\[1, 1\] parameters"),
        (state_with_a_bad_option, "frequency=0"),
        (state_of_a_json_file, "entries like '0', but its groups have parameters like 0"),
    ],
)
def test_failed_load_changes_nothing(make, told):
    series, optimizer = trained(geometry="unilateral")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(make())
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    train(optimizer, series, 3, 4)


def trained_by_name(*names):
    """Matrices a to d, each with its own gradients, in one group per string."""
    by_name = dict(zip("abcd", parameters(4, 6, 4), strict=True))
    groups = [{"params": [(name, by_name[name]) for name in group]} for group in names]
    optimizer = BasisRotation(groups)
    train(optimizer, by_name.values(), 0, 3)
    return optimizer, by_name


@pytest.mark.parametrize("order", [["abcd"], ["dbca"]])
def test_saved_parameters_are_found_by_name(order):
    optimizer, series = trained_by_name("abcd")
    other, other_series = trained_by_name(*order)
    other.load_state_dict(optimizer.state_dict())
    for name, parameter in other_series.items():
        momentum = optimizer.state[series[name]]["exp_avg"]
        assert torch.equal(other.state[parameter]["exp_avg"], momentum)
    assert other.param_groups[0]["param_names"] == list(order[0])


def test_other_names_are_taken_by_position():
    saved = trained_by_name("abcd")[0].state_dict()
    saved["param_groups"][0]["param_names"] = ["module.a", "module.b", "module.c", "module.d"]
    optimizer, _ = trained_by_name("abcd")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == list("abcd")


def test_parameter_of_another_group_is_refused():
    saved = trained_by_name("ab", "cd")[0].state_dict()
    with pytest.raises(ValueError, match="c was in another group when the state was saved"):
        trained_by_name("ac", "bd")[0].load_state_dict(saved)


def test_names_are_right_after_torchs_checkpoint():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6))
    optimizer = BasisRotation(model)
    saved = get_optimizer_state_dict(model, optimizer)
    other = BasisRotation(list(model.named_parameters())[::-1], model=model)
    set_optimizer_state_dict(model, other, saved)
    (group,) = other.param_groups
    by_name = dict(zip(group["param_names"], group["params"], strict=True))
    assert all(by_name[name] is parameter for name, parameter in model.named_parameters())


def test_saved_state_copies_the_bases_alone():
    series, optimizer = trained()
    saved = optimizer.state_dict()
    for number, parameter in enumerate(series):
        for name, tensor in saved["state"][number].items():
            kept = optimizer.state[parameter][name]
            assert tensor is kept or (name.endswith("_basis") and torch.equal(tensor, kept))


def test_saved_state_fits_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    _, optimizer = trained()
    flat = {}
    for number, own in optimizer.state_dict()["state"].items():
        flat |= {f"{number}.{name}": value for name, value in own.items()}
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    read = safetensors.load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(read[key], value) for key, value in flat.items())
