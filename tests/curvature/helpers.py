"""Models that are small enough to compute their whole Hessian, and small finished runs."""

import pytest
import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from brx.config.schema import GPTConfig, MoEConfig
from brx.curvature.norm_result import Groups, NormResult
from brx.model.mixture import Mixture
from brx.model.stage import whole_model
from brx.train.loop import train
from tests.train.helpers import tiny_config

VOCABULARY = 7
KINDS = {
    "dense": None,
    "mixture": MoEConfig(experts=3, top_k=2, every=2, load_balance_weight=0.5, router_z_weight=0.1),
}


def tiny_model(kind, dtype=torch.float64):
    """A model of about a thousand parameters, values for them that differ from the special initial
    ones (zero biases and the like), and a batch."""
    config = GPTConfig(blocks=2, width=4, heads=2, sequence_length=5, moe=KINDS[kind])
    model = whole_model(config, VOCABULARY, seed=0)
    generator = torch.Generator().manual_seed(1)
    parameters = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameters[name] = (parameter.detach() + 0.5 * noise).to(dtype)
    inputs, targets = torch.randint(VOCABULARY, (2, 3, 5), generator=generator)
    return model, parameters, (inputs, targets)


def flat(vectors):
    """A dictionary of tensors as one vector (d,)."""
    return torch.cat([value.flatten() for value in vectors.values()])


def unflat(vector, like):
    """The reverse of `flat`, with the names and shapes of `like`."""
    parts = vector.split([value.numel() for value in like.values()])
    return {
        name: part.view_as(value) for part, (name, value) in zip(parts, like.items(), strict=True)
    }


def full_hessian(model, parameters, batch):
    """The Hessian (d, d), in forward mode over reverse mode.

    `torch.func.hessian` runs the backward pass under `vmap`, where torch 2.13 differentiates layer
    norm's weight gradient wrongly: the matrix is not even symmetric."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < (2, 13) and any(isinstance(module, Mixture) for module in model.modules()):
        pytest.skip("torch.func's transforms of this torch hide the numbers of tokens by expert")

    def loss(vector):
        _, loss, auxiliary = functional_call(model, unflat(vector, parameters), batch)
        return loss if auxiliary is None else loss + auxiliary

    with sdpa_kernel(SDPBackend.MATH):
        matrix = torch.func.jacfwd(torch.func.grad(loss))(flat(parameters))
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-12)
    return matrix


def random_like(parameters, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in parameters.items()
    }


def finished_run(folder, name, *overrides):
    """A finished run of tiny_config in folder/name, with checkpoints at 7, 14, 21, 28 and 30."""
    run = folder / name
    train(tiny_config(folder, "training.keep_checkpoints=9", *overrides), run)
    return run


def norm_result(
    run, method, stages, iteration, space, num_parameters, norm, squares, covariance=None, **others
):
    """A made-up measurement.

    `squares` are the sums of the squared row norms of the embedding, of each block and of the head;
    `covariance` is the covariance of these sums (zero by default). `others` are further fields."""
    count = len(squares)
    names = ["embedding", *map(str, range(count - 2)), "head"]
    zero = [[0.0] * count] * count
    groups = Groups(
        names=names,
        num_rows=[1] * count,
        sums=[[1.0] * count, list(squares)],
        covariances=[zero, covariance or zero],
    )
    content = {
        "standard_error": 0.0,
        "below_resolution": 0.0,
        "settings": {"vectors": 5, "batches_per_vector": 2, "basis_batches": 7},
        "tokens": 64,
    } | others
    return NormResult(
        run=str(run),
        method=method,
        num_stages=stages,
        iteration=iteration,
        space=space,
        norm=norm,
        num_parameters=num_parameters,
        blocks=groups,
        kinds=groups,
        num_own_stages=stages,
        **content,
    )
