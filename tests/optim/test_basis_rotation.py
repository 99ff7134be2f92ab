"""BasisRotation against the naive algorithm, against Adam, as a torch optimizer, and with bad input."""

import copy
import io
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.optim import BasisRotation
from brx.optim.basis_rotation import _refresh_and_interval
from brx.optim.matrix_batch import Member
from brx.optim.options import step_options
from brx.optim.products import product
from tests.optim.naive_basis_rotation import naive_basis_rotation

STRATEGIES = list(itertools.product(["2nd", "1st"], ["bilateral", "unilateral"]))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def full_rank_gradients(num, *shape, seed=1):
    # A fixed part makes all eigenvalues distinct; noise keeps every step different.
    rows, columns = shape[-2:]
    scales = torch.outer(torch.linspace(3, 1, rows).double(), torch.linspace(2, 1, columns).double())
    return [scales * random(*shape, seed=seed + place) for place in range(num)]


def take_steps(optimizer, parameters, gradient_lists):
    for gradients in zip(*gradient_lists, strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize(("frequency", "first"), [(1, 2), (3, 10), (10, 2)])
@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize("covariance", ["step", "refresh", "interval"])
def test_equals_naive_algorithm(shape, source, geometry, frequency, first, covariance):
    weight, gradients = random(*shape), full_rank_gradients(25, *shape)
    parameter = torch.nn.Parameter(weight.clone())
    options = {"source": source, "geometry": geometry, "frequency": frequency, "covariance": covariance}
    optimizer = BasisRotation([parameter], lr=0.01, weight_decay=0.1, first_refresh=first, **options)
    arguments = (0.01, (0.9, 0.999), 1e-8, 0.1, source, geometry, frequency, covariance, first)
    expected = naive_basis_rotation(weight, gradients, *arguments)
    for gradient, after in zip(gradients, expected, strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), after, rtol=0, atol=1e-10)  # 1e-8 of a step


def test_covariances_are_equal_at_frequency_one():
    weights = []
    for covariance in ("step", "refresh", "interval"):
        parameter = torch.nn.Parameter(random(4, 5))
        optimizer = BasisRotation([parameter], frequency=1, covariance=covariance)
        take_steps(optimizer, [parameter], [full_rank_gradients(15, 4, 5)])
        weights.append(parameter.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_gradients_of_low_rank_equal_naive_algorithm(source, rank):
    # Always the same few directions: most of the space is undecided, and the rule for it decides.
    left, right = random(6, rank), random(rank, 9, seed=1)
    gradients = [left @ random(rank, rank, seed=2 + k) @ right for k in range(25)]
    parameter = torch.nn.Parameter(random(6, 9))
    optimizer = BasisRotation([parameter], lr=0.01, source=source, frequency=5)
    arguments = (0.01, (0.9, 0.999), 1e-8, 0.01, source, "bilateral", 5)
    expected = naive_basis_rotation(parameter.detach(), gradients, *arguments)[-1]
    take_steps(optimizer, [parameter], [gradients])
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_many_matrices_in_one_stack_equal_each_alone(source, geometry):
    shapes = [(5, 5), (4, 7), (5, 5), (3, 5, 5)]
    weights = [random(*shape, seed=place) for place, shape in enumerate(shapes)]
    gradients = [full_rank_gradients(18, *shape, seed=10 * place) for place, shape in enumerate(shapes)]
    settings = {"source": source, "geometry": geometry, "frequency": 4}
    together = [torch.nn.Parameter(weight.clone()) for weight in weights]
    take_steps(BasisRotation(together, **settings), together, gradients)
    for parameter, weight, series in zip(together, weights, gradients, strict=True):
        alone = torch.nn.Parameter(weight.clone())
        take_steps(BasisRotation([alone], **settings), [alone], [series])
        torch.testing.assert_close(parameter.detach(), alone.detach(), rtol=0, atol=1e-9)


def test_groups_keep_their_own_rate_and_interval():
    weights = [random(5, 5, seed=place) for place in range(3)]
    gradients = [full_rank_gradients(18, 5, 5, seed=10 * place) for place in range(3)]
    options = [{"lr": 0.01, "frequency": 2}, {"lr": 0.03, "frequency": 5}, {"lr": 0.02, "frequency": None}]
    together = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": [parameter], **option} for parameter, option in zip(together, options, strict=True)]
    take_steps(BasisRotation(groups), together, gradients)
    for parameter, weight, series, option in zip(together, weights, gradients, options, strict=True):
        expected = naive_basis_rotation(
            weight, series, option["lr"], (0.9, 0.999), 1e-8, 0.01, "2nd", "bilateral", option["frequency"] or 10**9
        )
        torch.testing.assert_close(parameter.detach(), expected[-1], rtol=0, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    batch=st.integers(1, 3),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 1000),
)
def test_basis_stays_orthonormal(rows, columns, batch, strategy, seed):
    source, geometry = strategy
    parameter = torch.nn.Parameter(random(batch, rows, columns, dtype=torch.float32))
    optimizer = BasisRotation([parameter], source=source, geometry=geometry, frequency=2)
    take_steps(
        optimizer, [parameter], [[random(batch, rows, columns, seed=seed + k, dtype=torch.float32) for k in range(15)]]
    )
    assert torch.isfinite(parameter).all()
    for side in ("left_basis", "right_basis"):
        if side in optimizer.state[parameter]:
            basis = optimizer.state[parameter][side]
            identity = torch.eye(basis.shape[-1]).expand_as(basis)
            torch.testing.assert_close(basis.mT @ basis, identity, rtol=0, atol=1e-5)


