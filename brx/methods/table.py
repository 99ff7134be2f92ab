"""The built-in methods, each readable by itself, and the method that a configuration selects.

Which weights the backward pass uses (`pipeline.stash`) is up to the pipeline: any method runs with
any mode, except that one with its own forecast needs `exact`. "Matrices" are the parameters in
`brx.model.stage.Stage.matrices`."""

import importlib
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import NAdam, Optimizer

from brx.config import schema
from brx.config.schema import RunConfig
from brx.errors import UserError
from brx.methods.bf16_products import with_fast_bf16_products
from brx.methods.custom import AnyOptimizer, load_method
from brx.methods.groups import (
    lend_gradients,
    matrix_names,
    split_stacks,
    stack_names,
    stage_groups,
)
from brx.methods.method import Method, Stages, adam_options
from brx.methods.muon import BatchedMuon
from brx.methods.product_costs import (
    TWO_QR_OPERATIONS,
    Products,
    newton_schulz_products,
    rotation_products,
)
from brx.optim.basis_rotation import BasisRotation
from brx.optim.options import Group
from brx.optim.parameter_state import state_shapes
from brx.pipeline.delay import StageDelay, VaryingDelay, stage_delays
from brx.pipeline.forecasts import ParameterStates

MATRICES = "weight matrices of attention and MLP (each expert's by itself)"
REST = "embeddings, head, router, biases, norms"
ALL = "all parameters"

SOAP_LONGEST_SIDE = 10_000
"""pytorch-optimizer's default of `max_precondition_dim`: its SOAP has no basis for longer sides."""

CURVATURE_OF_MATRICES = (
    "its curvature estimate is one of matrices inside the network; embeddings and head have a side "
    "of the size of the vocabulary, and vectors have no two sides (the paper, appendix "
    "'Experimental Details')"
)


class AdamWEverywhere(Method):
    gets: ClassVar = {"AdamW": ALL}
    why = "AdamW works coordinate by coordinate"

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        return [self.adamw(stage_groups(stages))]


class PipeDream(AdamWEverywhere):
    summary = "AdamW on delayed gradients"
    source = "Narayanan et al. 2019 (arXiv:1806.03377); Loshchilov & Hutter (arXiv:1711.05101)"
    equation = "w <- (1 - lr wd) w - lr m^ / (sqrt(v^) + eps)"
    section = schema.PipeDreamConfig


class PipeDreamLR(AdamWEverywhere):
    summary = "AdamW, a stage's learning rate lowered by its delay early in training"
    source = "Yang et al. 2021, PipeMare T1 (arXiv:1910.05124)"
    equation = "lr_k(t) = lr(t) / tau_k^(1 - min(t / T_c, 1)), tau_k >= 1; then AdamW"
    section = schema.PipeDreamLRConfig

    def lr_divisor(self, tau_updates: float, t: int, T: int) -> float:
        annealing_iterations = self.settings.annealing_fraction * T  # T_c
        exponent = 1.0 - min(t / annealing_iterations, 1.0)
        return float(max(1, tau_updates) ** exponent)


class DelayCompensation(AdamWEverywhere):
    summary = "AdamW on gradients corrected to first order for what the weights did meanwhile"
    source = "Zheng et al. 2017 (arXiv:1609.08326)"
    equation = "g <- g + lambda g*g*(w_now - w_used), before clipping; then AdamW"
    why = "the correction and AdamW work coordinate by coordinate"
    section = schema.DelayCompensationConfig

    def correct_gradients(
        self,
        gradients: list[Tensor],
        newest: list[Tensor],
        used: list[Tensor],
        state: ParameterStates,
    ) -> None:
        correction = torch._foreach_sub(newest, used)  # w_now - w_used
        torch._foreach_mul_(correction, gradients)
        torch._foreach_mul_(correction, gradients)  # g * g * (w_now - w_used)
        torch._foreach_add_(gradients, correction, alpha=self.settings.compensation)


class Nesterov(Method):
    summary = "NAdam with beta1 0.99 and decoupled weight decay"
    source = "Ajanthan et al. 2025 (arXiv:2505.01099); Dozat 2016"
    equation = "w <- (1 - lr wd) w - lr (mu_{t+1} m^ + (1 - mu_t) g^) / (sqrt(v^) + eps)"
    gets: ClassVar = {"NAdam": ALL}
    why = "NAdam works coordinate by coordinate"
    section = schema.NesterovConfig
    update_copies = 2  # torch's NAdam, over lists of tensors

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        options = {**adam_options(self.settings), "momentum_decay": self.settings.momentum_decay}
        return [NAdam(stage_groups(stages), lr=self.lr, **options, decoupled_weight_decay=True)]


