"""A measured (1,1)-norm of a Hessian: its file and its tables.

A file has the sums of the rows s_i by Transformer block and by kind of parameter, with their
covariances. It is RUN/analysis/hessian-norm-SPACE-ITERATION.json with the usual settings. Settings
that are not usual are in the name, as in hessian-norm-SPACE-ITERATION-N-batches.json, so that one
measurement does not replace another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import pandas as pd
from pydantic import AfterValidator, BaseModel

from brx.curvature.hessian import Geometry, Source
from brx.curvature.hessian_norm import POWERS, Sums, membership
from brx.errors import counted
from brx.model.stage import partition
from brx.names import file_name
from brx.runs.measured import Measured, measured_in

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
"""The original coordinates, and the coordinates of each strategy, with bases estimated at the
checkpoint's weights."""
STRATEGY_BASIS_BATCHES = 200  # batches from which these bases are estimated
NORMAL_95 = 1.96  # 95 % of a normal distribution lie within this many standard deviations

NORM_TITLE = (
    "(1,1)-norm of the training loss's Hessian, per parameter; in brackets from half the sample, "
    "and extrapolated to an infinite one, a lower bound (sample: vectors x tokens; each: every "
    "vector has its own, whose noise is not known)"
)
# If more rows than this share may be rounding error only, they are to be checked in fp64.
NOTABLE_SHARE = 0.01
# A number that is written with six digits, which are more than an estimate has.
Short = Annotated[float, AfterValidator(lambda value: float(f"{value:.6g}"))]


class NormSettings(BaseModel, frozen=True):
    """Everything that decides the numbers of a measurement, apart from checkpoint and space."""

    vectors: int = 200  # n, Cauchy vectors
    # The sample: H is the Hessian of its mean loss, for all vectors.
    batches_per_vector: int = 160
    precision: Literal["fp32", "fp64"] = "fp32"  # dtype of weights and products
    seed: int = 0  # seed of the vectors
    # A run whose newest checkpoint lends its basis; None for the checkpoint's own basis.
    basis_from: str | None = None
    basis_batches: int | None = None  # estimate the basis from this many batches instead


class Groups(BaseModel):
    """For groups of parameters: the sums of s_i and s_i^2 over their rows, with the covariances of
    these sums."""

    names: list[str]
    num_rows: list[int]
    sums: list[list[Short]]  # for powers 1 and 2 of s_i: one sum per group
    covariances: list[list[list[Short]]]  # for the same powers: (groups, groups)

    @classmethod
    def of(cls, sums: Sums) -> Groups:
        """The same sums with covariances in place of deviations."""
        return cls(
            names=sums.names,
            num_rows=sums.num_rows,
            sums=sums.sums.tolist(),
            covariances=[sums.covariance(power).tolist() for power in POWERS],
        )


