"""The methods: each is an optimizer, a learning-rate rule and a gradient rule, readable by itself in `METHODS`.

The stash mode belongs to the pipeline (`pipeline.stash`); any method runs with any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import AdamW, NAdam, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.model.stage import is_rotated
from brx.optim.basis_rotation import BasisRotation
from brx.optim.schedule import annealed_delay_divisor
from brx.pipeline.versions import StageVersions

Group = dict[str, Any]
"""A torch parameter group: the named parameters of one stage, with the keys `stage` and `delay`."""


@dataclass(frozen=True)
class Method:
    """One way to train under delay.

    Attributes:
        summary: what it is, in a line.
        source: where it comes from.
        equation: its update, as `brx methods` prints it.
        config: the section of the configuration that selects it.
        optimizers: makes the optimizers of one device from the configuration and the device's stages.
        lr_divisor: (config, delay, iteration) to the number that divides a stage's learning rate.
        gradient_rule: changes a stage's gradients in place before clipping; None for none.
    """

    summary: str
    source: str
    equation: str
    config: type[schema.Section]
    optimizers: Callable[[RunConfig, Sequence[StageVersions]], list[Optimizer]]
    lr_divisor: Callable[[RunConfig, int, int], float] = lambda config, delay, iteration: 1.0
    gradient_rule: Callable[[RunConfig, list[Tensor], list[Tensor], list[Tensor]], None] | None = None


def stage_groups(stages: Sequence[StageVersions], select: Callable[[str], bool] = lambda name: True) -> list[Group]:
    """One parameter group per stage with the parameters that `select` picks by name; stages with none are left out."""
    groups = []
    for stage in stages:
        named = [(name, parameter) for name, parameter in stage.live.items() if select(name)]
        if named:
            groups.append({"params": named, "stage": stage.index, "delay": stage.delay})
    return groups


def is_rest(name: str) -> bool:
    """Whether a parameter is none of the matrices of attention and MLP."""
    return not is_rotated(name)


def adamw(config: RunConfig, groups: list[Group]) -> Optimizer:
    """Fused AdamW with the common hyperparameters; all parameters decay."""
    common = _common(config)
    return AdamW(
        groups,
        lr=common.lr,
        betas=(common.beta1, common.beta2),
        eps=common.eps,
        weight_decay=common.weight_decay,
        fused=True,
    )


def _adamw_everywhere(config: RunConfig, stages: Sequence[StageVersions]) -> list[Optimizer]:
    return [adamw(config, stage_groups(stages))]


def _pipedream_lr_divisor(config: RunConfig, delay: int, iteration: int) -> float:
    assert isinstance(config.optimizer, schema.PipeDreamLRConfig)
    annealing_iterations = config.optimizer.annealing_fraction * config.training.iterations
    return annealed_delay_divisor(delay, iteration, annealing_iterations)


def _nadam(config: RunConfig, stages: Sequence[StageVersions]) -> list[Optimizer]:
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


def _basis_rotation(config: RunConfig, stages: Sequence[StageVersions]) -> list[Optimizer]:
    optimizer = config.optimizer
    assert isinstance(optimizer, schema.BasisRotationConfig)
    rotation = BasisRotation(
        stage_groups(stages, is_rotated),
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        source=optimizer.source,
        geometry=optimizer.geometry,
        frequency=optimizer.frequency,
        covariance=optimizer.covariance,
        staggered=optimizer.staggered,
    )
    return [rotation, adamw(config, stage_groups(stages, is_rest))]


def _common(config: RunConfig) -> schema.OptimizerSection:
    assert isinstance(config.optimizer, schema.OptimizerSection)
    return config.optimizer


METHODS: dict[str, Method] = {
    "pipedream": Method(
        summary="AdamW on delayed gradients",
        source="Narayanan et al. 2019 (arXiv:1806.03377); Loshchilov & Hutter (arXiv:1711.05101)",
        equation="w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)",
        config=schema.PipeDreamConfig,
        optimizers=_adamw_everywhere,
    ),
    "pipedream-lr": Method(
        summary="AdamW, a stage's learning rate lowered by its delay early in training",
        source="Yang et al. 2021, PipeMare T1 (arXiv:1910.05124)",
        equation="lr_k(t) = lr(t) / tau_k^(1 - min(t / T_c, 1))",
        config=schema.PipeDreamLRConfig,
        optimizers=_adamw_everywhere,
        lr_divisor=_pipedream_lr_divisor,
    ),
    "nesterov": Method(
        summary="NAdam with beta1 0.99 and decoupled weight decay",
        source="Ajanthan et al. 2025 (arXiv:2505.01099); Dozat 2016",
        equation="w <- (1 - lr wd) w - lr (mu_{t+1} m^ + (1 - mu_t) g^) / (sqrt(v^) + eps)",
        config=schema.NesterovConfig,
        optimizers=_nadam,
    ),
    "basis-rotation": Method(
        summary="Adam in the Hessian's Kronecker eigenbasis for attention and MLP matrices, AdamW for the rest",
        source="the paper's algorithms 1 and 2",
        equation="W <- (1 - lr wd) W - lr U [ (U^T M V) / (sqrt(v of U^T G V) + eps) ] V^T",
        config=schema.BasisRotationConfig,
        optimizers=_basis_rotation,
    ),
}


def find_method(config: RunConfig) -> Method:
    """The method that a configuration selects."""
    return METHODS[config.optimizer.method]
