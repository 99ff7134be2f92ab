"""The built-in methods, each readable by itself, and the method that a configuration selects.

A method is a subclass of `Method` (method.py), which overrides what it has something to say about. For your own use it
lives in a file of yours, and nothing here changes: `optimizer.method=my_method.py:MyMethod` (docs/methods.md;
`torch.optim:Adamax` names any torch optimizer instead). To come with brx, it goes here and into `METHODS`, its settings
into a section of brx/config/schema.py.

What the backward pass sees (`pipeline.stash`) belongs to the pipeline: any method runs with any mode, but for one with
a forecast of its own, which needs `exact`.

"Matrices" are the weight matrices of attention and MLP (`brx.model.stage.is_block_matrix`), a mixture's experts each by
itself.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import NAdam, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.custom import AnyOptimizer, load_method
from brx.methods.groups import StackViews, stage_groups
from brx.methods.method import Method, Stages, dimensions_of_one
from brx.methods.refresh_schedule import refresh_intervals
from brx.model.stage import is_block_matrix
from brx.optim.basis_rotation import BasisRotation
from brx.optim.options import Group
from brx.pipeline.delay import stage_delays
from brx.pipeline.forecast import ParameterStates

MATRICES = "weight matrices of attention and MLP (each expert's by itself)"
REST = "embeddings, head, router, biases, norms"
ALL = "all parameters"

CURVATURE_OF_MATRICES = (
    "its curvature estimate is one of matrices inside the network; embeddings and head have a side of the size of the"
    " vocabulary, and vectors have no two sides (the paper, appendix 'Experimental Details')"
)


class AdamWEverywhere(Method):
    """AdamW for all parameters."""

    gets: ClassVar = {"AdamW": ALL}
    why = "AdamW works coordinate by coordinate"

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        return [self.adamw(stage_groups(stages))]


class PipeDream(AdamWEverywhere):
    """AdamW whatever the delay: what the other methods are measured against."""

    summary = "AdamW on delayed gradients"
    source = "Narayanan et al. 2019 (arXiv:1806.03377); Loshchilov & Hutter (arXiv:1711.05101)"
    equation = "w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)"
    section = schema.PipeDreamConfig


class PipeDreamLR(AdamWEverywhere):
    """PipeMare's T1: the rate of a delayed stage starts lower."""

    summary = "AdamW, a stage's learning rate lowered by its delay early in training"
    source = "Yang et al. 2021, PipeMare T1 (arXiv:1910.05124)"
    equation = "lr_k(t) = lr(t) / tau_k^(1 - min(t / T_c, 1)), tau_k >= 1; then AdamW"
    section = schema.PipeDreamLRConfig

    def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
        """tau^(1 - min(t / T_c, 1)), and 1 where tau, in updates, is below 1."""
        optimizer = self.config.optimizer
        assert isinstance(optimizer, schema.PipeDreamLRConfig)
        exponent = 1.0 - min(t / (optimizer.annealing_fraction * T), 1.0)
        return float(max(1, tau_updates) ** exponent)


class DelayCompensation(AdamWEverywhere):
    """A first-order correction of the gradient, then AdamW."""

    summary = "AdamW on gradients corrected to first order for what the weights did meanwhile"
    source = "Zheng et al. 2017 (arXiv:1609.08326)"
    equation = "g <- g + lambda g*g*(w_now - w_used), before clipping; then AdamW"
    why = "the correction and AdamW work coordinate by coordinate"
    section = schema.DelayCompensationConfig

    def correct_gradients(
        self, gradients: list[Tensor], newest: list[Tensor], used: list[Tensor], state: ParameterStates
    ) -> None:
        """g <- g + lambda g*g*(w_now - w_used)."""
        assert isinstance(self.config.optimizer, schema.DelayCompensationConfig)
        correction = torch._foreach_sub(newest, used)
        torch._foreach_mul_(correction, gradients)
        torch._foreach_mul_(correction, gradients)
        torch._foreach_add_(gradients, correction, alpha=self.config.optimizer.compensation)


