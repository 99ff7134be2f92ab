"""The measured (1,1)-norm of a Hessian as it is kept beside its run: RUN/analysis/hessian-norm-SPACE-ITERATION.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from brx.curvature.bases import Geometry, Source
from brx.curvature.hessian_norm import POWERS, Sums
from brx.errors import UserError
from brx.files import write_text
from brx.model.stage import partition
from brx.runs.checkpoint import run_and_iteration

Space = Literal["original", "rotated", "1st-unilateral", "1st-bilateral", "2nd-unilateral", "2nd-bilateral"]
SPACES: tuple[Space, ...] = ("original", "rotated")
STRATEGY_SPACES: tuple[Space, ...] = (
    "original",
    "1st-unilateral",
    "1st-bilateral",
    "2nd-unilateral",
    "2nd-bilateral",
)
"""The original coordinates, and those of each strategy with bases estimated at the checkpoint's weights."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Groups:
    """Sums over the rows s_i of groups of parameters, with their covariances.

    Attributes:
        names: of the groups.
        num_rows: parameters in each.
        sums: for powers 1 and 2 of s_i: one sum a group.
        covariances: for the same powers: (groups, groups).
    """

    names: list[str]
    num_rows: list[int]
    sums: list[list[float]]
    covariances: list[list[list[float]]]

    @classmethod
    def of(cls, sums: Sums) -> Groups:
        """As kept in a file: six digits are more than an estimate has."""
        return cls(
            sums.names,
            sums.num_rows,
            [[_short(value) for value in row] for row in sums.sums],
            [[[_short(value) for value in row] for row in sums.covariance(power)] for power in POWERS],
        )

    def standard_errors(self) -> list[float]:
        """Of the sums of s_i."""
        return [math.sqrt(self.covariances[0][group][group]) for group in range(len(self.names))]


@dataclass(frozen=True)
class NormResult:
    """One measurement.

    Attributes:
        run: the run's folder.
        method: its method.
        num_stages: its P (`brx.pipeline.delay.depth`).
        iteration: of the checkpoint.
        space: the coordinates.
        settings: what decides the numbers (see `norm_measurement.NormSettings`).
        num_parameters: d.
        norm: sum |H_ij|.
        standard_error: of it.
        below_resolution: mean share of rows that rounding may have drowned.
        blocks: by `block_of`.
        kinds: by `kind_of`.
        num_own_stages: that the model is cut into; None for P of them.
    """

    run: str
    method: str
    num_stages: int
    iteration: int
    space: Space
    settings: dict[str, Any]
    num_parameters: int
    norm: float
    standard_error: float
    below_resolution: float
    blocks: Groups
    kinds: Groups
    num_own_stages: int | None = None

    @property
    def normalized(self) -> float:
        """The norm divided by the number of parameters, as the paper states it."""
        return self.norm / self.num_parameters

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of `normalized`; taken on the logarithm, since the estimate is positive."""
        factor = math.exp(NORMAL_95 * self.standard_error / self.norm) if self.norm else 1.0
        return self.normalized / factor, self.normalized * factor

    @property
    def num_blocks(self) -> int:
        """Transformer blocks of the model."""
        return sum(name.isdigit() for name in self.blocks.names)

    def write(self, path: Path) -> None:
        """Replace the file's content, one line for each field."""
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(self).items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> NormResult:
        """Read a file that `write` made.

        Raises:
            UserError: it is not one.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            content |= {key: Groups(**content[key]) for key in ("blocks", "kinds")}
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a result of hessian-norm ({error}); remove it and measure again") from None


def strategy_of(space: Space) -> tuple[Source, Geometry]:
    """The source and geometry of one of `STRATEGY_SPACES` but the first."""
    source, _, geometry = space.partition("-")
    return cast(Source, source), cast(Geometry, geometry)


def result_path(run: Path, space: Space, iteration: int) -> Path:
    """Where a measurement is kept."""
    return run / "analysis" / f"hessian-norm-{space}-{iteration:08d}.json"


def results_of(run: Path, spaces: Sequence[Space] = SPACES, iteration: int | None = None) -> dict[Space, NormResult]:
    """A run's measurements, of each space the one at a checkpoint, by default at the latest."""
    wanted = "*" if iteration is None else f"{iteration:08d}"
    files = {space: sorted((run / "analysis").glob(f"hessian-norm-{space}-{wanted}.json")) for space in spaces}
    return {space: NormResult.read(paths[-1]) for space, paths in files.items() if paths}


def measured_norms(
    runs: Sequence[Path], spaces: Sequence[Space] = SPACES, iteration: int | None = None
) -> list[NormResult]:
    """What has been measured of some runs before, or at some of their checkpoints.

    Args:
        runs: their folders, or those of checkpoints.
        spaces: the coordinates.
        iteration: of the checkpoints of runs; None for any.

    Raises:
        UserError: nothing has.
    """
    pairs = [run_and_iteration(path) for path in runs]
    results = [
        result
        for run, named in pairs
        for result in results_of(run, spaces, iteration if named is None else named).values()
    ]
    if not results:
        at = "" if iteration is None else f" at iteration {iteration}"
        raise UserError(f"{runs[0]}: has no measured norms{at}; run `brx hessian-norm {runs[0]}` first")
    return results


def by_method_and_depth(results: Sequence[NormResult]) -> dict[tuple[str, int], list[NormResult]]:
    """Measurements by method and P, whose runs differ in the seed."""
    groups: dict[tuple[str, int], list[NormResult]] = {}
    for result in results:
        groups.setdefault((result.method, result.num_stages), []).append(result)
    return groups


def block_of(name: str) -> str:
    """`embedding`, the block's number, or `head`."""
    first, second, *_ = name.split(".")
    return second if first == "blocks" else first


def kind_of(name: str) -> str:
    """What a parameter is in its block: attention.query, mlp.up, bias, norm, embedding.tokens, ..."""
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


def by_stage(result: NormResult) -> tuple[list[str], list[int], list[float], list[float]]:
    """The run's stages: names, parameters, sums of s_i and their standard errors."""
    count = result.num_own_stages or result.num_stages
    stages = stage_of_block(result.num_blocks, count)
    member = np.array([[stages[name] == stage for stage in range(count)] for name in result.blocks.names])
    sums = np.array(result.blocks.sums[0]) @ member
    variances = np.diag(member.T @ np.array(result.blocks.covariances[0]) @ member)
    num_rows = np.array(result.blocks.num_rows) @ member
    names = [f"stage {stage}" for stage in range(count)]
    return names, num_rows.tolist(), sums.tolist(), np.sqrt(variances).tolist()


def _short(value: float) -> float:
    return float(f"{value:.6g}")