class BasisRotationMethod(Method):
    summary = (
        "Adam in the Hessian's Kronecker eigenbasis for attention and MLP matrices, AdamW "
        "for the rest"
    )
    source = "the paper's algorithms 1 and 2"
    equation = "W <- (1 - lr wd) W - lr U [ (U^T M V)^ / (sqrt(v^) + eps) ] V^T, v of (U^T G V)^2"
    gets: ClassVar = {"BasisRotation": MATRICES, "AdamW": REST}
    why = CURVATURE_OF_MATRICES
    section = schema.BasisRotationConfig
    bases_in_state = frozenset(
        f"{side}_{kept}" for side in ("left", "right") for kept in ("basis", "covariance")
    )

    def matrices(self, groups: list[Group]) -> Optimizer:
        settings: schema.BasisRotationConfig = self.settings
        delays = stage_delays(self.config.pipeline, self.config.training.seed)
        intervals = refresh_intervals(delays, settings.frequency, settings.refresh_schedule)
        return BasisRotation(
            [{**group, "frequency": intervals[group["stage"]]} for group in groups],
            lr=settings.lr,
            **adam_options(settings),
            source=settings.source,
            geometry=settings.geometry,
            first_refresh=settings.first_refresh,
            covariance=settings.covariance,
            staggered=settings.staggered,
            rotation_precision=settings.rotation_precision,
            covariance_precision=settings.covariance_precision,
            as_published=settings.as_published,
            compiled=bool(self.config.runtime.compile),
        )

    def rotated_sides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        # The optimizer decides it. So it is made for one such weight, and asked which state that
        # weight would have.
        weight = torch.nn.Parameter(torch.empty(shape, device="meta"))
        group: Group = {"params": [("weight", weight)], "stage": 0, "delay": 0.0}
        options = self.matrices([group]).param_groups[0]
        kept = state_shapes(weight, options)
        return tuple(kept[name][-1] for name in ("left_basis", "right_basis") if name in kept)

    def products(self, shape: tuple[int, ...]) -> Products:
        settings: schema.BasisRotationConfig = self.settings
        at_every_step = settings.source == "2nd" and settings.covariance == "step"
        return rotation_products(
            shape,
            self.rotated_sides(shape),
            covariance_interval=1 if at_every_step else settings.frequency,
            refresh_interval=settings.frequency,
            refresh_operations=TWO_QR_OPERATIONS,
        )


class Soap(Method):
    summary = "SOAP (pytorch-optimizer) for attention and MLP matrices, AdamW for the rest"
    source = "Vyas et al. 2024 (arXiv:2409.11321)"
    equation = (
        "W <- (1 - lr wd) (W - lr U [ (U^T M V)^ / (sqrt(v^) + eps) ] V^T); basis refreshed after "
        "the step, L, R at every step"
    )
    gets: ClassVar = {"SOAP": MATRICES, "AdamW": REST}
    why = CURVATURE_OF_MATRICES
    section = schema.SoapConfig
    one_matrix_at_a_time = True
    bases_in_state = frozenset({"GG", "Q"})

    def matrices(self, groups: list[Group]) -> Optimizer:
        options = {**adam_options(self.settings), "precondition_frequency": self.settings.frequency}
        soap: Optimizer = _pytorch_optimizer("soap").SOAP(groups, lr=self.lr, **options)
        return soap

    def rotated_sides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(side for side in shape[-2:] if side <= SOAP_LONGEST_SIDE)

    def products(self, shape: tuple[int, ...]) -> Products:
        return rotation_products(
            shape,
            self.rotated_sides(shape),
            covariance_interval=1,
            refresh_interval=self.settings.frequency,
        )


class Muon(Method):
    summary = "Muon (torch.optim.Muon) for attention and MLP matrices, AdamW for the rest"
    source = (
        "Jordan et al. 2024 (kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982)"
    )
    equation = "W <- (1 - lr wd) W - 0.2 sqrt(max(m, n)) lr NewtonSchulz(Nesterov momentum of G)"
    gets: ClassVar = {"Muon": MATRICES, "AdamW": REST}
    why = (
        "orthogonalisation is meant for matrices inside the network, and torch's Muon takes "
        "nothing else"
    )
    section = schema.MuonConfig
    one_matrix_at_a_time = True

    def matrices(self, groups: list[Group]) -> Optimizer:
        options = {"momentum": self.settings.momentum, "adjust_lr_fn": self.settings.adjust_lr}
        return BatchedMuon(groups, lr=self.lr, weight_decay=self.settings.weight_decay, **options)

    def products(self, shape: tuple[int, ...]) -> Products:
        return newton_schulz_products(shape)


