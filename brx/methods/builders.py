"""Makes each method's optimizers for the stages of one device.

"The matrices" are those of attention and MLP (`brx.model.stage.is_block_matrix`), a mixture's experts each by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import AdamW, NAdam, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.custom import make_optimizer
from brx.methods.groups import Group, StackViews, is_rest, stage_groups
from brx.methods.refresh_schedule import refresh_intervals
from brx.model.stage import is_block_matrix
from brx.optim.basis_rotation import BasisRotation
from brx.pipeline.delay import stage_delays
from brx.pipeline.versions import StageVersions

Stages = Sequence[StageVersions]


def adamw(config: RunConfig, groups: list[Group]) -> Optimizer:
    """Fused AdamW with the common hyperparameters; all parameters decay."""
    common = config.optimizer
    assert isinstance(common, schema.OptimizerSection)
    betas = (common.beta1, common.beta2)
    return AdamW(groups, lr=common.lr, betas=betas, eps=common.eps, weight_decay=common.weight_decay, fused=True)


def adamw_everywhere(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """AdamW for all parameters."""
    return [adamw(config, stage_groups(stages))]


def nadam(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """NAdam for all parameters."""
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.NesterovConfig)
    return [
        NAdam(
            stage_groups(stages),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            momentum_decay=optimizer.momentum_decay,
            decoupled_weight_decay=True,
        )
    ]


def basis_rotation(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """BasisRotation for the matrices, AdamW for the rest."""
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.BasisRotationConfig)
    intervals = refresh_intervals(stage_delays(config.pipeline), optimizer.frequency, optimizer.allocation)
    rotation = BasisRotation(
        [{**group, "frequency": intervals[group["stage"]]} for group in stage_groups(stages, is_block_matrix)],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        source=optimizer.source,
        geometry=optimizer.geometry,
        covariance=optimizer.covariance,
        staggered=optimizer.staggered,
        rotation_precision=optimizer.rotation_precision,
    )
    return [rotation, adamw(config, stage_groups(stages, is_rest))]


def soap(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """pytorch-optimizer's SOAP for the matrices, AdamW for the rest."""
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.SoapConfig)
    matrices, views = _single_matrices(stages)
    library_soap = _pytorch_optimizer("soap").SOAP(
        matrices,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        precondition_frequency=optimizer.frequency,
    )
    return [views.attach(library_soap), adamw(config, stage_groups(stages, is_rest))]


def muon(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """torch's Muon for the matrices, AdamW for the rest."""
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.MuonConfig)
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"method muon needs torch >= 2.9 (torch.optim.Muon), this is {torch.__version__}")
    matrices, views = _single_matrices(stages)
    torch_muon = torch.optim.Muon(
        matrices,
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        adjust_lr_fn=optimizer.adjust_lr,
    )
    return [views.attach(torch_muon), adamw(config, stage_groups(stages, is_rest))]


def scion(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """pytorch-optimizer's Scion for all parameters, each kind with its own norm.

    The norms are those of the Scion paper's language models (table 2 and appendix E.3): spectral for matrices inside
    the model, sign for embeddings and head, root mean square for vectors.
    """
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.ScionConfig)
    library = _pytorch_optimizer("scion")
    norms = importlib.import_module("pytorch_optimizer.optimizer.scion").LMONorm
    groups = stage_groups(stages)
    views = StackViews.split(groups, _dimensions_of_one)
    kinds = {
        "matrix": {"norm_type": int(norms.SPECTRAL), "scale": optimizer.scale},
        "vector": {"norm_type": int(norms.BIAS), "scale": optimizer.vector_scale},
        "embedding": {"norm_type": int(norms.SIGN), "scale": optimizer.rest_scale},
    }
    by_kind = []
    for group in groups:
        for kind, options in kinds.items():
            named = [(name, parameter) for name, parameter in group["params"] if _scion_kind(name, parameter) == kind]
            if named:
                by_kind.append({**group, **options, "params": named, "kind": kind})
    library_scion = library.SCION(
        by_kind, lr=optimizer.lr, momentum=optimizer.momentum, constraint=optimizer.constrained
    )
    return [views.attach(library_scion)]


def custom(config: RunConfig, stages: Stages) -> list[Optimizer]:
    """Any torch optimizer for all parameters."""
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.CustomConfig)
    return [make_optimizer(optimizer.method, stage_groups(stages), optimizer.lr, optimizer.arguments)]


def _single_matrices(stages: Stages) -> tuple[list[Group], StackViews]:
    groups = stage_groups(stages, is_block_matrix)
    return groups, StackViews.split(groups, _dimensions_of_one)


def _dimensions_of_one(name: str) -> int:
    return 2 if name.endswith("weight") and "norm" not in name else 1


def _scion_kind(name: str, parameter: torch.Tensor) -> str:
    if is_block_matrix(name.partition("[")[0]):
        return "matrix"
    return "vector" if parameter.ndim == 1 else "embedding"


def _pytorch_optimizer(method: str) -> Any:
    try:
        return importlib.import_module("pytorch_optimizer")
    except ImportError:
        raise UserError(
            f"method {method} needs the package pytorch-optimizer: pip install 'brx[rivals]' (or pytorch-optimizer)"
        ) from None