class NormResult(Measured):
    """The norm at one checkpoint in one space."""

    command: ClassVar[str] = "hessian-norm"

    space: Space
    settings: NormSettings
    num_parameters: int  # d
    norm: float  # sum |H_ij|
    # Mean of the norms of both halves of the sample. None in results of older versions, where each
    # vector had its own batches.
    norm_of_half: float | None = None
    standard_error: float  # standard error of `norm` from the random vectors
    tokens: int  # in the sample
    below_resolution: float  # mean share of rows that may be rounding error only
    blocks: Groups  # rows by `block_of`
    kinds: Groups  # rows by `kind_of`
    # The stages that the model is cut into. `num_stages` is larger if the run has the delays of a
    # deeper pipeline.
    num_own_stages: int

    @property
    def name(self) -> str:
        """NAME in the file's name."""
        return f"{self.command}-{self.space}"

    @property
    def settings_in_file_name(self) -> list[str]:
        """The settings that are not defaults, as words for the name of the file."""
        settings = self.settings
        usual = NormSettings()
        texts = []
        if settings.batches_per_vector != usual.batches_per_vector:
            texts.append(f"{settings.batches_per_vector}-batches")
        if settings.vectors != usual.vectors:
            texts.append(f"{settings.vectors}-vectors")
        if settings.precision != usual.precision:
            texts.append(settings.precision)
        if settings.seed != usual.seed:
            texts.append(f"seed-{settings.seed}")
        if settings.basis_from is not None:
            texts.append(f"basis-of-{file_name(settings.basis_from)}")
        is_strategy = self.space in STRATEGY_SPACES
        usual_batches = STRATEGY_BASIS_BATCHES if is_strategy else usual.basis_batches
        if settings.basis_batches not in (None, usual_batches):
            texts.append(f"basis-of-{settings.basis_batches}-batches")
        return texts

    @property
    def place(self) -> tuple[int, int, int]:
        """The checkpoint's iteration, and the numbers of batches and of vectors."""
        return self.iteration, self.settings.batches_per_vector, self.settings.vectors

    @property
    def normalized(self) -> float:
        """The norm per parameter, as the paper states it."""
        return self.norm / self.num_parameters

    @property
    def norms(self) -> list[float]:
        """The norm of the sample, of half the sample, and of an infinite one by extrapolation. Only
        the first is there if the norm of half the sample is not known.

        The Hessian of b batches has entries H_ij + e_ij / sqrt(b), with noise e of mean zero. The
        mean of their absolute values is above |H_ij| and convex in 1 / sqrt(b). So the population's
        norm lies below the sample's. It lies above the extrapolated norm, where a line through the
        norms of both sizes meets 1 / sqrt(b) = 0."""
        if self.norm_of_half is None:
            return [self.norm]
        extrapolated = self.norm - (self.norm_of_half - self.norm) / (math.sqrt(2) - 1)
        return [self.norm, self.norm_of_half, max(0.0, extrapolated)]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the population's norm per parameter.

        It reaches from the extrapolated norm to the sample's, each widened by the standard error
        from the random vectors. The error is taken on the logarithm, because norms are positive."""
        factor = math.exp(NORMAL_95 * self.standard_error / self.norm) if self.norm else 1.0
        low = min(self.norms) / self.num_parameters / factor
        high = self.normalized * factor
        return low, high

    @property
    def num_blocks(self) -> int:
        """Transformer blocks of the model."""
        return sum(name.isdigit() for name in self.blocks.names)


def strategy_of(space: Space) -> tuple[Source, Geometry]:
    """Source and geometry of a strategy's space (any of `STRATEGY_SPACES` except `original`)."""
    source, _, geometry = space.partition("-")
    return cast(Source, source), cast(Geometry, geometry)


def results_of(
    run: Path,
    spaces: Sequence[Space] = SPACES,
    iteration: int | None = None,
    batches: int | None = None,
) -> dict[Space, NormResult]:
    """A run's measurements at one checkpoint with one number of batches and of vectors, by space.

    These are the checkpoint and the numbers with measurements in most of the `spaces`. Among
    equals, it is the latest checkpoint, and then the largest numbers. If measurements differ in
    other settings, those with the usual settings count.

    Args:
        run: the run's folder.
        spaces: coordinates to look for.
        iteration: consider only this checkpoint.
        batches: consider only this number of batches.
    """
    results: list[NormResult] = []
    for space in spaces:
        measured = NormResult.all_of(run, iteration, f"hessian-norm-{space}")
        results += [
            result
            for result in measured
            if batches is None or result.settings.batches_per_vector == batches
        ]
    num_spaces = Counter(result.place for result in results)
    chosen = max(num_spaces, key=lambda index: (num_spaces[index], index), default=None)
    return {result.space: result for result in results if result.place == chosen}


def measured_norms(
    runs: Sequence[Path], spaces: Sequence[Space] = SPACES, iteration: int | None = None
) -> list[NormResult]:
    """The measurements of all runs: `results_of` each.

    UserError if there are none at all."""
    options = {
        SPACES[:1]: " --original",
        SPACES[1:]: " --rotated",
        STRATEGY_SPACES: " --strategies",
    }
    command = NormResult.command + options.get(tuple(spaces), "")

    def of_run(run: Path, at: int | None) -> list[NormResult]:
        return list(results_of(run, spaces, at).values())

    return measured_in(runs, iteration, of_run, command)


def by_method_and_depth(results: Sequence[NormResult]) -> dict[tuple[str, int], list[NormResult]]:
    """The results by method and P, in order of appearance."""
    grouped: dict[tuple[str, int], list[NormResult]] = {}
    for result in results:
        grouped.setdefault((result.method, result.num_stages), []).append(result)
    return grouped


