"""Saves gradients of a training, for packet D (`benchmarks.gpu.step --gradients FILE`).

    python -m benchmarks.gpu.gradients CONFIG --to FILE [--iterations 200] [--set KEY=VALUE ...]

They are the gradients of the rotated matrices, after clipping, in the last iterations of a training
with basis rotation, which needs no GPU. The file grows with the model: four steps of `paper-95m`
take 0.9 GB.
"""

import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from benchmarks.gpu.step import NUM_GRADIENTS
from benchmarks.report import parser_of
from brx.config.loading import load_config
from brx.optim import BasisRotation
from brx.train.loop import train


def main() -> None:
    """Train and save."""
    parser = parser_of(__doc__, iterations=200)
    parser.add_argument("config", help="a preset or a file")
    parser.add_argument("--to", type=Path, required=True, help="the file")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    settings = [*options.overrides, f"training.iterations={options.iterations}"]
    config = load_config(options.config, [*settings, "optimizer.method=basis-rotation"])
    last: deque[list[Tensor]] = deque(maxlen=NUM_GRADIENTS)

    def keep(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(optimizer, BasisRotation):
            last.append(matrix_gradients(optimizer))

    hook = register_optimizer_step_pre_hook(keep)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
    hook.remove()
    torch.save(list(last), options.to)
    print(f"{options.to}: {len(last)} steps of {len(last[0])} matrices")


def matrix_gradients(optimizer: BasisRotation) -> list[Tensor]:
    """Copies of the gradients of all matrices (m, n) of an optimizer, on the CPU."""
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.ndim == 2:
                gradients.append(parameter.grad.detach().float().cpu().clone())
    return gradients


if __name__ == "__main__":
    main()