def test_a_fixed_basis_is_adam_on_rotated_parameters():
    # With a fixed basis, Adam on U^T W V and BasisRotation on W are the same (appendix, "Adam's equivalence").
    gradients = full_rank_gradients(30, 6, 6)
    parameter = torch.nn.Parameter(random(6, 6))
    optimizer = BasisRotation([parameter], lr=0.01, weight_decay=0.0, frequency=None)
    take_steps(optimizer, [parameter], [gradients[:10]])
    state = optimizer.state[parameter]
    U, V = state["left_basis"].clone(), state["right_basis"].clone()
    rotated = torch.nn.Parameter(U.T @ parameter.detach() @ V)
    adam = torch.optim.Adam([rotated], lr=0.01)
    adam.state[rotated] = {name: state[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")}
    take_steps(adam, [rotated], [[U.T @ gradient @ V for gradient in gradients[10:]]])
    take_steps(optimizer, [parameter], [gradients[10:]])
    torch.testing.assert_close(parameter.detach(), U @ rotated.detach() @ V.T, rtol=0, atol=1e-8)


@pytest.mark.parametrize("frequency", [1, 10, None])
def test_is_adamw_before_the_first_basis(frequency):
    weight = random(6, 4, dtype=torch.float32)
    gradients = [random(6, 4, seed=k, dtype=torch.float32) for k in range(9)]
    ours, theirs = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    take_steps(BasisRotation([ours], frequency=frequency, first_refresh=10, weight_decay=0.1), [ours], [gradients])
    take_steps(torch.optim.AdamW([theirs], weight_decay=0.1, fused=True), [theirs], [gradients])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
@pytest.mark.parametrize("saved_after", [1, 2, 9, 12])
def test_resumes_bit_exactly(saved_after, source, geometry):
    shapes = [(5, 5), (4, 7), (2, 5, 5)]
    weights = [random(*shape, dtype=torch.float32) for shape in shapes]
    gradients = [[g.float() for g in full_rank_gradients(15, *shape)] for shape in shapes]
    settings = {"source": source, "geometry": geometry, "frequency": 4}
    straight = [torch.nn.Parameter(weight.clone()) for weight in weights]
    take_steps(BasisRotation(straight, **settings), straight, gradients)

    first = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = BasisRotation(first, **settings)
    take_steps(optimizer, first, [series[:saved_after] for series in gradients])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = BasisRotation(second, **settings)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    take_steps(resumed, second, [series[saved_after:] for series in gradients])
    assert all(torch.equal(one, other) for one, other in zip(straight, second, strict=True))


def test_saved_state_copies_the_bases_alone_and_is_saved_once():
    parameters = [torch.nn.Parameter(random(32, 32, seed=k, dtype=torch.float32)) for k in range(8)]
    optimizer = BasisRotation(parameters)
    take_steps(optimizer, parameters, [[random(32, 32, dtype=torch.float32)]] * 8)
    saved = optimizer.state_dict()
    for number, parameter in enumerate(parameters):
        for name, tensor in saved["state"][number].items():
            kept = optimizer.state[parameter][name]
            assert tensor is kept or (name.endswith("_basis") and torch.equal(tensor, kept))
    file = io.BytesIO()
    torch.save(saved, file)
    assert file.getbuffer().nbytes < 1.1 * 8 * 6 * 32 * 32 * 4  # two moments, two bases, two covariances


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_keep_state_in_fp32(dtype):
    parameter = torch.nn.Parameter(random(6, 4, dtype=dtype))
    optimizer = BasisRotation([parameter], lr=0.01)
    take_steps(optimizer, [parameter], [[random(6, 4, seed=k, dtype=dtype) for k in range(5)]])
    resumed = BasisRotation([parameter])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in (optimizer.state[parameter], resumed.state[parameter]):
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    assert parameter.dtype == dtype
    assert torch.isfinite(parameter).all()


def test_zero_gradients_only_decay():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = BasisRotation([parameter], lr=0.1, weight_decay=0.1, frequency=2)
    take_steps(optimizer, [parameter], [[torch.zeros(4, 4)] * 12])
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.99**12))


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_zero_gradients_in_between_leave_the_basis_orthonormal(source, geometry):
    parameter = torch.nn.Parameter(random(4, 6, dtype=torch.float32))
    optimizer = BasisRotation([parameter], lr=0.01, source=source, geometry=geometry, frequency=2)
    zero, some = torch.zeros(4, 6), [random(4, 6, seed=k, dtype=torch.float32) for k in range(3)]
    before = parameter.detach().clone()
    take_steps(optimizer, [parameter], [[zero, zero, *some, zero, zero, zero, *some, zero, zero, *some, zero]])
    assert not torch.equal(parameter, before)
    assert torch.isfinite(parameter).all()
    assert optimizer.num_failed_refreshes == 0
    for side in ("left_basis", "right_basis"):
        if side in optimizer.state[parameter]:
            basis = optimizer.state[parameter][side]
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_one_row_and_one_column(shape, source, geometry):
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = BasisRotation([parameter], source=source, geometry=geometry, frequency=2, lr=0.1)
    take_steps(optimizer, [parameter], [[torch.ones(shape)] * 13])
    assert torch.isfinite(parameter).all()
    assert parameter.sum() < torch.ones(shape).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])  # the square of the last is infinite