class Nesterov(Method):
    """NAdam for all parameters."""

    summary = "NAdam with beta1 0.99 and decoupled weight decay"
    source = "Ajanthan et al. 2025 (arXiv:2505.01099); Dozat 2016"
    equation = "w <- (1 - lr wd) w - lr (mu_{t+1} m^ + (1 - mu_t) g^) / (sqrt(v^) + eps)"
    gets: ClassVar = {"NAdam": ALL}
    why = "NAdam works coordinate by coordinate"
    section = schema.NesterovConfig

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        optimizer = self.config.optimizer
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


class BasisRotationMethod(Method):
    """The paper's method: BasisRotation on matrices, at each stage's refresh intervals."""

    summary = "Adam in the Hessian's Kronecker eigenbasis for attention and MLP matrices, AdamW for the rest"
    source = "the paper's algorithms 1 and 2"
    equation = "W <- (1 - lr wd) W - lr U [ (U^T M V)^ / (sqrt(v^) + eps) ] V^T, v of (U^T G V)^2"
    gets: ClassVar = {"BasisRotation": MATRICES, "AdamW": REST}
    why = CURVATURE_OF_MATRICES
    section = schema.BasisRotationConfig

    def matrices(self, groups: list[Group]) -> Optimizer:
        """BasisRotation, which takes stacks as they are; each stage refreshes at its own intervals."""
        optimizer = self.config.optimizer
        assert isinstance(optimizer, schema.BasisRotationConfig)
        intervals = refresh_intervals(
            stage_delays(self.config.pipeline), optimizer.frequency, optimizer.refresh_schedule
        )
        return BasisRotation(
            [{**group, "frequency": intervals[group["stage"]]} for group in groups],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            source=optimizer.source,
            geometry=optimizer.geometry,
            first_refresh=optimizer.first_refresh,
            covariance=optimizer.covariance,
            staggered=optimizer.staggered,
            rotation_precision=optimizer.rotation_precision,
            as_published=optimizer.as_published,
        )


class Soap(Method):
    """pytorch-optimizer's SOAP, which takes matrices one by one."""

    summary = "SOAP (pytorch-optimizer) for attention and MLP matrices, AdamW for the rest"
    source = "Vyas et al. 2024 (arXiv:2409.11321)"
    equation = "W <- W - lr U [ U^T M V / (sqrt(v^) + eps) ] V^T; basis refreshed after the step, L, R at every step"
    gets: ClassVar = {"SOAP": MATRICES, "AdamW": REST}
    why = CURVATURE_OF_MATRICES
    section = schema.SoapConfig
    one_matrix_at_a_time = True

    def matrices(self, groups: list[Group]) -> Optimizer:
        optimizer = self.config.optimizer
        assert isinstance(optimizer, schema.SoapConfig)
        soap: Optimizer = _pytorch_optimizer("soap").SOAP(
            groups,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            precondition_frequency=optimizer.frequency,
        )
        return soap


class Muon(Method):
    """torch's Muon, which takes matrices one by one."""

    summary = "Muon (torch.optim.Muon) for attention and MLP matrices, AdamW for the rest"
    source = "Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982)"
    equation = "W <- (1 - lr wd) W - 0.2 sqrt(max(m, n)) lr NewtonSchulz(Nesterov momentum of G)"
    gets: ClassVar = {"Muon": MATRICES, "AdamW": REST}
    why = "orthogonalisation is meant for matrices inside the network, and torch's Muon takes nothing else"
    section = schema.MuonConfig
    one_matrix_at_a_time = True

    def matrices(self, groups: list[Group]) -> Optimizer:
        optimizer = self.config.optimizer
        assert isinstance(optimizer, schema.MuonConfig)
        return torch.optim.Muon(
            groups,
            lr=optimizer.lr,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            adjust_lr_fn=optimizer.adjust_lr,
        )


