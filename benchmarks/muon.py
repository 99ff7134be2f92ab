"""A step of brx's Muon on a CPU, which orthogonalizes all matrices of the same shape together,
against `torch.optim.Muon`, which takes one after another.

The matrices are those of the presets. Both take turns in one process, so that the ratios hold when
the machine's speed drifts.

    python -m benchmarks.muon [--threads 1] [--rounds 20] [--iterations 20] [--presets laptop]

The name of the table has the vector instructions of the processor. Without AVX-512, bf16 products
are made otherwise (`brx.methods.bf16_products`), and torch's step takes very long at paper-95m.
"""

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.report import Table, parser_of, ratio, take_turns
from brx.config.loading import preset_with
from brx.methods.muon import BatchedMuon
from brx.model.stage import whole_model

PRESETS = ("laptop", "similar", "similar-llama", "paper-95m")
VOCABULARY = 256  # it does not matter: Muon does not update embeddings and head


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, threads=1, rounds=20, iterations=20)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    table = Table(
        f"muon-{instructions}",
        ["preset", "matrices", "torch, ms (median)", "together, ms (median)", "ratio"],
    )
    for preset in options.presets:
        matrices = matrices_of(preset)
        iterations = options.iterations if preset != "paper-95m" else 1
        variants = {"torch": steps(torch.optim.Muon, matrices)}
        variants["together"] = steps(BatchedMuon, matrices)
        times = take_turns(variants, options.rounds, iterations)
        medians = [f"{1e3 * statistics.median(turns):.2f}" for turns in times.values()]
        table.add(
            preset, str(len(matrices)), *medians, f"{ratio(times['together'], times['torch']):.2f}"
        )
    table.write(f"a step on the preset's matrices; {options.threads} thread(s)")


def matrices_of(preset: str) -> list[Tensor]:
    """The matrices in the blocks of a preset's model."""
    model = whole_model(preset_with(preset, {}).model, VOCABULARY, seed=0)
    parameters = dict(model.named_parameters())
    return [parameters[name].detach() for name in sorted(model.matrices)]


def steps(kind: type[Optimizer], matrices: list[Tensor]) -> Callable[[int], None]:
    """A function that takes steps of an optimizer on copies of the matrices, with random
    gradients."""
    parameters = [torch.nn.Parameter(copy.deepcopy(matrix)) for matrix in matrices]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = kind(parameters, lr=1e-3)

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
