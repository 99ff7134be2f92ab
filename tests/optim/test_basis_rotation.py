"""BasisRotation against the naive algorithm, against Adam, and with bad input."""

import copy
import multiprocessing
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brx.optim import BasisRotation
from brx.optim.reduced_precision import product
from brx.optim.step_member import Position, StepMember
from tests.optim.helpers import (
    STRATEGIES,
    assert_orthonormal,
    full_rank_gradients,
    parameters,
    random,
    take_steps,
    threads,
    train,
)
from tests.optim.naive_basis_rotation import naive_basis_rotation

double = partial(random, dtype=torch.float64)
every_strategy = pytest.mark.parametrize(("source", "geometry"), STRATEGIES)


@pytest.mark.parametrize(
    ("frequency", "first", "covariance"),
    [
        (1, 2, "step"),
        (3, 2, "refresh"),
        (3, 10, "step"),
        (3, 10, "refresh"),
        (3, 10, "interval"),
        (10, 2, "interval"),
    ],
)
@every_strategy
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4)])
def test_equals_naive_algorithm(shape, source, geometry, frequency, first, covariance):
    weight, gradients = double(*shape), full_rank_gradients(25, *shape)
    parameter = torch.nn.Parameter(weight.clone())
    options = {
        "source": source,
        "geometry": geometry,
        "frequency": frequency,
        "covariance": covariance,
    }
    options |= {"lr": 0.01, "weight_decay": 0.1, "first_refresh": first}
    optimizer = BasisRotation([parameter], **options)
    expected = naive_basis_rotation(weight, gradients, **options)
    for gradient, after in zip(gradients, expected, strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), after, rtol=0, atol=1e-10)  # 1e-8 of a step


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_gradients_of_low_rank_equal_naive_algorithm(source, rank):
    # Always the same few directions: most of the space is undecided, and the rule for it decides.
    left, right = double(6, rank), double(rank, 9, seed=1)
    gradients = [left @ double(rank, rank, seed=2 + k) @ right for k in range(25)]
    parameter = torch.nn.Parameter(double(6, 9))
    optimizer = BasisRotation([parameter], lr=0.01, source=source, frequency=5)
    expected = naive_basis_rotation(parameter.detach(), gradients, source=source, frequency=5)[-1]
    take_steps(optimizer, [parameter], [gradients])
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-10)


@every_strategy
def test_many_matrices_in_one_stack_equal_each_alone(source, geometry):
    shapes = [(5, 5), (4, 7), (5, 5), (3, 5, 5)]
    options = {"source": source, "geometry": geometry, "frequency": 4}
    gradients, together, alone = [], [], []
    for place, shape in enumerate(shapes):
        gradients.append(full_rank_gradients(18, *shape, seed=10 * place))
        weight = double(*shape, seed=place)
        together.append(torch.nn.Parameter(weight.clone()))
        alone.append(torch.nn.Parameter(weight.clone()))
    take_steps(BasisRotation(together, **options), together, gradients)
    for parameter, twin, series in zip(together, alone, gradients, strict=True):
        take_steps(BasisRotation([twin], **options), [twin], [series])
        torch.testing.assert_close(parameter, twin, rtol=0, atol=1e-9)


def test_rate_of_zero_changes_nothing():
    (weight,), (unchanged,) = parameters(1, 4, 6), parameters(1, 4, 6)
    # With these betas Adam's step has no finite bound.
    optimizer = BasisRotation([weight], lr=0.0, betas=(0.95, 0.9))
    train(optimizer, [weight], 0, 3)
    assert torch.equal(weight, unchanged)


def test_parameter_without_gradient_is_left_alone():
    always, sometimes = parameters(2, 4, 4, dtype=torch.float64)
    before = [always.detach().clone(), sometimes.detach().clone()]
    gradients = full_rank_gradients(24, 4, 4)
    optimizer = BasisRotation([always, sometimes], lr=0.01, frequency=2)
    for place, gradient in enumerate(gradients):
        always.grad = gradient.clone()
        sometimes.grad = gradient.clone() if place % 2 == 0 else None
        optimizer.step()
    expected = [
        naive_basis_rotation(before[0], gradients, frequency=2)[-1],
        naive_basis_rotation(before[1], gradients[::2], frequency=2)[-1],
    ]
    torch.testing.assert_close([always.detach(), sometimes.detach()], expected)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(STRATEGIES),
    st.integers(0, 1000),
)
def test_basis_stays_orthonormal(rows, columns, batch, strategy, seed):
    parameter = torch.nn.Parameter(random(batch, rows, columns))
    source, geometry = strategy
    optimizer = BasisRotation([parameter], source=source, geometry=geometry, frequency=2)
    gradients = [random(batch, rows, columns, seed=seed + k) for k in range(15)]
    take_steps(optimizer, [parameter], [gradients])
    assert torch.isfinite(parameter).all()
    assert_orthonormal(optimizer.state[parameter])


