"""Sharded weights: each rank keeps the versions of its own shards."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from brx import delayed
from brx.errors import UserError
from tests.pipeline.loops import (
    assert_same,
    batch,
    flat,
    loss_of,
    make,
    plain_loss,
    sgd,
    simulate,
    train,
    train_with_twin,
)
from tests.processes import start


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp2(model, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"{k}.lin": ColwiseParallel() if k % 2 == 0 else RowwiseParallel() for k in range(4)}
    return parallelize_module(model, mesh, plan)


def discarding(call, t):
    """A discarded pass leaves whole parameters behind, which the next window must not use."""
    call(batch(70 + t))
    return plain_loss(call, t)


def evaluating(call, t):
    if not isinstance(call, torch.nn.Module):
        return plain_loss(call, t)
    return newest_in_between(call, batch(t))


def newest_in_between(model, x):
    """The loss of a training pass; an evaluation in its window sees the newest weights."""
    with torch.no_grad():
        expected = model(x)
    loss = loss_of(model(x))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("loss", [plain_loss, discarding, evaluating])
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}])
def test_fsdp2(loss, settings):
    model = fsdp2(make(), **settings)
    train(model, loss=loss)
    assert_same(flat(model), simulate())


ACCUMULATION = 3


@pytest.mark.usefixtures("alone")
def test_fsdp2_accumulates_without_gradient_sync():
    """Until the last micro-batch of an update, the shards have no gradients."""
    model, twin = fsdp2(make()), make()

    def before_pass(j):
        model.set_requires_gradient_sync(j == ACCUMULATION)

    train_with_twin(model, twin, accumulation=ACCUMULATION, before_pass=before_pass)
    assert_same(flat(model), flat(twin))


@pytest.mark.usefixtures("alone")
def test_fsdp2_shows_its_order_of_use():
    model = fsdp2(make())
    _, pipeline = train(model, updates=2)
    assert [names[0] for names in pipeline.by_stage] == [f"{k}.lin.weight" for k in range(4)]


@pytest.mark.usefixtures("alone")
def test_tensor_parallel():
    model = tensor_parallel(make())
    train(model)
    assert_same(flat(model), simulate())


@pytest.mark.usefixtures("alone")
def test_sharding_after_the_call_is_refused():
    model = make()
    delayed(model, sgd(model.parameters()), 4)
    fsdp2(model)
    with pytest.raises(
        UserError, match=r"call delayed after the model is final \(after fully_shard"
    ):
        model(batch(0))


def fsdp1(model, **settings):
    for k, layer in enumerate(list(model)):
        model[k] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **settings)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **settings)


def gathered(model):
    """All weights of a model under FSDP1."""
    with FullyShardedDataParallel.summon_full_params(model):
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])


STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,  # whole parameters stay from the forward to the backward pass
    ShardingStrategy.NO_SHARD,
)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", [plain_loss, discarding])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(use_orig_params, strategy, loss):
    model = fsdp1(make(), use_orig_params=use_orig_params, sharding_strategy=strategy)
    train(model, loss=loss)
    assert_same(gathered(model), simulate())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_fsdp1_evaluation_in_a_window_sees_the_newest(strategy):
    model = fsdp1(make(), sharding_strategy=strategy)
    train(model, loss=evaluating)
    assert_same(gathered(model), simulate())


@pytest.mark.usefixtures("alone")
def test_fsdp2_in_lower_precision():
    """The versions are of the sharded weights, which stay float64."""
    lower = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)
    model = fsdp2(make(), mp_policy=lower)
    train(model)
    assert_same(flat(model), simulate(), tolerance=1e-5)


KINDS = {
    "fsdp2": fsdp2,
    "tensor": tensor_parallel,
    "fsdp1": fsdp1,
    "fsdp1, whole in the window": lambda model: fsdp1(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
}


def train_one_of_two(rank, folder, kind):
    """Train as one of two ranks; rank 0 leaves all weights in the folder."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = KINDS[kind](make())

    def part(call, t):
        # Tensor parallelism does not share a batch out.
        x = batch(t) if kind == "tensor" else batch(t).chunk(2)[rank]
        return newest_in_between(call, x)

    train(model, loss=part)
    found = gathered(model) if kind.startswith("fsdp1") else flat(model)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_the_naive_simulation(kind, tmp_path):
    ranks = [start(train_one_of_two, rank, tmp_path, kind) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]

    def mean(call, t):
        return sum(loss_of(call(x)) for x in batch(t).chunk(2)) / 2

    expected = simulate(loss=plain_loss if kind == "tensor" else mean)
    assert_same(torch.load(tmp_path / "found.pt"), expected)
