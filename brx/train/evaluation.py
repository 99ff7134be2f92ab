"""The loss of a checkpoint on more validation examples than a training takes (`brx evaluate`)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from brx.config.schema import RunConfig
from brx.data.batches import Batch, check_validation_examples, validation_set
from brx.data.prepare import PreparedData, prepare
from brx.errors import DivergedError
from brx.files import make_folder
from brx.progress import ProgressBar
from brx.runs.checkpoint import check_data, check_stage_files, read_manifest
from brx.runs.folder import name_of_run
from brx.runs.measured import Measured, about, find_checkpoint, measured_in
from brx.runs.run import Run
from brx.train.build import Assembly, assemble, training_batches
from brx.train.device import choose_device, set_up

# Of a large file this many examples suffice: of losses that differ by 1 nat from one example to the
# next, the mean has a standard error of 0.01.
USUAL_EXAMPLES = 10_000


class Evaluation(Measured, frozen=True):
    """The loss of a checkpoint's weights on a number of validation examples."""

    command: ClassVar[str] = "evaluate"

    examples: int  # sequences of S tokens, evenly spread over the validation data
    tokens: int  # that were predicted
    loss: float  # mean cross-entropy, in nats
    # Of the loss, for the choice of the examples; None for a single batch of them. Methods that are
    # evaluated on the same examples share most of this error.
    standard_error: float | None

    @property
    def settings_in_file_name(self) -> list[str]:
        """The number of examples: a file for each."""
        return [f"{self.examples}-examples"]


def evaluate_run(
    run_path: Path,
    *,
    iteration: int | None = None,
    examples: int | None = None,
) -> Evaluation:
    """Measure the loss of a checkpoint on the validation data, and write it into the run's folder.

    It computes what the training computes in a validation: with the same precision and batch size,
    and with the weights that the method wants evaluated.

    Args:
        run_path: the run's folder.
        iteration: the checkpoint; by default the newest one of a finished run.
        examples: how many sequences. By default as many as do not overlap, but at most
            `USUAL_EXAMPLES`.

    Raises:
        UserError: there is no such checkpoint, it is damaged or of other data, or the data have
            fewer examples.
        DivergedError: the loss is not finite.
    """
    run = Run.load(run_path)
    path = find_checkpoint(run, iteration, "newest")
    manifest = read_manifest(path)
    check_stage_files(path, range(manifest["num_stages"]))
    data = prepare(run.config.data, fingerprint=manifest["fingerprint"])
    check_data(manifest, path, data.fingerprint)
    config = _on_one_device(run.config)
    sequence_length = config.model.sequence_length
    if examples is None:
        examples = min(USUAL_EXAMPLES, max(1, data.validation.num_tokens // sequence_length))
    check_validation_examples(data.validation, sequence_length, examples, "--examples")
    # If the folder cannot be written to, this fails before the work begins.
    make_folder(run_path / "analysis")
    batches = validation_set(
        data.validation,
        sequence_length=sequence_length,
        examples=examples,
        batch_size=config.training.batch_size,
    )
    losses = _losses(run, config, path, data, batches)
    sizes = [len(inputs) for inputs, _ in batches]
    loss, standard_error = mean_and_error(losses, sizes)
    if not math.isfinite(loss):
        raise DivergedError(f"{path}: the validation loss is {loss}")
    result = Evaluation(
        **about(run, manifest["iteration"]),
        examples=examples,
        tokens=examples * sequence_length,
        loss=loss,
        standard_error=standard_error,
    )
    result.write(run_path)
    return result


def _on_one_device(config: RunConfig) -> RunConfig:
    """A run's settings for a few forward passes: nothing is compiled, and older weight versions,
    which are not needed, stay off the GPU."""
    pipeline = config.pipeline.model_copy(update={"rings": "host", "devices": 1})
    runtime = config.runtime.model_copy(update={"compile": False, "graphs": False})
    return config.model_copy(update={"pipeline": pipeline, "runtime": runtime})


def _losses(
    run: Run, config: RunConfig, checkpoint: Path, data: PreparedData, batches: Sequence[Batch]
) -> list[float]:
    """The mean loss of each batch."""
    device, _ = choose_device(config.runtime.device)
    set_up(config.runtime, device, num_local_ranks=1)
    assembly: Assembly = assemble(config, training_batches(config, data).batch, device=device)
    assembly.restore(checkpoint)
    losses: list[float] = []
    sum_of_losses = 0.0
    num_examples = 0
    progress = ProgressBar(name_of_run(run.path), "batch", len(batches))
    with progress, assembly.updater.evaluation(int(checkpoint.name)):
        for number, (inputs, targets) in enumerate(batches, 1):
            loss = assembly.engine.evaluate([(inputs.to(device), targets.to(device))])
            assert loss is not None  # one device has all stages
            losses.append(loss)
            sum_of_losses += loss * len(inputs)
            num_examples += len(inputs)
            progress.update(number, f"mean loss {sum_of_losses / num_examples:.4f}")
    return losses


def mean_and_error(losses: Sequence[float], sizes: Sequence[int]) -> tuple[float, float | None]:
    """The mean over examples, and its standard error, from the means of independent batches.

    Args:
        losses: the mean of each batch.
        sizes: the number of examples in each batch.

    Returns:
        The mean weighted by size, and its standard error; None for a single batch.
    """
    num_examples = sum(sizes)
    # In the order of the training's validation, so that the sum is rounded in the same way.
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / num_examples
    num_batches = len(losses)
    if num_batches == 1:
        return mean, None
    shares = np.asarray(sizes) / num_examples
    squares = np.square(shares * (np.asarray(losses) - mean)).sum()
    return mean, math.sqrt(squares * num_batches / (num_batches - 1))


def evaluations_in(paths: Sequence[Path], iteration: int | None = None) -> list[Evaluation]:
    """All results of each run (`measured_in`)."""
    return measured_in(paths, iteration, Evaluation.all_of, Evaluation.command)


def evaluation_table(results: Sequence[Evaluation]) -> pd.DataFrame:
    """A row per result, as texts."""
    rows = []
    for result in results:
        error = "" if result.standard_error is None else f"{result.standard_error:.4f}"
        row = {
            "run": name_of_run(Path(result.run)),
            "method": result.method,
            "P": str(result.num_stages),
            "iteration": str(result.iteration),
            "examples": f"{result.examples:,}",
            "loss": f"{result.loss:.4f}",
            "standard error": error,
            "perplexity": f"{math.exp(result.loss):.4g}",
        }
        rows.append(row)
    return pd.DataFrame(rows)