def block_of(name: str) -> str:
    """The block of a parameter: `embedding`, the block's number, or `head`."""
    first, second, *_ = name.split(".")
    return second if first == "blocks" else first


def kind_of(name: str) -> str:
    """A parameter's kind, whatever its block: attention.query, mlp.up, bias, norm,
    embedding.tokens, ..."""
    if "norm" in name:
        return "norm"
    if name.endswith(".bias"):
        return "bias"
    path = name.removesuffix(".weight")
    return path.split(".", 2)[2] if path.startswith("blocks.") else path


def stage_of_block(num_blocks: int, num_stages: int) -> dict[str, int]:
    """The stage k = 0 .. P - 1 that holds each block, the embedding and the head."""
    stages = {"embedding": 0}
    for stage, blocks in enumerate(partition(num_blocks, num_stages)):
        for block in blocks:
            stages[str(block)] = stage
    stages["head"] = num_stages - 1
    return stages


def norm_table(results: Sequence[NormResult]) -> pd.DataFrame:
    """A row per measurement; all cells are texts. Its title is `NORM_TITLE`."""
    rows = []
    for result in results:
        per_parameter = [norm / result.num_parameters for norm in result.norms]
        low, high = result.interval
        row = {
            "run": Path(result.run).name,
            "P": str(result.num_stages),
            "at": str(result.iteration),
            "coordinates": _coordinates(result),
            "norm": _with_others(per_parameter, ".4g"),
            "95 % low": f"{low:.4g}",
            "95 % high": f"{high:.4g}",
            "of original": _with_others(shares_of_original(result, results), ".3f"),
            "sample": _sample(result),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def shares_of_original(result: NormResult, results: Sequence[NormResult]) -> list[float]:
    """The result's `norms` divided by the norms in the original coordinates at the same checkpoint.

    Empty if `results` has no measurement in the original coordinates there. NaN for a norm of
    zero."""
    for other in results:
        is_same_checkpoint = (other.run, other.iteration) == (result.run, result.iteration)
        if is_same_checkpoint and other.space == "original":
            # One of them may lack the last two norms.
            pairs = zip(result.norms, other.norms, strict=False)
            return [norm / original if original else math.nan for norm, original in pairs]
    return []


def _with_others(values: Sequence[float], form: str) -> str:
    """The first value, and the others in brackets; "" without values."""
    if not values:
        return ""
    first, *others = [f"{value:{form}}" for value in values]
    return f"{first} ({', '.join(others)})" if others else first


def _coordinates(result: NormResult) -> str:
    """The coordinates in words; for rotated ones, with the source of their basis."""
    settings = result.settings
    if result.space == "original":
        return "original"
    if settings.basis_from is not None:
        return f"rotated, {Path(settings.basis_from).name}"
    whose = "own basis"
    if settings.basis_batches is not None:
        whose = counted(settings.basis_batches, "batch")
    return f"{result.space.replace('-', '/')}, {whose}"


def _sample(result: NormResult) -> str:
    """Vectors and tokens, and the precision if it is not fp32."""
    settings = result.settings
    own = " each" if result.norm_of_half is None else ""
    precision = "" if settings.precision == "fp32" else f", {settings.precision}"
    return f"{settings.vectors} x {result.tokens:,} tokens{own}{precision}"


def breakdown_table(result: NormResult, by: Literal["stage", "kind"]) -> pd.DataFrame:
    """A row per stage of the run, or per kind of parameter; all cells are texts."""
    if by == "kind":
        groups = result.kinds
        row_of_group = groups.names
    else:
        groups = result.blocks
        stages = stage_of_block(result.num_blocks, result.num_own_stages)
        row_of_group = [f"stage {stages[block]}" for block in groups.names]
    names, member = membership(row_of_group)
    num_rows = np.array(groups.num_rows) @ member
    totals = np.array(groups.sums[0]) @ member
    errors = np.sqrt(np.diag(member.T @ np.array(groups.covariances[0]) @ member))
    shares = totals / result.norm if result.norm else np.zeros_like(totals)
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
    """A warning if many rows may be rounding error only, else None."""
    if result.below_resolution <= NOTABLE_SHARE:
        return None
    return (
        f"{result.space}: {result.below_resolution:.1%} of the rows lie below the resolution of "
        f"{result.settings.precision}, relative to the largest entry of their vector; compare with "
        "--precision fp64"
    )
