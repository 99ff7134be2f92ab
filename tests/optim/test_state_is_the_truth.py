"""`optimizer.state` and `param_groups` decide: what is replaced, cleared, swapped or changed in them counts."""

import copy

import pytest
import torch

from brx.optim import BasisRotation


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(num, *shape):
    return [torch.nn.Parameter(random(*shape, seed=k)) for k in range(num)]


def step(optimizer, series, time):
    for k, parameter in enumerate(series):
        parameter.grad = random(*parameter.shape, seed=100 * time + k)
    optimizer.step()


def weights_after(num_steps, interfere=lambda optimizer, series, time: None, num=3, **options):
    series = parameters(num, 6, 4)
    optimizer = BasisRotation(series, lr=0.01, frequency=3, **options)
    for time in range(num_steps):
        interfere(optimizer, series, time)
        step(optimizer, series, time)
    return [parameter.detach() for parameter in series], optimizer


def test_state_that_was_offloaded_and_brought_back_as_new_tensors_continues():
    def offload(optimizer, series, time):
        for state in optimizer.state.values():
            for name, tensor in list(state.items()):
                state[name] = tensor.clone()

    replaced, optimizer = weights_after(13, offload)
    expected, _ = weights_after(13)
    assert all(map(torch.equal, replaced, expected))
    assert [int(state["step"]) for state in optimizer.state_dict()["state"].values()] == [13, 13, 13]


def test_replaced_values_count():
    def forget_momentum(optimizer, series, time):
        if time == 11:
            for state in optimizer.state.values():
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    def forget_it_in_place(optimizer, series, time):
        if time == 11:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()

    replaced, written = weights_after(13, forget_momentum)[0], weights_after(13, forget_it_in_place)[0]
    assert all(map(torch.equal, replaced, written))
    assert not torch.equal(replaced[0], weights_after(13)[0][0])


def test_step_that_is_written_into_decides_the_next_refresh():
    def set_step(optimizer, series, time):
        if time == 4:
            for state in optimizer.state.values():
                state["step"].fill_(8)  # the next update is the ninth, and 3 divides 9

    _, optimizer = weights_after(4)
    before = optimizer.state[next(iter(optimizer.state))]["left_basis"].clone()
    _, optimizer = weights_after(5, set_step)
    state = optimizer.state[next(iter(optimizer.state))]
    assert int(state["step"]) == 9
    assert not torch.equal(state["left_basis"], before)


def test_cleared_state_starts_anew():
    def clear(optimizer, series, time):
        if time == 4:
            optimizer.state.clear()

    cleared, optimizer = weights_after(6, clear)
    series = [torch.nn.Parameter(weight.clone()) for weight in weights_after(4)[0]]
    fresh = BasisRotation(series, lr=0.01, frequency=3)
    for time in (4, 5):
        step(fresh, series, time)
    assert all(map(torch.equal, cleared, [parameter.detach() for parameter in series]))
    assert int(optimizer.state_dict()["state"][0]["step"]) == 2


def test_swapped_parameter_is_updated_and_the_old_one_is_not():
    series = parameters(3, 6, 4)
    optimizer = BasisRotation(series, lr=0.01)
    for time in range(2):
        step(optimizer, series, time)
    old, new = series[1], torch.nn.Parameter(random(6, 4, seed=9))
    optimizer.param_groups[0]["params"][1] = new
    before = old.detach().clone(), new.detach().clone()
    step(optimizer, [series[0], new, series[2]], 2)
    assert torch.equal(old, before[0])
    assert not torch.equal(new, before[1])
    assert int(optimizer.state[new]["step"]) == 1
    assert int(optimizer.state[series[0]]["step"]) == 3
    # Nor does what is left of the old one keep the memory of the batch that it was in.
    assert optimizer.state[old]["exp_avg"].untyped_storage().nbytes() == old.nbytes