class Scion(Method):
    summary = (
        "Scion (pytorch-optimizer): steps of fixed size in a norm chosen for each kind of parameter"
    )
    source = "Pethick et al. 2025 (arXiv:2502.07529)"
    equation = "d <- (1 - a) d + a G; W <- (1 - lr) W - lr scale argmax_{|S| <= 1} <d, S>"
    gets: ClassVar = {
        "SCION, spectral norm": MATRICES,
        "SCION, sign": "embeddings, head, router",
        "SCION, root mean square": "biases, norms",
    }
    why = (
        "Scion is a rule for all parameters: a norm for each kind (its table 2 and appendix "
        "E.3), no AdamW"
    )
    section = schema.ScionConfig

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        settings: schema.ScionConfig = self.settings
        library = _pytorch_optimizer("scion")
        norms = importlib.import_module("pytorch_optimizer.optimizer.scion").LMONorm
        groups = stage_groups(stages)
        members = split_stacks(groups, stack_names(stages))
        matrices = matrix_names(stages)
        kinds = {
            "matrix": {"norm_type": int(norms.SPECTRAL), "scale": settings.scale},
            "vector": {"norm_type": int(norms.BIAS), "scale": settings.vector_scale},
            "embedding": {"norm_type": int(norms.SIGN), "scale": settings.rest_scale},
        }
        by_kind = []
        for group in groups:
            for kind, options in kinds.items():
                named = []
                for name, parameter in group["params"]:
                    if _kind(name, parameter, matrices) == kind:
                        named.append((name, parameter))
                if named:
                    by_kind.append({**group, **options, "params": named, "kind": kind})
        scion_class: Any = with_fast_bf16_products(library.SCION)
        scion = scion_class(
            by_kind, lr=settings.lr, momentum=settings.momentum, constraint=settings.constrained
        )
        return [lend_gradients(scion, members)]

    def products(self, shape: tuple[int, ...]) -> Products:
        return newton_schulz_products(shape)


class Lion(Method):
    summary = (
        "Lion (pytorch-optimizer), sign descent, for attention and MLP matrices, AdamW for the rest"
    )
    source = "Chen et al. 2023 (arXiv:2302.06675)"
    equation = "W <- (1 - lr wd) W - lr sign(b1 M + (1 - b1) G); M <- b2 M + (1 - b2) G"
    gets: ClassVar = {"Lion": MATRICES, "AdamW": REST}
    why = "the comparison with steps of another geometry is about the matrices inside the network"
    section = schema.LionConfig

    def matrices(self, groups: list[Group]) -> Optimizer:
        settings: schema.LionConfig = self.settings
        lion: Optimizer = _pytorch_optimizer("lion").Lion(
            groups,
            lr=self.lr,
            betas=settings.lion_betas,
            weight_decay=settings.weight_decay,
            weight_decouple=True,
        )
        return lion


