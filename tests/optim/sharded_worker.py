"""Code for several processes: sharded models against the same model on one process. Rank 0 writes
the results as JSON."""

import copy
import json
import traceback
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from brx.optim import BasisRotation, param_groups
from brx.optim.shards import Sharding

NUM_STEPS = 14
OPTIONS = {"lr": 0.01, "frequency": 3, "weight_decay": 0.1}


class Model(nn.Module):
    """Embedding, norm, two matrices whose sizes the number of ranks does not always divide, a stack
    of experts, and a head."""

    def __init__(self, num_experts):
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 6), nn.Linear(6, 13)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 20), nn.Linear(20, 6)
        self.experts = nn.Parameter(0.3 * torch.randn(num_experts, 6, 6)) if num_experts else None

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        for expert in () if self.experts is None else self.experts.unbind():
            x = x + torch.tanh(x @ expert)
        return self.head(x)


def make(dtype=torch.float64, num_experts=3):
    torch.manual_seed(0)
    return Model(num_experts).to(dtype)


def adapted(model, **options):
    return BasisRotation(param_groups(model), **OPTIONS, **options)


def train(model, optimizer, first, last):
    """Train on the same tokens on every rank, so that the mean of the gradients over ranks is the
    gradient of a single process."""
    for t in range(first, last):
        tokens = torch.randint(13, (8, 5), generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        optimizer.step()


def whole(model):
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in model.named_parameters()
    }


@cache
def expected(num_steps=NUM_STEPS, dtype=torch.float64, num_experts=3, **options):
    alone = make(dtype, num_experts)
    trained(alone, num_steps, **options)
    return whole(alone)


def difference(model, other):
    """The largest absolute difference of any weight."""
    return max(
        (value.double() - other[name].double()).abs().max().item()
        for name, value in whole(model).items()
    )


def fsdp2(dtype=torch.float64, model=None, **options):
    model = make(dtype) if model is None else model
    for module in (model.up, model.down):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def two_dimensions():
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(make(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def both():
    mesh = two_dimensions()
    return fsdp2(model=tensor_parallel(mesh["tp"]), mesh=mesh["dp"])


def trained(model, num_steps, **options):
    """Train a model from the first step on; returns its optimizer."""
    optimizer = adapted(model, **options)
    train(model, optimizer, 0, num_steps)
    return optimizer


def sequence_parallel():
    """Each rank normalises a part of the tokens, so that its gradient of the norm is only a part of
    a sum over ranks, which the optimizer must add up."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    sharded = parallelize_module(
        make(num_experts=0), init_device_mesh("cpu", (dist.get_world_size(),)), plan
    )
    trained(sharded, NUM_STEPS)
    return difference(sharded, expected(num_experts=0))


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def updates_of_an_empty_shard():
    """The ranks' counts of updates, for parameters of which a rank may hold no shard."""
    model = fully_shard(nn.Linear(6, 1))
    optimizer = adapted(model)
    for t in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 6), float(t))).sum().backward()
        optimizer.step()
    return of_all_ranks([int(state["step"]) for state in optimizer.state.values()])


def trains_as_one_process(shard, **options):
    model = shard()
    trained(model, NUM_STEPS, **options)
    return difference(model, expected(**options))


def matrices_per_rank():
    """The number of matrices whose state each rank keeps."""
    states = [state for state in trained(fsdp2(), 1).state.values() if "left_basis" in state]
    return of_all_ranks(sum(state["left_basis"].numel() > 0 for state in states))


def half_precision():
    model = fsdp2(torch.bfloat16)
    trained(model, 11)
    return difference(model, expected(11, torch.bfloat16))


def bad_gradient(rank_with_nan=1):
    model = fsdp2()
    optimizer = trained(model, 2)
    before = whole(model)
    model(torch.arange(12).view(2, 6)).square().mean().backward()
    if dist.get_rank() == rank_with_nan:
        model.up.weight.grad.to_local()[0, 0] = float("nan")
    try:
        optimizer.step()
    except ValueError as error:
        return difference(model, before), str(error)
    return None