@every_strategy
def test_zero_gradients_only_decay_the_weights(source, geometry):
    parameter = torch.nn.Parameter(random(4, 6))
    optimizer = BasisRotation([parameter], lr=0.01, source=source, geometry=geometry, frequency=2)
    take_steps(optimizer, [parameter], [[torch.zeros(4, 6)] * 12])
    expected = random(4, 6) * (1 - 0.01 * 0.01) ** 12
    torch.testing.assert_close(parameter.detach(), expected)


@every_strategy
def test_zero_gradients_leave_the_basis_orthonormal(source, geometry):
    parameter = torch.nn.Parameter(random(4, 6))
    optimizer = BasisRotation([parameter], lr=0.01, source=source, geometry=geometry, frequency=2)
    zero, some = torch.zeros(4, 6), [random(4, 6, seed=k) for k in range(3)]
    gradients = [zero] * 12 + [*some, zero, zero, zero, *some, zero, zero, *some, zero]
    take_steps(optimizer, [parameter], [gradients])
    assert torch.isfinite(parameter).all()
    assert optimizer.num_failed_refreshes == 0
    assert_orthonormal(optimizer.state[parameter])


def assert_trains_as_adamw(shapes, dtype, *, maximize, **options):
    """Nine updates of BasisRotation and of torch's AdamW end at the same bits."""
    ours, theirs = [], []
    for place, shape in enumerate(shapes):
        weight = random(*shape, seed=place, dtype=dtype)
        ours.append(torch.nn.Parameter(weight.clone()))
        theirs.append(torch.nn.Parameter(weight.clone()))
    train(BasisRotation(ours, weight_decay=0.1, maximize=maximize, **options), ours, 0, 9)
    adamw = torch.optim.AdamW(theirs, weight_decay=0.1, fused=True, maximize=maximize)
    train(adamw, theirs, 0, 9)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("frequency", "maximize"), [(1, False), (None, True)])
def test_steps_before_the_first_basis_are_adamws(frequency, maximize):
    options = {"frequency": frequency, "first_refresh": 10}
    assert_trains_as_adamw([(6, 4)], torch.float32, maximize=maximize, **options)


@pytest.mark.parametrize(("dtype", "maximize"), [(torch.float32, True), (torch.float64, False)])
def test_steps_without_rotation_are_adamws(dtype, maximize):
    shapes = [(), (5,), (3, 4), (2, 3, 2, 2)]
    assert_trains_as_adamw(shapes, dtype, maximize=maximize, rotate=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("bad", "steps_before"),  # 1e30 has an infinite square; first refresh, ordinary step, refresh
    [(float("nan"), 1), (float("nan"), 3), (float("nan"), 8), (float("inf"), 3), (1e30, 3)],
)
@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_gradient_that_is_not_finite_changes_nothing(source, bad, steps_before, dtype):
    series = parameters(2, 3, 3, dtype=dtype)
    named = list(zip(["good", "bad"], series, strict=True))
    optimizer = BasisRotation(named, source=source, frequency=3)
    train(optimizer, series, 0, steps_before)
    before = copy.deepcopy((optimizer.state_dict()["state"], [p.detach() for p in series]))
    series[1].grad[0, 0] = bad
    told = r"parameter bad of shape \(3, 3\): its gradient has NaN, infinity"
    with pytest.raises(ValueError, match=told):
        optimizer.step()
    after = optimizer.state_dict()["state"], [p.detach() for p in series]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_sparse_gradient_is_refused():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.eye(3).to_sparse()
    told = r"parameter 0 of group 0 of shape \(3, 3\): its gradient is sparse"
    with pytest.raises(ValueError, match=told):
        BasisRotation([parameter]).step()


def test_norm_of_a_gradient_may_exceed_half_precision():
    parameter = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 1000.0)  # the norm is 1e5, float16 ends at 65504
    BasisRotation([parameter], lr=0.25, weight_decay=0.0, rotate=False).step()
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.75))