@pytest.mark.parametrize("change", [{"betas": (0.5, 0.9)}, {"eps": 0.1}, {"maximize": True}, {"lr": 0.3}])
def test_option_changed_in_one_of_two_groups_changes_that_group_alone(change):
    one, other = parameters(2, 6, 4)
    together = BasisRotation([{"params": [one]}, {"params": [other]}], lr=0.01)
    alone = [torch.nn.Parameter(parameter.detach().clone()) for parameter in (one, other)]
    separate = [BasisRotation([parameter], lr=0.01) for parameter in alone]
    for time in range(14):
        if time == 11:
            together.param_groups[1].update(change)
            separate[1].param_groups[0].update(change)
        step(together, [one, other], time)
        for parameter, twin in zip(alone, (one, other), strict=True):
            parameter.grad = twin.grad.clone()
        for optimizer in separate:
            optimizer.step()
    for parameter, twin in zip(alone, (one, other), strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-7)


def test_tensor_rate_beside_a_float_rate():
    mixed, floats = parameters(2, 6, 4), parameters(2, 6, 4)
    first = BasisRotation([{"params": mixed[:1], "lr": torch.tensor(0.02)}, {"params": mixed[1:], "lr": 0.01}])
    second = BasisRotation([{"params": floats[:1], "lr": 0.02}, {"params": floats[1:], "lr": 0.01}])
    for time in range(3):
        step(first, mixed, time)
        step(second, floats, time)
    torch.testing.assert_close(mixed, floats, rtol=0, atol=1e-7)


def test_frozen_parameters_get_no_state():
    trained, frozen = parameters(2, 6, 4)
    frozen.requires_grad_(False)
    optimizer = BasisRotation([trained, frozen])
    step(optimizer, [trained], 0)
    assert set(optimizer.state) == {trained}
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, [trained], 1)
    assert set(optimizer.state) == {trained}
    frozen.requires_grad_(True)
    step(optimizer, [trained, frozen], 2)
    assert {int(optimizer.state[p]["step"]) for p in (trained, frozen)} == {1, 3}


def test_parameter_that_joins_a_batch_leaves_the_others_as_they_were():
    series, alone = parameters(2, 6, 4), parameters(2, 6, 4)
    together, single = BasisRotation(series), BasisRotation(alone[:1])
    for time in range(14):
        series[1].requires_grad_(time >= 11)
        step(together, series[: 1 + (time >= 11)], time)
        alone[0].grad = series[0].grad.clone()
        single.step()
    torch.testing.assert_close(series[0], alone[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("wrong", [{"frequency": 0}, {"frequency": -3}, {"geometry": "both"}, {"betas": (0.9, 1.0)}])
def test_values_changed_on_the_way_are_checked_and_nothing_moves(wrong):
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series)
    step(optimizer, series, 0)
    before = copy.deepcopy(([p.detach() for p in series], optimizer.state_dict()["state"]))
    optimizer.param_groups[0].update(wrong)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        step(optimizer, series, 1)
    torch.testing.assert_close(([p.detach() for p in series], optimizer.state_dict()["state"]), before, rtol=0, atol=0)


def test_another_geometry_on_the_way_does_not_fit_the_state():
    series = parameters(1, 6, 4)
    optimizer = BasisRotation(series)
    step(optimizer, series, 0)
    optimizer.param_groups[0]["geometry"] = "unilateral"
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 .*the state has .*geometry='unilateral'"):
        step(optimizer, series, 1)


def test_state_of_another_shape_is_refused():
    series = parameters(1, 6, 4)
    optimizer = BasisRotation(series)
    step(optimizer, series, 0)
    optimizer.state[series[0]]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"exp_avg \(4,\)"):
        step(optimizer, series, 1)


def test_betas_as_a_list_and_numbers_as_tensors():
    as_list, as_tuple = parameters(2, 6, 4)[:1], parameters(2, 6, 4)[:1]
    first = BasisRotation(as_list, betas=[0.8, 0.9], weight_decay=torch.tensor(0.5))
    second = BasisRotation(as_tuple, betas=(0.8, 0.9), weight_decay=0.5)
    for time in range(3):
        step(first, as_list, time)
        step(second, as_tuple, time)
    assert torch.equal(as_list[0], as_tuple[0])


def test_gradients_are_let_go_after_a_step():
    series = parameters(2, 6, 4)
    optimizer = BasisRotation(series)
    step(optimizer, series, 0)
    assert all(member.gradient is None for member in optimizer._layout.members.values())
