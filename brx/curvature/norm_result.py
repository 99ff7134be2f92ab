"""The measured (1,1)-norm of a Hessian: its file, and tables.

The sums s_i of the rows are kept by Transformer block and by kind of parameter, with their
covariances, in RUN/analysis/hessian-norm-SPACE-ITERATION.json; those from another sample than the
usual one are in hessian-norm-SPACE-ITERATION-N-batches.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import pandas as pd
from pydantic import AfterValidator, BaseModel

from brx.curvature.checkpoints import Measured, measured_in
from brx.curvature.hessian import Geometry, Source
from brx.curvature.hessian_norm import POWERS, Sums, membership
from brx.model.stage import partition

Space = Literal[
    "original", "rotated", "1st-unilateral", "1st-bilateral", "2nd-unilateral", "2nd-bilateral"
]
SPACES: tuple[Space, ...] = ("original", "rotated")
STRATEGY_SPACES: tuple[Space, ...] = (
    "original",
    "1st-unilateral",
    "1st-bilateral",
    "2nd-unilateral",
    "2nd-bilateral",
)
"""The original coordinates, and the ones of each strategy, with bases estimated at the checkpoint's
weights."""
NORMAL_95 = 1.96

NORM_TITLE = (
    "(1,1)-norm of the training loss's Hessian, per parameter; in brackets from half the sample, "
    "and extrapolated to an"
    " infinite one, a lower bound (sample: vectors x tokens; each: every vector has its own, whose "
    "noise is not known)"
)
# share of rows below the resolution of their vector's largest entry; check these in fp64
NOTABLE_SHARE = 0.01
# More digits than an estimate has
Short = Annotated[float, AfterValidator(lambda value: float(f"{value:.6g}"))]


class NormSettings(BaseModel, frozen=True):
    vectors: int = 200  # n, Cauchy vectors
    batches_per_vector: int = (
        160  # the sample whose mean loss has the Hessian; all vectors share it
    )
    precision: Literal["fp32", "fp64"] = "fp32"  # dtype of weights and products
    seed: int = 0  # seed of the vectors
    basis_from: str | None = (
        None  # a run whose newest checkpoint lends its basis; None for the checkpoint's own
    )
    basis_batches: int | None = None  # batches from which the basis is estimated instead


class Groups(BaseModel):
    """Sums over the rows s_i of groups of parameters, with their covariances."""

    names: list[str]
    num_rows: list[int]
    sums: list[list[Short]]  # for powers 1 and 2 of s_i: one sum per group
    covariances: list[list[list[Short]]]  # for the same powers: (groups, groups)

    @classmethod
    def of(cls, sums: Sums) -> Groups:
        covariances = [sums.covariance(power).tolist() for power in POWERS]
        return cls(
            names=sums.names,
            num_rows=sums.num_rows,
            sums=sums.sums.tolist(),
            covariances=covariances,
        )


class NormResult(Measured):
    command: ClassVar[str] = "hessian-norm"

    space: Space
    settings: NormSettings
    num_parameters: int  # d
    norm: float  # sum |H_ij|
    # The mean norm of both halves of the sample. None in old results, where each vector had its own
    # batches.
    norm_of_half: float | None = None
    standard_error: float  # standard error of `norm` from the random vectors
    tokens: int  # in the sample
    below_resolution: float  # mean share of rows that rounding may have drowned
    blocks: Groups  # rows by `block_of`
    kinds: Groups  # rows by `kind_of`
    num_own_stages: int  # stages that the model is cut into; `num_stages` of them have its delays

    @property
    def name(self) -> str:
        return f"{self.command}-{self.space}"

    def path_in(self, run: Path) -> Path:
        """Its file beside a run; another sample than the usual one has a file of its own."""
        usual = super().path_in(run)
        batches = self.settings.batches_per_vector
        if batches == NormSettings().batches_per_vector:
            return usual
        return usual.with_stem(f"{usual.stem}-{batches}-batches")

    @property
    def place(self) -> tuple[int, int]:
        """The checkpoint's iteration, and the batches of the sample."""
        return self.iteration, self.settings.batches_per_vector

    @property
    def normalized(self) -> float:  # per parameter, as the paper states it
        return self.norm / self.num_parameters

    @property
    def norms(self) -> list[float]:
        """From the sample, from half of it, and extrapolated; the first alone if half is not known.

        A sample of b batches has entries H_ij + e_ij / sqrt(b), with noise e of mean zero. The mean
        of their absolute value is above |H_ij| and convex in 1 / sqrt(b). So the population's norm
        lies below the sample's, and above the extrapolated one: where a line through the norms of
        both sizes meets 1 / sqrt(b) = 0."""
        if self.norm_of_half is None:
            return [self.norm]
        extrapolated = self.norm - (self.norm_of_half - self.norm) / (math.sqrt(2) - 1)
        return [self.norm, self.norm_of_half, max(0.0, extrapolated)]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the population's norm per parameter: from the extrapolated to the
        sampled norm, widened."""
        # By the chance of the vectors, on the logarithm, since the estimate is positive.
        factor = math.exp(NORMAL_95 * self.standard_error / self.norm) if self.norm else 1.0
        return min(self.norms) / self.num_parameters / factor, self.normalized * factor

    @property
    def num_blocks(self) -> int:
        return sum(name.isdigit() for name in self.blocks.names)


def strategy_of(space: Space) -> tuple[Source, Geometry]:
    """The source and geometry of one of `STRATEGY_SPACES` but the first."""
    source, _, geometry = space.partition("-")
    return cast(Source, source), cast(Geometry, geometry)


def results_of(
    run: Path,
    spaces: Sequence[Space] = SPACES,
    iteration: int | None = None,
    batches: int | None = None,
) -> dict[Space, NormResult]:
    """A run's measurements at one checkpoint with one sample.

    They are those with the most of these spaces; of several such checkpoints (unless `iteration`
    names one) the latest counts, and of several samples (unless `batches` does) the largest."""
    results = [
        result
        for space in spaces
        for result in NormResult.all_of(run, iteration, f"hessian-norm-{space}")
        if batches in (None, result.settings.batches_per_vector)
    ]
    num_spaces = Counter(result.place for result in results)
    chosen = max(num_spaces, key=lambda place: (num_spaces[place], place), default=None)
    return {result.space: result for result in results if result.place == chosen}


def measured_norms(
    runs: Sequence[Path], spaces: Sequence[Space] = SPACES, iteration: int | None = None
) -> list[NormResult]:
    """The measurements of each run (see `results_of` and `measured_in`)."""
    options = {
        SPACES[:1]: " --original",
        SPACES[1:]: " --rotated",
        STRATEGY_SPACES: " --strategies",
    }
    command = NormResult.command + options.get(tuple(spaces), "")
    return measured_in(
        runs, iteration, lambda run, at: results_of(run, spaces, at).values(), command
    )


def by_method_and_depth(results: Sequence[NormResult]) -> dict[tuple[str, int], list[NormResult]]:
    kinds = dict.fromkeys((result.method, result.num_stages) for result in results)
    return {
        kind: [one for one in results if (one.method, one.num_stages) == kind] for kind in kinds
    }


def block_of(name: str) -> str:  # `embedding`, the block's number, or `head`
    first, second, *_ = name.split(".")
    return second if first == "blocks" else first


def kind_of(name: str) -> str:
    """What a parameter is in its block: attention.query, mlp.up, bias, norm, embedding.tokens,
    ..."""
    if "norm" in name:
        return "norm"
    if name.endswith(".bias"):
        return "bias"
    path = name.removesuffix(".weight")
    return path.split(".", 2)[2] if path.startswith("blocks.") else path


def stage_of_block(num_blocks: int, num_stages: int) -> dict[str, int]:
    """The stage k = 0 .. P - 1 that holds each block, the embedding and the head."""
    parts = partition(num_blocks, num_stages)
    stages = {str(block): stage for stage, part in enumerate(parts) for block in part}
    return {"embedding": 0, **stages, "head": num_stages - 1}


def norm_table(results: Sequence[NormResult]) -> pd.DataFrame:
    """A row per measurement, texts; under `NORM_TITLE`."""
    return pd.DataFrame(
        {
            "run": Path(result.run).name,
            "P": str(result.num_stages),
            "at": str(result.iteration),
            "coordinates": _coordinates(result),
            "norm": _with_others([norm / result.num_parameters for norm in result.norms], ".4g"),
            "95 % low": f"{result.interval[0]:.4g}",
            "95 % high": f"{result.interval[1]:.4g}",
            "of original": _with_others(shares_of_original(result, results), ".3f"),
            "sample": _sample(result),
        }
        for result in results
    )


def shares_of_original(result: NormResult, results: Sequence[NormResult]) -> list[float]:
    """Its `norms` divided by the norms in the original coordinates at the same checkpoint; empty if
    these were not measured."""
    for other in results:
        if other.space == "original" and (other.run, other.iteration) == (
            result.run,
            result.iteration,
        ):
            pairs = zip(result.norms, other.norms, strict=False)
            return [norm / original if original else math.nan for norm, original in pairs]
    return []


def _with_others(values: Sequence[float], form: str) -> str:
    first, *others = [f"{value:{form}}" for value in values] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def _coordinates(result: NormResult) -> str:
    """Which, and whose basis they are rotated with."""
    settings = result.settings
    if result.space == "original":
        return "original"
    if settings.basis_from is not None:
        return f"rotated, {Path(settings.basis_from).name}"
    whose = "own basis" if settings.basis_batches is None else f"{settings.basis_batches} batches"
    return f"{result.space.replace('-', '/')}, {whose}"


def _sample(result: NormResult) -> str:
    settings = result.settings
    own = " each" if result.norm_of_half is None else ""
    precision = "" if settings.precision == "fp32" else f", {settings.precision}"
    return f"{settings.vectors} x {result.tokens:,} tokens{own}{precision}"


def breakdown_table(result: NormResult, by: Literal["stage", "kind"]) -> pd.DataFrame:
    """A row per stage of the run, or per kind of parameter; texts."""
    groups = result.kinds if by == "kind" else result.blocks
    stages = stage_of_block(result.num_blocks, result.num_own_stages)
    names, member = membership(
        [name if by == "kind" else f"stage {stages[name]}" for name in groups.names]
    )
    num_rows = np.array(groups.num_rows) @ member
    totals = np.array(groups.sums[0]) @ member
    errors = np.sqrt(np.diag(member.T @ np.array(groups.covariances[0]) @ member))
    shares = totals / result.norm if result.norm else 0 * totals
    return pd.DataFrame(
        {
            by: names,
            "parameters": [f"{count:,.0f}" for count in num_rows],
            "share": [f"{share:.1%}" for share in shares],
            "norm / parameter": [f"{norm:.4g}" for norm in totals / num_rows],
            "std. error": [f"{error:.2g}" for error in errors / num_rows],
        }
    )


def resolution_warning(result: NormResult) -> str | None:
    if result.below_resolution <= NOTABLE_SHARE:
        return None
    return (
        f"{result.space}: {result.below_resolution:.1%} of the rows lie below the resolution of"
        f" {result.settings.precision}, relative to the largest entry of their vector; compare "
        f"with --precision fp64"
    )