class Scion(Method):
    """pytorch-optimizer's Scion.

    The norms are those of the Scion paper's language models (table 2 and appendix E.3): spectral for matrices inside
    the model, sign for embeddings and head, root mean square for vectors.
    """

    summary = "Scion (pytorch-optimizer): steps of fixed size in a norm chosen for each kind of parameter"
    source = "Pethick et al. 2025 (arXiv:2502.07529)"
    equation = "d <- (1 - a) d + a G; W <- (1 - lr) W - lr scale argmax_{|S| <= 1} <d, S>"
    gets: ClassVar = {
        "SCION, spectral norm": MATRICES,
        "SCION, sign": "embeddings, head, router",
        "SCION, root mean square": "biases, norms",
    }
    why = "Scion is a rule for all parameters: a norm for each kind (its table 2 and appendix E.3), no AdamW"
    section = schema.ScionConfig

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        """One optimizer in which each kind of parameter has its own norm."""
        optimizer = self.config.optimizer
        assert isinstance(optimizer, schema.ScionConfig)
        library = _pytorch_optimizer("scion")
        norms = importlib.import_module("pytorch_optimizer.optimizer.scion").LMONorm
        groups = stage_groups(stages)
        views = StackViews.split(groups, dimensions_of_one)
        kinds = {
            "matrix": {"norm_type": int(norms.SPECTRAL), "scale": optimizer.scale},
            "vector": {"norm_type": int(norms.BIAS), "scale": optimizer.vector_scale},
            "embedding": {"norm_type": int(norms.SIGN), "scale": optimizer.rest_scale},
        }
        by_kind = []
        for group in groups:
            for kind, options in kinds.items():
                named = [(name, parameter) for name, parameter in group["params"] if _kind(name, parameter) == kind]
                if named:
                    by_kind.append({**group, **options, "params": named, "kind": kind})
        scion = library.SCION(by_kind, lr=optimizer.lr, momentum=optimizer.momentum, constraint=optimizer.constrained)
        return [views.attach(scion)]


def _kind(name: str, parameter: Tensor) -> str:
    """Which of Scion's norms a parameter has."""
    if is_block_matrix(name.partition("[")[0]):
        return "matrix"
    return "vector" if parameter.ndim == 1 else "embedding"


def _pytorch_optimizer(method: str) -> Any:
    try:
        return importlib.import_module("pytorch_optimizer")
    except ImportError:
        raise UserError(
            f"method {method} needs the package pytorch-optimizer: pip install 'brx[baselines]' (or pytorch-optimizer)"
        ) from None


CUSTOM = "package.module:Class"
"""Under this name `brx methods` lists what is given by file or import path; `find_method` loads that itself."""

METHODS: dict[str, Method] = {
    "pipedream": PipeDream(),  # AdamW as it is; PipeDream's delays are those of any method here
    "pipedream-lr": PipeDreamLR(),
    "nesterov": Nesterov(),
    "basis-rotation": BasisRotationMethod(),
    "delay-compensation": DelayCompensation(),
    "soap": Soap(),
    "muon": Muon(),
    "scion": Scion(),
    CUSTOM: AnyOptimizer(),
}


def find_method(config: RunConfig) -> Method:
    """The method that a configuration selects, with that configuration as its `config`.

    Raises:
        UserError: it is a user's own, and cannot be loaded.
    """
    if isinstance(config.optimizer, schema.CustomConfig):
        return load_method(config.optimizer).bound_to(config)
    return METHODS[config.optimizer.method].bound_to(config)


def ring_matrix_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which the rings of older versions hold matrices: bf16 if autocast would cast them to it anyway.

    A gradient rule takes differences to the stashed versions, which bf16 would drown in rounding. In the modes that
    overwrite a slot before the backward pass there is no choice: from fp32, autocast would save a copy in the forward
    pass, and what is overwritten would never be seen.
    """
    takes_differences = find_method(config).corrects_gradients and config.pipeline.stash == "exact"
    return torch.bfloat16 if config.runtime.precision == "bf16" and not takes_differences else torch.float32