class Adan(Method):
    summary = "Adan (pytorch-optimizer): adaptive, with Nesterov momentum but no extra gradients"
    source = "Xie et al. 2022 (arXiv:2208.06677)"
    equation = (
        "m, d, n: averages of g, g - g', (g + b2 (g - g'))^2; "
        "w <- (w - lr (m^ + b2 d^) / (sqrt(n^) + eps)) / (1 + lr wd)"
    )
    gets: ClassVar = {"Adan": ALL}
    why = "Adan works coordinate by coordinate"
    section = schema.AdanConfig

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        settings: schema.AdanConfig = self.settings
        adan: Optimizer = _pytorch_optimizer("adan").Adan(
            stage_groups(stages),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        return [adan]


def _kind(name: str, parameter: Tensor, matrices: Collection[str]) -> str:
    """What a parameter is to Scion: "matrix", "vector" or "embedding"."""
    if name.partition("[")[0] in matrices:
        return "matrix"
    return "vector" if parameter.ndim == 1 else "embedding"


def _pytorch_optimizer(method: str) -> Any:
    """The package pytorch-optimizer; UserError where it is not installed."""
    try:
        return importlib.import_module("pytorch_optimizer")
    except ImportError:
        raise UserError(
            f"method {method} needs the package pytorch-optimizer: pip install pytorch-optimizer"
        ) from None


# The name under which `brx methods` lists the methods that are given by file or import path.
# `find_method` loads such a method itself.
CUSTOM = "package.module:Class"

METHODS: dict[str, Method] = {
    "pipedream": PipeDream(),  # plain AdamW; every method here runs under PipeDream's delays
    "pipedream-lr": PipeDreamLR(),
    "nesterov": Nesterov(),
    "basis-rotation": BasisRotationMethod(),
    "delay-compensation": DelayCompensation(),
    "soap": Soap(),
    "muon": Muon(),
    "scion": Scion(),
    "lion": Lion(),
    "adan": Adan(),
    CUSTOM: AnyOptimizer(),
}


def find_method(config: RunConfig) -> Method:
    """The method that a configuration selects, bound to it.

    Raises:
        UserError: the user's own method or optimizer cannot be loaded.
    """
    if isinstance(config.optimizer, schema.CustomConfig):
        return load_method(config.optimizer).bound_to(config)
    return METHODS[config.optimizer.method].bound_to(config)


def ring_matrix_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which the rings of older versions hold matrices: bf16 if autocast would cast
    them to it anyway, else fp32."""
    # With `none` and `predict`, which overwrite a slot, the ring has to be in bf16: from fp32,
    # autocast would save a copy in the forward pass, and the backward pass would use that.
    method = find_method(config)
    if config.runtime.precision != "bf16":
        return torch.float32
    if config.pipeline.stash == "exact" and method.corrects_gradients:
        # The rule takes the difference to the older version, which bf16 would drown in rounding.
        return torch.float32
    return torch.bfloat16


def refresh_intervals(
    delays: Sequence[StageDelay], frequency: int, schedule: schema.RefreshSchedule
) -> list[float | None]:
    """Iterations between two refreshes, by stage; None for never again after the first.

    - `uniform`: `frequency` for all stages.
    - `stage-aware`: the larger a stage's delay, the more often, by the paper's rule (appendix
      "Stage-aware basis rotation implementation"), rounded down to whole iterations.
    - `reversed`: the same intervals, with the largest where the smallest was, and so on.
    - `stage-aware-exact`, `reversed-exact`: the rule is not rounded, and scaled so that all stages
      together are refreshed as often as with `uniform`. An interval of 9.5 means 9 and 10 in turn.
    """
    num_stages = len(delays)
    shares = _shares([_decisive_delay(delay) for delay in delays])
    if schedule == "uniform" or shares is None:
        return [frequency] * num_stages
    if schedule.startswith("reversed"):
        shares = _reversed(shares)
    intervals: list[float | None] = []
    if schedule.endswith("exact"):
        for rate in _within_one(shares, num_stages / frequency):
            intervals.append(1 / rate if rate else None)
        return intervals
    for share in shares:
        # 10 / (1 - 14 / 15) is 150, whatever its rounding says.
        whole = math.floor(frequency / share + 1e-9) if share else None
        intervals.append(None if whole is None else max(1, whole))
    return intervals


def _decisive_delay(delay: StageDelay) -> float:
    """The delay by which a stage's refreshes are planned: tau in micro-batches; or if it varies,
    its mean in updates, because the largest delay may be rare."""
    return delay.tau_updates if isinstance(delay, VaryingDelay) else delay.tau


def _reversed(shares: list[float]) -> list[float]:
    """The same shares in reversed order of size: the stage with the smallest gets the largest, and
    so on.

    Among stages with equal shares, the first one counts as the largest."""
    stages = sorted(range(len(shares)), key=lambda stage: (shares[stage], -stage))  # ascending
    swapped = list(shares)
    for stage, share in zip(stages, sorted(shares, reverse=True), strict=True):
        swapped[stage] = share
    return swapped


def refreshes_per_iteration(intervals: list[float | None]) -> float:
    """The mean number of stages that are refreshed per iteration.

    Args:
        intervals: the interval of each stage, from `refresh_intervals`.
    """
    return sum(1 / interval for interval in intervals if interval is not None)


def _shares(taus: list[float]) -> list[float] | None:
    """How often each stage is refreshed, relative to `uniform`; None if the rule treats all stages
    alike.

    The paper states its rule for the delays of a pipeline, P - 1 to 0. For others it is
    tau_k / mean(tau), which is about the same for a pipeline's delays.

    Args:
        taus: the delays of the stages, first to last.
    """
    num_stages = len(taus)
    if taus != list(range(num_stages - 1, -1, -1)):
        mean = sum(taus) / num_stages
        return [tau / mean for tau in taus] if mean else None
    mid = num_stages // 2 - 1
    if mid < 1:
        return None  # up to three stages the paper's rule divides by zero
    shares = []
    for tau in taus:
        n = mid - tau if tau > mid else mid + 1 - tau  # the paper's n
        # The share is 1 - n / mid. If that is zero or negative, the stage is never refreshed.
        shares.append(max(0.0, (mid - n) / mid))
    return shares


def _within_one(shares: list[float], budget: float) -> list[float]:
    """Rates in proportion to the shares, whose sum is the budget.

    No rate exceeds one refresh per iteration; the excess is shared out among the other stages."""
    rates = [0.0] * len(shares)
    open_stages = [stage for stage, share in enumerate(shares) if share]
    while open_stages:
        left = budget - sum(rates)
        scale = left / sum(shares[stage] for stage in open_stages)
        full = [stage for stage in open_stages if shares[stage] * scale >= 1]
        if not full:
            for stage in open_stages:
                rates[stage] = shares[stage] * scale
            break
        for stage in full:
            rates[stage] = 1.0
        open_stages = [stage for stage in open_stages if stage not in full]
    return rates
