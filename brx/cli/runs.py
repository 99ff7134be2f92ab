"""Results of runs: `brx slowdown` and `brx evaluate`; `brx export` and `brx weights`, which copy
runs for others."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brx.cli.options import (
    Format,
    OnlyMeasured,
    RunsOrCheckpoints,
    RunsOrFolders,
    Strict,
    TableFormat,
    argument,
    figure_option,
    flag,
    option,
)
from brx.cli.usage import Application, print_note, print_table, refuse, refuse_settings
from brx.errors import counted

if TYPE_CHECKING:
    from brx.runs.comparison import Comparison

app = Application()


@app.add("""\
  # every method and P found there, relative to P = 1
  brx slowdown results/similar
  brx slowdown runs/a runs/b --target 2.5 --format csv
  # the better of two learning rates, on each side
  brx slowdown results/similar --rates 3e-4 1e-3
  # also draw the slowdown for every target
  brx slowdown results/similar --all-targets figures/slowdown-all-targets
""")
def slowdown(
    runs: RunsOrFolders,
    *,
    target: Annotated[
        float | None,
        option(
            "LOSS",
            "training loss to reach, in nats (default: the highest mean over the last quarter of "
            "a run)",
        ),
    ] = None,
    rates: Annotated[
        list[float] | None, option("LR...", "consider only these learning rates")
    ] = None,
    same_rate: Annotated[
        bool,
        flag("--same-rate", "use the same learning rate with delay and without; one row per rate"),
    ] = False,
    reference_stages: Annotated[int, option("P", "number of stages to compare with", min=1)] = 1,
    strict: Strict = False,
    format: Format = "table",
    all_targets: Annotated[
        Path | None, figure_option("also draw the slowdown for every target")
    ] = None,
) -> None:
    from brx.runs.comparison import compare, is_reference, with_reference
    from brx.runs.experiments import at_best_rates, notes, of_rates
    from brx.runs.folder import stop_at_damage
    from brx.runs.frames import load

    refuse(
        target is not None and not 0 < target < math.inf,
        f"--target {target}: must be a loss above 0, in nats",
    )
    refuse(
        same_rate and all_targets is not None, "--same-rate and --all-targets: give one of the two"
    )
    stop_at_damage(strict)
    all_runs = load(runs)
    if rates:
        all_runs = of_rates(all_runs, rates)
    chosen = at_best_rates(all_runs, with_diverged=True)
    comparison = compare(
        all_runs if same_rate else chosen, target, reference_stages, same_rate=same_rate
    )
    print_note(*[*notes(all_runs, chosen), *comparison.notes])
    same = " at the same learning rate" if same_rate else ""
    refuse(
        comparison.slowdowns.empty,
        f"RUNS: nothing to compare: no method has runs at P = {reference_stages} and at another "
        f"P{same}",
    )
    last_quarter = "the highest mean training loss over the last quarter of a run"
    _print(comparison, format, last_quarter if target is None else "as given")
    if all_targets is not None:
        from brx.plot.any_runs import draw_all_targets  # loads matplotlib

        compared = (with_reference(runs, reference_stages) for runs in comparison.sets)
        shown = [runs for runs in compared if not is_reference(runs, reference_stages).all()]
        refuse(
            not shown,
            "--all-targets: every run with a slowdown diverged, or those without delay did",
        )
        print(
            *draw_all_targets(shown[0], all_targets, reference_stages, target),
            sep="\n",
            file=sys.stderr,
        )


def _print(comparison: Comparison, format: TableFormat, target_rule: str) -> None:
    """Print the slowdowns and, as a table for readers or as JSON, also the iterations saved."""
    from brx.runs.tables import slowdown_table

    if format == "json":
        content = {
            "slowdowns": json.loads(comparison.slowdowns.to_json(orient="records")),
            "reductions": json.loads(comparison.reductions.to_json(orient="records")),
        }
        print(json.dumps(content, indent=2))
        return
    title = (
        f"Iterations until the training loss falls to the target ({target_rule}); 95 % "
        f"intervals over seeds"
    )
    print_table(slowdown_table(comparison.slowdowns), format, title)
    if format == "table":
        _print_for_readers(comparison)


def _print_for_readers(comparison: Comparison) -> None:
    """Print notes that explain the table of slowdowns, and the table of iterations saved."""
    from brx.runs.comparison import EARLY
    from brx.runs.tables import reduction_table

    slowdowns = comparison.slowdowns
    if slowdowns["is_early"].any():
        print(
            f"(early): without delay, training passes the target in its first {EARLY:.0%}, so the "
            f"ratio compares starts of training"
        )
    if slowdowns["is_plateau"].any():
        print(
            "plateau: near the target, losses fall so little that noise decides when they pass it; "
            "choose a higher --target"
        )
    if slowdowns[["lr_at_edge", "reference_lr_at_edge"]].any(axis=None):
        print("*: the lowest or highest rate tried, or the only one")
    print("Slowdowns depend on the target, the runs, the rates and the seeds (docs/slowdown.md)")
    if len(comparison.reductions):
        saved = (
            "Iterations saved over the best of PipeDream, PipeDream-LR and Nesterov, at its "
            "final loss"
        )
        print_table(reduction_table(comparison.reductions), title=saved)


@app.add("""\
  # the newest checkpoints, on 10,000 sequences of the validation data
  brx evaluate runs/quick-basis-rotation-p8-s0 runs/quick-pipedream-p8-s0
  # an earlier checkpoint, on more of them
  brx evaluate runs/quick-pipedream-p8-s0 --checkpoint 500 --examples 50000
  # show what was measured before
  brx evaluate results/tuned --measured --format csv