@pytest.mark.parametrize("steps_before", [1, 9, 11], ids=["ordinary step", "first refresh", "refresh"])
@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
def test_gradient_that_is_not_finite_changes_nothing_and_is_named(source, geometry, steps_before, bad, dtype):
    named = [(name, torch.nn.Parameter(random(3, 3, seed=k, dtype=dtype))) for k, name in enumerate(["good", "bad"])]
    optimizer = BasisRotation(named, source=source, geometry=geometry, frequency=3)
    gradients = [gradient.to(dtype) for gradient in full_rank_gradients(steps_before, 3, 3)]
    take_steps(optimizer, [p for _, p in named], [gradients] * 2)
    snapshot = lambda: copy.deepcopy((optimizer.state_dict()["state"], [p.detach() for _, p in named]))  # noqa: E731
    before = snapshot()
    named[1][1].grad[0, 0] = bad
    with pytest.raises(ValueError, match=r"parameter bad of shape \(3, 3\): its gradient has NaN, infinity"):
        optimizer.step()
    torch.testing.assert_close(snapshot(), before, rtol=0, atol=0)


def test_parameters_without_gradient_in_some_steps_are_left_alone():
    weights = [random(4, 4, seed=k) for k in range(2)]
    gradients = full_rank_gradients(24, 4, 4)
    one, other = (torch.nn.Parameter(weight.clone()) for weight in weights)
    optimizer = BasisRotation([one, other], lr=0.01, frequency=2)
    for place, gradient in enumerate(gradients):
        one.grad = gradient.clone()
        other.grad = gradient.clone() if place % 2 == 0 else None
        optimizer.step()
    arguments = (0.01, (0.9, 0.999), 1e-8, 0.01, "2nd", "bilateral", 2)
    torch.testing.assert_close(one.detach(), naive_basis_rotation(weights[0], gradients, *arguments)[-1])
    torch.testing.assert_close(other.detach(), naive_basis_rotation(weights[1], gradients[::2], *arguments)[-1])


def test_gradient_that_is_not_contiguous():
    weight, gradients = random(4, 6), full_rank_gradients(12, 6, 4)
    one, other = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    for parameter, contiguous in ((one, False), (other, True)):
        optimizer = BasisRotation([parameter])
        for gradient in gradients:
            parameter.grad = gradient.T.contiguous() if contiguous else gradient.T
            optimizer.step()
    assert torch.equal(one, other)


def test_sparse_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = BasisRotation([parameter])
    parameter.grad = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 of shape \(3, 3\): its gradient is sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"source": "3rd"},
        {"geometry": "both"},
        {"frequency": 0},
        {"covariance": "never"},
        {"first_refresh": 1},
        {"first_refresh": 2.5},
        {"rotation_precision": "fp8"},
    ],
)
def test_wrong_hyperparameters_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BasisRotation([torch.nn.Parameter(torch.ones(2, 2))], **wrong)


def test_decomposition_that_fails_keeps_the_basis_and_is_counted(monkeypatch):
    def failing(matrix):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = BasisRotation([parameter])
    take_steps(optimizer, [parameter], [[random(3, 3, seed=k, dtype=torch.float32) for k in range(9)]])
    assert optimizer.num_failed_refreshes == 2
    assert torch.equal(optimizer.state[parameter]["left_basis"], torch.eye(3))
    assert torch.isfinite(parameter).all()