WRONG = [
    ("lr", -1.0),
    ("betas", (1.0, 0.9)),
    ("betas", 0.9),
    ("eps", -1e-8),
    ("weight_decay", -0.1),
    ("source", "3rd"),
    ("frequency", 0),
    ("first_refresh", 1),
    ("first_refresh", 2.5),
    ("rotation_precision", "fp8"),
    ("covariance_precision", "bf16"),
    ("split", 3),
    ("staggered", 1),
    ("max_dim", 0.5),
    ("lr", float("nan")),
    ("betas", (0.9, True)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_hyperparameters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"Invalid {name}="):
        BasisRotation([torch.nn.Parameter(torch.ones(2, 2))], **{name: value})


@pytest.fixture
def failing_decompositions(monkeypatch):
    for name in ("eigh", "svd"):
        failing = MagicMock(side_effect=torch.linalg.LinAlgError("no"))
        monkeypatch.setattr(torch.linalg, name, failing)


@pytest.mark.usefixtures("failing_decompositions")
def test_failed_decompositions_are_counted():
    series = parameters(1, 3, 3)
    optimizer = BasisRotation(series)
    train(optimizer, series, 0, 9)
    assert optimizer.num_failed_refreshes == 2  # one of each side


@pytest.mark.usefixtures("failing_decompositions")
def test_failed_decomposition_keeps_the_basis():
    series = parameters(1, 3, 3)
    optimizer = BasisRotation(series)
    train(optimizer, series, 0, 9)
    assert torch.equal(optimizer.state[series[0]]["left_basis"], torch.eye(3))
    assert torch.isfinite(series[0]).all()


def trained(num_threads=1, **options):
    series = [*parameters(1, 4, 5), *parameters(1, 24, 40)]
    with threads(num_threads):
        train(BasisRotation(series, frequency=3, **options), series, 0, 13)
    return series


@pytest.mark.parametrize("source", ["1st", "2nd"])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_more_threads_take_the_steps_of_one(source, num_threads):
    assert all(map(torch.equal, trained(num_threads, source=source), trained(source=source)))


def test_forked_processes_have_threads_of_their_own():
    """As notebook launchers fork a process that has already trained."""
    trained(2)
    process = multiprocessing.get_context("fork").Process(target=trained, args=(2,))
    process.start()
    process.join(20)
    is_hanging = process.is_alive()
    process.kill()
    process.join()
    assert not is_hanging
    assert process.exitcode == 0


def test_errors_of_threads_reach_the_caller(monkeypatch):
    monkeypatch.setattr(BasisRotation, "_update", MagicMock(side_effect=ValueError("of a batch")))
    with pytest.raises(ValueError, match="of a batch"):
        trained(2)


def test_step_ignores_the_programs_precision(monkeypatch):
    seen = set()

    def watched(*arguments):
        seen.add((torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cpu")))
        return product(*arguments)

    expected = trained()
    monkeypatch.setattr("brx.optim.matrix_batch.product", watched)
    at_start = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = trained()
    finally:
        torch.set_float32_matmul_precision(at_start)
    assert seen == {("ieee", False)}
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_ignores_the_programs_default_device(dtype):
    """A step on the meta device would lose numbers: the weight decay, for example."""
    gradients = [random(5, 4, seed=time, dtype=dtype) for time in range(6)]
    weights = []
    for device in ("cpu", "meta"):
        (weight,) = parameters(1, 5, 4, dtype=dtype)
        with torch.device(device):
            optimizer = BasisRotation([weight], weight_decay=0.5)
            take_steps(optimizer, [weight], [gradients])
            optimizer.load_state_dict(optimizer.state_dict())
            take_steps(optimizer, [weight], [gradients])
        weights.append(weight)
    assert torch.equal(*weights)


@given(st.fractions(min_value=1, max_value=30, max_denominator=7), st.integers(0, 30))
def test_intervals_add_up_to_all_updates(frequency, index):
    options = {"covariance": "interval", "frequency": float(frequency), "staggered": True}
    (group,) = BasisRotation(parameters(1, 2, 2), **options).param_groups
    member = StepMember(group["params"][0], group, group, position=Position(index, 31))
    total, last = 0, 2
    for member.num_updates in range(2, 200):
        refresh, num_gradients = member.next_due()
        total += num_gradients
        last = member.num_updates + 1 if refresh == "power" else last
    assert total == last - 2


@pytest.mark.parametrize(
    ("num", "frequency", "due_from_3"),
    [
        (6, 3, [2, 2, 2]),
        (4, 10, [1, 0, 1, 0, 0, 1, 0, 1, 0, 0]),  # at the updates 3, 5, 8 and 10
    ],
)
def test_staggered_refreshes_are_spread_over_the_interval(num, frequency, due_from_3):
    series = parameters(num, 4, 4)
    (group,) = BasisRotation(series, frequency=frequency, staggered=True).param_groups
    members = []
    for index, parameter in enumerate(series):
        members.append(StepMember(parameter, group, group, position=Position(index, num)))
    due = []
    for update in range(2 + 2 * frequency):
        for member in members:
            member.num_updates = update
        due.append(sum(member.next_due()[0] is not None for member in members))
    assert due == [0, num] + 2 * due_from_3


def one_step_in(precision, gradients, source, geometry):
    """The update by the last gradient, with rotations in a precision, and the state after it."""
    (parameter,) = parameters(1, 24, 40)
    options = {"source": source, "geometry": geometry, "frequency": 5}
    optimizer = BasisRotation([parameter], lr=1.0, eps=1e-2, weight_decay=0.0, **options)
    take_steps(optimizer, [parameter], [gradients[:-1]])
    before = parameter.detach().clone()
    optimizer.param_groups[0]["rotation_precision"] = precision
    take_steps(optimizer, [parameter], [gradients[-1:]])
    return parameter.detach() - before, optimizer.state[parameter]


@every_strategy
@pytest.mark.parametrize(("precision", "bound"), [("tf32", 4 * 2**-11), ("bf16", 2 * 2**-16)])
def test_rotation_precision_stays_within_its_error(precision, bound, source, geometry, monkeypatch):
    # The noise floor, which follows the precision, would damp entries besides.
    monkeypatch.setattr("brx.optim.basis_rotation.factor_rounding", lambda *of: 0.0)
    gradients = full_rank_gradients(11, 24, 40, dtype=torch.float32)
    exact, _ = one_step_in("highest", gradients, source, geometry)
    rounded, _ = one_step_in(precision, gradients, source, geometry)
    error = torch.linalg.norm(rounded - exact) / torch.linalg.norm(exact)
    assert bound / 200 < error < bound


@pytest.mark.parametrize(("has_tf32", "same_as"), [(False, "highest"), (True, "tf32")])
def test_default_precision_is_that_of_the_device(has_tf32, same_as, monkeypatch):
    monkeypatch.setattr("brx.optim.reduced_precision._has_tf32", lambda device: has_tf32)
    gradients = full_rank_gradients(11, 24, 40, dtype=torch.float32)
    weights = []
    for options in ({}, {"rotation_precision": same_as, "covariance_precision": same_as}):
        (parameter,) = parameters(1, 24, 40)
        optimizer = BasisRotation([parameter], frequency=5, **options)
        take_steps(optimizer, [parameter], [gradients])
        weights.append(parameter)
    assert torch.equal(*weights)


@every_strategy
def test_rotation_precision_spares_the_bases(source, geometry):
    gradients = full_rank_gradients(11, 24, 40, dtype=torch.float32)
    _, exact = one_step_in("highest", gradients, source, geometry)
    _, rounded = one_step_in("tf32", gradients, source, geometry)
    kept = [name for name in exact if name.endswith(("basis", "covariance"))]
    assert kept
    for name in kept:
        assert torch.equal(rounded[name], exact[name]), name


def _to_ten_bits(matrix):
    """Each number rounded to 10 bits of mantissa, by its own exponent."""
    mantissa, exponent = torch.frexp(matrix)
    return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)


# By update the number of updates for which its gradient stands: refreshes are at 2, 5 and 10.
@pytest.mark.parametrize(
    ("covariance", "weights"),
    [
        ("step", [1] * 11),
        ("refresh", [1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0]),
        ("interval", [1, 1, 0, 0, 3, 0, 0, 0, 0, 5, 0]),
    ],
)
@pytest.mark.parametrize("precision", ["highest", "tf32"])
def test_covariance_is_the_average_of_its_gradients(covariance, weights, precision):
    (parameter,) = parameters(1, 24, 40)
    options = {"frequency": 5, "covariance": covariance, "covariance_precision": precision}
    optimizer = BasisRotation([parameter], betas=(0.9, 0.9), **options)
    gradients = full_rank_gradients(11, 24, 40, dtype=torch.float32)
    take_steps(optimizer, [parameter], [gradients])
    expected = torch.zeros(24, 24).double()
    for gradient, weight in zip(gradients, weights, strict=True):
        factor = gradient.double() if precision == "highest" else _to_ten_bits(gradient.double())
        expected = 0.9**weight * expected + (1 - 0.9**weight) * factor @ factor.mT
    found = optimizer.state[parameter]["left_covariance"].double()
    # Far below the roundings of TF32, which change entries by some 1e-4 of the largest.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.max()))


def test_first_moments_have_no_covariance_precision():
    with pytest.raises(ValueError, match=r"source '1st' keeps no covariances"):
        BasisRotation(parameters(1, 3, 3), source="1st", covariance_precision="tf32")


@pytest.mark.parametrize(("geometry", "num_sides"), [("bilateral", 2), ("unilateral", 1)])
def test_first_bases_are_told_as_they_are_done(geometry, num_sides):
    series = [*parameters(3, 4, 6), *parameters(1, 2, 5, 3)]
    optimizer = BasisRotation(series, geometry=geometry)
    told = []
    optimizer.on_first_bases = lambda *counts: told.append(counts)
    train(optimizer, series, 0, 12)
    assert told[-1] == (5 * num_sides, 5 * num_sides)
    assert [total for _, total in told] == len(told) * [5 * num_sides]
