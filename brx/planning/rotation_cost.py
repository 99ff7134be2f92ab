"""The number of micro-batches per update from which on the step of basis rotation costs little,
compared with AdamW's iteration.

The products of a step do not depend on the number of tokens, but the passes do. So with enough
tokens per update, the step costs as little as one likes. Rates were measured with large products on
one GPU; only their ratios matter. The passes of small models run far below their rate, so for them
the number of micro-batches is an upper bound. Elementwise work, which AdamW has as well, is not
counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from brx.accelerators import H100, MeasuredRates
from brx.config.schema import BasisRotationConfig, RunConfig
from brx.planning.cuts import planned_ranges
from brx.planning.flops import pass_flops, update_products

LARGEST_RATIO = 1.25
"""The step counts as cheap if an iteration with basis rotation takes at most this many times as
long as one with AdamW."""
TERA = 1e12


@dataclass(frozen=True)
class StepRates:
    """FLOP/s of each kind of product."""

    passes: float
    rotations: float
    covariances: float
    refreshes: float


def configured_rates(config: RunConfig, device: MeasuredRates = H100) -> StepRates:
    """The rates in the configured precisions. Refreshes are in fp32 always."""
    assert isinstance(config.optimizer, BasisRotationConfig)
    by_precision = {
        "auto": device.tf32,
        "highest": device.fp32,
        "tf32": device.tf32,
        "bf16": device.bf16 / 3,  # a product of factors in two parts is three
    }
    pass_rate = device.bf16 if config.runtime.precision == "bf16" else device.fp32
    rotations = by_precision[config.optimizer.rotation_precision]
    covariances = by_precision[config.optimizer.covariance_precision]
    return StepRates(TERA * pass_rate, TERA * rotations, TERA * covariances, TERA * device.fp32)


def rates_in_tf32(config: RunConfig, device: MeasuredRates = H100) -> StepRates:
    """The rates if all products of the step were in TF32."""
    pass_rate = device.bf16 if config.runtime.precision == "bf16" else device.fp32
    tf32 = TERA * device.tf32
    return StepRates(TERA * pass_rate, tf32, tf32, tf32)


def step_ratio(config: RunConfig, rates: StepRates) -> float:
    """The time of an iteration with basis rotation, divided by the time with AdamW, with the
    configured number of micro-batches."""
    num_micro_batches = config.pipeline.accumulation
    ranks = _rank_seconds(config, rates)
    adamw = max(num_micro_batches * rank.passes for rank in ranks)
    rotation = max(num_micro_batches * rank.passes + rank.update for rank in ranks)
    return rotation / adamw


def least_micro_batches(config: RunConfig, rates: StepRates) -> int:
    """The smallest M with which an iteration takes at most `LARGEST_RATIO` times AdamW's.

    For each rank r, M p_r + u_r <= 1.25 M max(p), with the times p of a micro-batch's passes and u
    of an update."""
    ranks = _rank_seconds(config, rates)
    longest = LARGEST_RATIO * max(rank.passes for rank in ranks)
    least = 1
    for rank in ranks:
        # M >= u_r / (1.25 max(p) - p_r)
        least = max(least, math.ceil(rank.update / (longest - rank.passes)))
    return least


class _RankSeconds(NamedTuple):
    """The seconds that a rank computes."""

    passes: float  # of one micro-batch
    update: float  # the products of an update


def _rank_seconds(config: RunConfig, rates: StepRates) -> list[_RankSeconds]:
    """The times of every rank at these rates."""
    ranks = []
    for stages in planned_ranges(config):
        products = update_products(config, stages)
        update = products.rotations / rates.rotations
        update += products.covariances / rates.covariances
        update += products.refreshes / rates.refreshes
        ranks.append(_RankSeconds(pass_flops(config, stages) / rates.passes, update))
    return ranks


def rotation_lines(config: RunConfig) -> list[str]:
    """Lines that say, for basis rotation, from which M on its step is cheap; none for other
    methods."""
    if not isinstance(config.optimizer, BasisRotationConfig):
        return []
    products = update_products(config, range(config.pipeline.stages))
    if products.total == 0:
        return []
    rates = configured_rates(config)
    flops = pass_flops(config, range(config.pipeline.stages))
    now = config.pipeline.accumulation
    return [
        f"By matrix products alone, an iteration of basis rotation takes up to "
        f"{step_ratio(config, rates):.3g} times AdamW's at M = {now}, and at most {LARGEST_RATIO} "
        f"times from {_from(config, rates)} on; with all its products in TF32 from "
        f"{_from(config, rates_in_tf32(config))} on.",
        f"Counted at the rates of one {H100.device} (results/gpu/ceilings.md): per micro-batch the "
        f"passes {_at(flops, rates.passes)}; per update rotations "
        f"{_at(products.rotations, rates.rotations)}, covariances "
        f"{_at(products.covariances, rates.covariances)}, refreshes "
        f"{_at(products.refreshes, rates.refreshes)}. Passes that run below their rate need "
        f"fewer tokens. Elementwise work is not counted.",
    ]


def _from(config: RunConfig, rates: StepRates) -> str:
    """For example `M = 10 (40,960 tokens per update)`."""
    least = least_micro_batches(config, rates)
    tokens = least * config.training.batch_size * config.model.sequence_length
    return f"M = {least:,} ({tokens:,} tokens per update)"


def _at(flops: float, rate: float) -> str:
    return f"{flops / TERA:.3g} T at {rate / TERA:.3g} TFLOP/s"