def test_programs_autocast_and_tf32_do_not_reach_the_step(monkeypatch):
    seen = set()

    def watched(*arguments):
        seen.add((torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cpu")))
        return product(*arguments)

    def train():
        parameter = torch.nn.Parameter(random(4, 5, dtype=torch.float32))
        optimizer = BasisRotation([parameter], frequency=3)
        take_steps(optimizer, [parameter], [[gradient.float() for gradient in full_rank_gradients(13, 4, 5)]])
        return parameter.detach()

    expected = train()
    monkeypatch.setattr("brx.optim.matrix_batch.product", watched)
    at_start = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = train()
    finally:
        torch.set_float32_matmul_precision(at_start)
    assert seen == {("ieee", False)}
    assert torch.equal(result, expected)


@given(st.fractions(min_value=1, max_value=30, max_denominator=7), st.integers(0, 30))
def test_intervals_add_up_to_the_updates_since_the_first_basis(frequency, phase):
    parameter = torch.nn.Parameter(random(2, 2))
    group = {**BasisRotation([parameter]).param_groups[0], "covariance": "interval", "frequency": float(frequency)}
    options = step_options(group, None)
    member = Member(parameter, group, {}, options.layout, (), options, phase=phase)
    total, last = 0, 2
    for update in range(3, 200):
        member.num_updates = update - 1
        refresh, interval = _refresh_and_interval(member)
        total += interval
        last = update if refresh == "next" else last
    assert total == last - 2


def test_closure_scheduler_and_added_group():
    first, second = (torch.nn.Parameter(random(3, 3, seed=k)) for k in range(2))
    optimizer = BasisRotation([first], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.add_param_group({"params": [second], "lr": 0.0})

    def closure():
        optimizer.zero_grad()
        loss = first.square().sum() + second.square().sum()
        loss.backward()
        return loss

    before = second.detach().clone()
    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[0] > losses[-1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert torch.equal(second, before)


def test_staggered_refreshes_are_spread_over_the_interval(monkeypatch):
    parameters = [torch.nn.Parameter(random(4, 4, seed=k)) for k in range(6)]
    optimizer = BasisRotation(parameters, frequency=3, staggered=True)
    due = []
    original = optimizer._estimate_eigenbasis

    def counting(batch, gradient, exact):
        due[-1] += len(batch.members)
        original(batch, gradient, exact)

    monkeypatch.setattr(optimizer, "_estimate_eigenbasis", counting)
    for step in range(16):
        due.append(0)
        take_steps(optimizer, parameters, [[random(4, 4, seed=step)]] * 6)
    assert due == [0, 6] + [2] * 14


@pytest.mark.parametrize(("source", "geometry"), STRATEGIES)
@pytest.mark.parametrize(("precision", "bound"), [("tf32", 4 * 2**-11), ("bf16", 2 * 2**-16)])
def test_rotation_precision_stays_within_its_error_and_spares_the_basis(precision, bound, source, geometry):
    # One step from the same state: the update differs by the rotations' rounding, the state by the gradient's alone.
    weight, gradients = random(24, 40, dtype=torch.float32), full_rank_gradients(11, 24, 40)
    updates, states = {}, {}
    for choice in ("highest", precision):
        parameter = torch.nn.Parameter(weight.clone())
        options = {"source": source, "geometry": geometry, "frequency": 5, "eps": 1e-2, "weight_decay": 0.0}
        optimizer = BasisRotation([parameter], lr=1.0, **options)
        take_steps(optimizer, [parameter], [[gradient.float() for gradient in gradients[:10]]])
        before = parameter.detach().clone()
        optimizer.param_groups[0]["rotation_precision"] = choice
        take_steps(optimizer, [parameter], [[gradients[10].float()]])
        updates[choice] = parameter.detach() - before
        states[choice] = optimizer.state[parameter]
    error = torch.linalg.norm(updates[precision] - updates["highest"]) / torch.linalg.norm(updates["highest"])
    assert bound / 200 < error < bound
    for name, value in states["highest"].items():
        if name.endswith(("basis", "covariance")):
            assert torch.equal(value, states[precision][name]), name


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_rotation_precision_keeps_the_basis_orthonormal(precision):
    parameter = torch.nn.Parameter(random(24, 40, dtype=torch.float32))
    optimizer = BasisRotation([parameter], lr=1e-3, frequency=2, rotation_precision=precision)
    take_steps(optimizer, [parameter], [[random(24, 40, seed=k, dtype=torch.float32) for k in range(40)]])
    for side in ("left_basis", "right_basis"):
        basis = optimizer.state[parameter][side]
        torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)
