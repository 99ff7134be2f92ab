"""What optimizers keep and compute beyond the passes; of BasisRotation by its own `state_shapes` on the meta device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods.table import METHODS
from brx.model.sizes import FP32, Shapes, num_elements
from brx.model.stage import is_block_matrix
from brx.optim.basis_rotation import BasisRotation
from brx.optim.matrix_batch import BATCH_BYTES
from brx.optim.parameter_state import state_shapes

Source = Literal["2nd", "1st"]
Geometry = Literal["bilateral", "unilateral"]
STRATEGIES: tuple[tuple[Source, Geometry], ...] = tuple(itertools.product(get_args(Source), get_args(Geometry)))
SOAP_LONGEST_SIDE = 10_000  # pytorch-optimizer's `max_precondition_dim`: its SOAP keeps nothing for a longer side
NEWTON_SCHULZ_STEPS = 5  # of torch's Muon and pytorch-optimizer's Scion


class Rotation(NamedTuple):
    """What a method keeps for one parameter (*lead, m, n) beyond moments; no sides where it does not rotate it."""

    sides: tuple[int, ...]  # the lengths of those that are rotated
    bases: int  # elements of U and V, of all matrices of the stack
    covariances: int  # elements of L and R


@lru_cache(maxsize=1024)
def rotation(optimizer: schema.BasisRotationConfig | schema.SoapConfig, shape: tuple[int, ...]) -> Rotation:
    if isinstance(optimizer, schema.SoapConfig):
        sides = tuple(side for side in shape[-2:] if side <= SOAP_LONGEST_SIDE)
        elements = math.prod(shape[:-2]) * sum(side**2 for side in sides)
        return Rotation(sides, elements, elements)
    method = METHODS["basis-rotation"].bound_to(RunConfig(optimizer=optimizer))
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    return _kept(parameter, method.matrices([{"params": [("weight", parameter)], "stage": 0, "delay": 0.0}]))


def overhead_elements(shape: tuple[int, ...], source: Source, geometry: Geometry) -> int:
    """Elements beyond Adam's two moments, however long the sides (appendix "Memory Overhead Analysis")."""
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    kept = _kept(parameter, BasisRotation([parameter], source=source, geometry=geometry, max_dim=None))
    return kept.bases + kept.covariances


def _kept(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Rotation:
    shapes = state_shapes(parameter, optimizer.param_groups[0])
    bases = [shape for name, shape in shapes.items() if name.endswith("_basis")]
    covariances = [shape for name, shape in shapes.items() if name.endswith("_covariance")]
    return Rotation(tuple(shape[-1] for shape in bases), sum(map(math.prod, bases)), sum(map(math.prod, covariances)))


def rotations(config: RunConfig, shapes: Shapes) -> Iterator[tuple[tuple[int, ...], Rotation]]:
    """The matrices that the run's method rotates, one by one, each with what is kept for it."""
    optimizer = config.optimizer
    if isinstance(optimizer, schema.BasisRotationConfig | schema.SoapConfig):
        for shape in matrices(shapes):
            yield shape, rotation(optimizer, shape)


def matrices(shapes: Shapes) -> Iterator[tuple[int, ...]]:
    return (shape for name, shape in shapes.items() if is_block_matrix(name))


def optimizer_bytes(config: RunConfig, shapes: Shapes) -> tuple[int, int]:
    """Bytes of the method's moments, and of its rotation matrices, for these parameters."""
    moments = 2 * FP32 * num_elements(shapes)
    if isinstance(config.optimizer, schema.MuonConfig):  # one moment for a matrix
        moments -= FP32 * sum(map(math.prod, matrices(shapes)))
    if isinstance(config.optimizer, schema.ScionConfig):
        moments //= 2
    return moments, FP32 * sum(kept.bases + kept.covariances for _, kept in rotations(config, shapes))


def method_flops(config: RunConfig, shapes: Shapes) -> float:
    """Operations of the method's own matrix products, an iteration on average.

    A rotation U^T G V takes 2 m n (m + n): one for the gradient and one for the update; at a refresh two more for the
    momentum, and for each side a product and a QR decomposition, about 7 m^3. The covariances take 2 m n (m + n)
    whenever a gradient enters them, and so do the momentum's at a refresh of source `1st`. A side that is not rotated
    takes no part. Muon and Scion orthogonalise by five Newton-Schulz steps, each 4 m^2 n + 2 m^3 with m <= n.
    """
    optimizer, total = config.optimizer, 0.0
    if isinstance(optimizer, schema.MuonConfig | schema.ScionConfig):
        for *lead, rows, columns in matrices(shapes):
            m, n = sorted((rows, columns))
            total += math.prod(lead) * NEWTON_SCHULZ_STEPS * (4 * m**2 * n + 2 * m**3)
        return total
    for shape, kept in rotations(config, shapes):
        assert isinstance(optimizer, schema.BasisRotationConfig | schema.SoapConfig)
        at_every_step = isinstance(optimizer, schema.SoapConfig) or (
            optimizer.source == "2nd" and optimizer.covariance == "step"
        )
        product = 2 * shape[-2] * shape[-1] * sum(kept.sides)
        covariances = product / (1 if at_every_step else optimizer.frequency)
        refresh = 2 * product + 7 * sum(side**3 for side in kept.sides)
        total += math.prod(shape[:-2]) * (2 * product + covariances + refresh / optimizer.frequency)
    return total


def rotation_update_bytes(config: RunConfig, shapes: Shapes, device_type: str) -> int:
    """Of BasisRotation's largest batch of equal matrices at a refresh; `shapes` are all of the device."""
    largest, all_matrices = 0, list(matrices(shapes))
    for shape, kept in dict(rotations(config, shapes)).items():
        size = math.prod(shape)
        capacity = max(1, BATCH_BYTES.get(device_type, BATCH_BYTES["cuda"]) // (FP32 * size))
        members = min(all_matrices.count(shape), capacity)
        side = math.prod(shape[:-2]) * max(kept.sides, default=0) ** 2
        # Gradients, momentum, both moments anew, their way through the products with the bases. For the side under
        # way: the product with its basis, and what its columns are orthonormalised in, on the CPU a padded copy,
        # elsewhere the columns, their products, the triangular factor and the solution, in float64.
        orthonormalisation = 1 if device_type == "cpu" else 7
        per_member = (3 + 2 * len(kept.sides)) * size + (1 + orthonormalisation) * side
        largest = max(largest, FP32 * members * per_member)
    return largest
