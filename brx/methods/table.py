"""The methods: each is an optimizer, a learning-rate rule and a gradient rule, readable by itself in `METHODS`.

The stash mode belongs to the pipeline (`pipeline.stash`); any method runs with any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.methods import builders
from brx.methods.learning_rate import annealed_delay_divisor
from brx.pipeline.versions import StageVersions

MATRICES = "weight matrices of attention and MLP (each expert's by itself)"
REST = "embeddings, head, router, biases, norms"
ALL = "all parameters"

CURVATURE_OF_MATRICES = (
    "its curvature estimate is one of matrices inside the network; embeddings and head have a side of the size of the"
    " vocabulary, and vectors have no two sides (the paper, appendix 'Experimental Details')"
)


@dataclass(frozen=True)
class Method:
    """One way to train under delay.

    Attributes:
        summary: what it is, in a line.
        source: where it comes from.
        equation: its update, as `brx methods` prints it.
        gets: which optimizer gets which parameters.
        why: the reason.
        config: the section of the configuration that selects it.
        optimizers: makes the optimizers of one device from the configuration and the device's stages.
        lr_divisor: (config, delay, iteration) to the number that divides a stage's learning rate.
        gradient_rule: changes a stage's gradients in place before clipping, given (config, gradients, newest weights,
            weights that the backward pass used); None for none.
    """

    summary: str
    source: str
    equation: str
    gets: dict[str, str]
    why: str
    config: type[schema.Section]
    optimizers: Callable[[RunConfig, Sequence[StageVersions]], list[Optimizer]]
    lr_divisor: Callable[[RunConfig, int, int], float] = lambda config, delay, iteration: 1.0
    gradient_rule: Callable[[RunConfig, list[Tensor], list[Tensor], list[Tensor]], None] | None = None


def _pipedream_lr_divisor(config: RunConfig, delay: int, iteration: int) -> float:
    assert isinstance(config.optimizer, schema.PipeDreamLRConfig)
    annealing_iterations = config.optimizer.annealing_fraction * config.training.iterations
    return annealed_delay_divisor(delay, iteration, annealing_iterations)


def _compensate_delay(config: RunConfig, gradients: list[Tensor], newest: list[Tensor], used: list[Tensor]) -> None:
    """g <- g + lambda g*g*(w_now - w_used)."""
    assert isinstance(config.optimizer, schema.DelayCompensationConfig)
    correction = torch._foreach_sub(newest, used)
    torch._foreach_mul_(correction, gradients)
    torch._foreach_mul_(correction, gradients)
    torch._foreach_add_(gradients, correction, alpha=config.optimizer.compensation)


CUSTOM = "package.module:Class"
"""The key in `METHODS` of every optimizer that is given by its import path."""

METHODS: dict[str, Method] = {
    "pipedream": Method(
        summary="AdamW on delayed gradients",
        source="Narayanan et al. 2019 (arXiv:1806.03377); Loshchilov & Hutter (arXiv:1711.05101)",
        equation="w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)",
        gets={"AdamW": ALL},
        why="AdamW works coordinate by coordinate",
        config=schema.PipeDreamConfig,
        optimizers=builders.adamw_everywhere,
    ),
    "pipedream-lr": Method(
        summary="AdamW, a stage's learning rate lowered by its delay early in training",
        source="Yang et al. 2021, PipeMare T1 (arXiv:1910.05124)",
        equation="lr_k(t) = lr(t) / tau_k^(1 - min(t / T_c, 1)), tau_k >= 1; then AdamW",
        gets={"AdamW": ALL},
        why="AdamW works coordinate by coordinate",
        config=schema.PipeDreamLRConfig,
        optimizers=builders.adamw_everywhere,
        lr_divisor=_pipedream_lr_divisor,
    ),
    "nesterov": Method(
        summary="NAdam with beta1 0.99 and decoupled weight decay",
        source="Ajanthan et al. 2025 (arXiv:2505.01099); Dozat 2016",
        equation="w <- (1 - lr wd) w - lr (mu_{t+1} m^ + (1 - mu_t) g^) / (sqrt(v^) + eps)",
        gets={"NAdam": ALL},
        why="NAdam works coordinate by coordinate",
        config=schema.NesterovConfig,
        optimizers=builders.nadam,
    ),
    "basis-rotation": Method(
        summary="Adam in the Hessian's Kronecker eigenbasis for attention and MLP matrices, AdamW for the rest",
        source="the paper's algorithms 1 and 2",
        equation="W <- (1 - lr wd) W - lr U [ (U^T M V)^ / (sqrt(v^) + eps) ] V^T, v of (U^T G V)^2",
        gets={"BasisRotation": MATRICES, "AdamW": REST},
        why=CURVATURE_OF_MATRICES,
        config=schema.BasisRotationConfig,
        optimizers=builders.basis_rotation,
    ),
    "delay-compensation": Method(
        summary="AdamW on gradients corrected to first order for what the weights did meanwhile",
        source="Zheng et al. 2017 (arXiv:1609.08326)",
        equation="g <- g + lambda g*g*(w_now - w_used), before clipping; then AdamW",
        gets={"AdamW": ALL},
        why="the correction and AdamW work coordinate by coordinate",
        config=schema.DelayCompensationConfig,
        optimizers=builders.adamw_everywhere,
        gradient_rule=_compensate_delay,
    ),
    "soap": Method(
        summary="SOAP (pytorch-optimizer) for attention and MLP matrices, AdamW for the rest",
        source="Vyas et al. 2024 (arXiv:2409.11321)",
        equation="W <- W - lr U [ U^T M V / (sqrt(v^) + eps) ] V^T; basis renewed after the step, L, R at every step",
        gets={"SOAP": MATRICES, "AdamW": REST},
        why=CURVATURE_OF_MATRICES,
        config=schema.SoapConfig,
        optimizers=builders.soap,
    ),
    "muon": Method(
        summary="Muon (torch.optim.Muon) for attention and MLP matrices, AdamW for the rest",
        source="Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982)",
        equation="W <- (1 - lr wd) W - 0.2 sqrt(max(m, n)) lr NewtonSchulz(Nesterov momentum of G)",
        gets={"Muon": MATRICES, "AdamW": REST},
        why="orthogonalisation is meant for matrices inside the network, and torch's Muon takes nothing else",
        config=schema.MuonConfig,
        optimizers=builders.muon,
    ),
    "scion": Method(
        summary="Scion (pytorch-optimizer): steps of fixed size in a norm chosen for each kind of parameter",
        source="Pethick et al. 2025 (arXiv:2502.07529)",
        equation="d <- (1 - a) d + a G; W <- (1 - lr) W - lr scale argmax_{|S| <= 1} <d, S>",
        gets={
            "SCION, spectral norm": MATRICES,
            "SCION, sign": "embeddings, head, router",
            "SCION, root mean square": "biases, norms",
        },
        why="Scion is a rule for all parameters: a norm for each kind (its table 2 and appendix E.3), no AdamW",
        config=schema.ScionConfig,
        optimizers=builders.scion,
    ),
    CUSTOM: Method(
        summary="any torch.optim.Optimizer, with keyword arguments from `optimizer.arguments`",
        source="the package that it is from",
        equation="its own",
        gets={"the class": ALL},
        why="brx cannot know which parameters it is meant for",
        config=schema.CustomConfig,
        optimizers=builders.custom,
    ),
}


def find_method(config: RunConfig) -> Method:
    """The method that a configuration selects."""
    return METHODS[CUSTOM if isinstance(config.optimizer, schema.CustomConfig) else config.optimizer.method]


def ring_matrix_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which the rings of older versions hold matrices: bf16 if autocast would cast them to it anyway.

    A gradient rule takes differences to the stashed versions, which bf16 would drown in rounding. In the modes that
    overwrite a slot before the backward pass there is no choice: from fp32, autocast would save a copy in the forward
    pass, and what is overwritten would never be seen.
    """
    takes_differences = find_method(config).gradient_rule is not None and config.pipeline.stash == "stash"
    return torch.bfloat16 if config.runtime.precision == "bf16" and not takes_differences else torch.float32