def set_weights(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def resumes(through, folder):
    """Save after the first bases, load into a new model and optimizer, and continue; returns the
    difference to training that was never stopped."""
    model, later = fsdp2(), fsdp2()
    optimizer, resumed = trained(model, 11), adapted(later)
    if through == "state_dict":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        resumed.load_state_dict(resumed.state_dict())  # before any step
    elif through == "dcp":
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        loaded = {"optimizer": get_optimizer_state_dict(later, resumed)}
        dcp.load(loaded, checkpoint_id=folder)
        set_optimizer_state_dict(later, resumed, loaded["optimizer"])
    elif through == "flat":
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(
            later, resumed, get_optimizer_state_dict(model, optimizer, options=flat), options=flat
        )
    elif through == "whole":
        resumed.load_state_dict(trained(make(), 11).state_dict())
    set_weights(later, {name: p.detach() for name, p in model.named_parameters()})
    train(later, resumed, 11, NUM_STEPS)
    return difference(later, expected())


class MeshOfGPUs:
    """Answers like a mesh whose processes exchange through NCCL, as in FSDP2 with offloading to the
    CPU."""

    ndim, mesh = 1, torch.arange(2)

    def __init__(self, group):
        self.get_group = lambda: group


def offloaded():
    """The process group through which shards on the CPU are exchanged if the mesh's own group takes
    only tensors on GPUs."""
    own = dist.new_group([0, 1], backend="gloo")
    config = dist.get_backend_config
    with patch.object(
        dist, "get_backend_config", lambda group: "cuda:nccl" if group is own else config(group)
    ):
        group = Sharding()._group(MeshOfGPUs(own), torch.device("cpu"))
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    return group is not own, dist.get_process_group_ranks(group), total.item()


def taken_over():
    """Continue AdamW under FSDP2: without a basis yet, the next steps are AdamW's."""
    model, twin = fsdp2(), make()
    first, alone = (
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.optim.AdamW(twin.parameters(), lr=0.01),
    )
    train(model, first, 0, 12)
    optimizer = BasisRotation(param_groups(model), lr=0.01, first_refresh=100)
    optimizer.take_over(first)
    train(model, optimizer, 12, NUM_STEPS)
    train(twin, alone, 0, NUM_STEPS)
    return difference(model, whole(twin))


def whole_state_fits_one_process():
    model = fsdp2()
    full = get_optimizer_state_dict(
        model, trained(model, 11), options=StateDictOptions(full_state_dict=True)
    )
    weights = whole(model)
    if dist.get_rank() != 0:
        return None
    single = make()
    set_weights(single, weights)
    alone = adapted(single)
    numbers = {
        name: n for n, name in enumerate(n for g in alone.param_groups for n in g["param_names"])
    }
    state = {numbers[name]: values for name, values in full["state"].items()}
    alone.load_state_dict({**alone.state_dict(), "state": state})
    train(single, alone, 11, NUM_STEPS)
    return difference(single, expected())


def sharded_state_fits_whole_parameters():
    model, alone = fsdp2(), make()
    optimizer, its = trained(model, 11), adapted(alone)
    its.load_state_dict(optimizer.state_dict())
    set_weights(alone, whole(model))
    train(alone, its, 11, NUM_STEPS)
    return difference(alone, expected())


def saves_entries_of_the_program():
    model = fsdp2()
    optimizer = trained(model, 2)
    optimizer.state[model.up.weight]["mine"] = 3
    states = optimizer.state_dict()["state"].values()
    return [state["mine"] for state in states if "mine" in state]


def cases(folder):
    """The cases by name. With four processes, only those that differ from two."""
    common = {
        "fsdp2": lambda: trains_as_one_process(fsdp2),
        "sequence parallel": sequence_parallel,
        "tensor parallel": lambda: trains_as_one_process(tensor_parallel, geometry="unilateral"),
    }
    if dist.get_world_size() == 4:
        return common | {
            "fsdp2 and tensor parallel": lambda: trains_as_one_process(both, geometry="unilateral"),
            "hybrid": lambda: trains_as_one_process(
                lambda: fully_shard(make(), mesh=two_dimensions())
            ),
        }
    return common | {
        "fsdp2, 1st unilateral": lambda: trains_as_one_process(
            fsdp2, source="1st", geometry="unilateral"
        ),
        "fsdp2, staggered": lambda: trains_as_one_process(
            fsdp2, staggered=True, covariance="interval"
        ),
        "half precision": half_precision,
        "bad gradient": bad_gradient,
        "matrices per rank": matrices_per_rank,
        "updates of an empty shard": updates_of_an_empty_shard,
        **{
            f"resume through {name}": partial(resumes, name, folder)
            for name in ("state_dict", "dcp", "flat", "whole")
        },
        "offloaded": offloaded,
        "adamw taken over": taken_over,
        "full state": whole_state_fits_one_process,
        "whole parameters": sharded_state_fits_whole_parameters,
        "entries of the program": saves_entries_of_the_program,
    }


def work(out):
    """Be one of the processes that the environment names; rank 0 writes the results to `out`."""
    dist.init_process_group("gloo")
    results = {}
    for name, run in cases(out.parent / "dcp").items():
        try:
            results[name] = run()
        except Exception:
            traceback.print_exc()
            results[name] = traceback.format_exc()
            break  # the ranks may no longer be at the same place
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