The sequences are evenly spread over the validation data. The results are kept
in RUN/analysis/.
""")
def evaluate(
    context: typer.Context,
    checkpoints: RunsOrCheckpoints,
    *,
    checkpoint: Annotated[
        int | None, option("ITERATION", "checkpoint of each run (default: the newest)")
    ] = None,
    examples: Annotated[
        int | None,
        option(
            "N",
            "number of sequences (default: as many as do not overlap, at most 10,000)",
            min=1,
        ),
    ] = None,
    measured: OnlyMeasured = False,
    format: Format = "table",
) -> None:
    from brx.runs.checkpoint import run_and_iteration
    from brx.runs.measured import refuse_two_checkpoints, runs_in_place
    from brx.train.evaluation import evaluate_run, evaluation_table, evaluations_in

    refuse_two_checkpoints(checkpoints, checkpoint)
    if measured:
        refuse_settings(context, ["examples"])
        results = evaluations_in(checkpoints, checkpoint)
    else:
        results = []
        for place in runs_in_place(checkpoints):
            run, iteration = run_and_iteration(place)
            results.append(evaluate_run(run, iteration=iteration or checkpoint, examples=examples))
    print_table(evaluation_table(results), format)


@app.add("""\
  brx export runs/similar --to results/similar
""")
def export(
    runs: RunsOrFolders,
    *,
    to: Annotated[Path, option("DIR", "folder to copy to, one folder per run")],
    unfinished: Annotated[
        bool, flag("--unfinished", "also copy runs that are unfinished, interrupted or failed")
    ] = False,
    strict: Strict = False,
) -> None:
    from brx.runs.export import export_runs
    from brx.runs.folder import stop_at_damage

    stop_at_damage(strict)
    num_exported, num_left_out = export_runs(runs, to, unfinished=unfinished)
    print(f"{to}: {counted(num_exported, 'run')}")
    if num_left_out:
        print(f"{num_left_out} left out: unfinished, interrupted or failed (see --unfinished)")


@app.add("""\
  brx weights runs/mine --to exported/model.safetensors
  brx weights runs/mine/checkpoints/00000500 --to exported/model.safetensors
""")
def weights(
    run: Annotated[Path, argument("RUN|CHECKPOINT", "a run's folder, or one of its checkpoints")],
    *,
    to: Annotated[Path, option("FILE", "NAME.safetensors, in a folder without such a file")],
) -> None:
    """Write the weights of the newest checkpoint, unless one is named.

    The settings (brx.json) and the tokenizer are written next to them; for the model `llama` also
    what Transformers needs.
    """
    from brx.config.loading import load_config
    from brx.runs.checkpoint import list_checkpoints, run_and_iteration
    from brx.runs.weights import write_weights

    folder, iteration = run_and_iteration(run)
    config_path = folder / "config.yaml"
    refuse(not config_path.is_file(), f"{run}: is neither a run's folder nor a checkpoint")
    checkpoints = [path for path in list_checkpoints(folder) if iteration in (None, int(path.name))]
    refuse(not checkpoints, f"{run}: has no complete checkpoint")
    for path in write_weights(folder, checkpoints[-1], load_config(config_path), to):
        print(path)
