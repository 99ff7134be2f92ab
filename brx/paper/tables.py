"""The paper's tables (`TABLES`, at the end), each a frame of texts; and how tables and figures are
chosen from their catalogues and made.

A table is made from the runs of a scale, from the runs of a study, or from formulas. An entry is
chosen by its name or its place in the paper (`Figure 5`); `all` chooses every entry. If several are
chosen, a note names each one that cannot be made. If a single one cannot be made, that is a
UserError."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from brx.config.loading import preset_with
from brx.curvature.norm_result import NORM_TITLE, measured_norms, norm_table
from brx.errors import UserError, counted, did_you_mean
from brx.files import make_folder, write_text
from brx.paper.architectures import RUNS as ARCHITECTURE_RUNS
from brx.paper.architectures import Study as Architectures
from brx.paper.architectures import architecture_table, verdict_table
from brx.paper.causes.costs import cost_table
from brx.paper.causes.differences import difference_table
from brx.paper.causes.norms import ratio_table
from brx.paper.causes.predictions import prediction_table
from brx.paper.causes.study import RUNS as CAUSES_RUNS
from brx.paper.causes.study import Study as Causes
from brx.paper.claims import CLAIMS, claim_table, judge, number_text
from brx.paper.ladder import ladder_table, rate_texts
from brx.paper.larger_validation import Study as LargerValidation
from brx.paper.larger_validation import validation_table
from brx.paper.leads import lead_table
from brx.paper.little_momentum import RUNS as MOMENTUM_RUNS
from brx.paper.little_momentum import Study as LittleMomentum
from brx.paper.little_momentum import momentum_table
from brx.paper.measured_evidence import llama_overhead
from brx.paper.precision import RUNS as PRECISION_RUNS
from brx.paper.precision import losses_in, precision_table
from brx.paper.printed import DEVICES_GB, LLAMAS, SAVED, SLOWDOWNS
from brx.paper.scales import BASELINES_AND_STRATEGIES, DEEPEST, MAIN, RUN_AT, SCALES, Experiments
from brx.paper.similarity import RUNS as STUDY_RUNS
from brx.paper.similarity import load_study, study_table
from brx.planning.stage_count import stage_count_table
from brx.runs.comparison import reductions, slowdowns
from brx.runs.experiments import by_experiment
from brx.runs.formats import format_table
from brx.runs.tables import (
    experiment_table,
    final_loss_text,
    rate_table,
    reduction_table,
    seeds_text,
    slowdown_text,
)

CLAIMS_LEGEND = """\
Losses are final validation losses in nats, unless a row says otherwise; `basis-rotation` is
2nd/bilateral, the best baseline the lowest of `pipedream`, `pipedream-lr` and `nesterov` on each
seed (where iterations or hours are saved, by training loss); brackets are 95 % intervals over
seeds. A method's slowdown differs between rows that take other seeds (those that all methods of the
row have) or another target (`teaser-slowdown`). *One seed*: some experiment of the row has only
one. *Runs*: trainings that were read; measurements at checkpoints are not counted. The rules are in
docs/protocol.md: section 11 for the verdict *strict*, sections 5 and 6 for the verdict *first*."""
FINAL_LOSS_LEGEND = """\
Nats, means over seeds; brackets are the range over seeds. Where two columns have other seeds, a
part of their difference is the seeds': differences seed by seed are in the tables of leads and
claims."""
LEADS_LEGEND = """\
Nats of final validation loss by which basis rotation ends below each rival, with 95 % intervals
over seeds (Student's t). The lead at P = 32 is the sum of the lead without delay and the part from
delay, which is a difference in differences, taken seed by seed. The best baseline is the lowest of
`pipedream`, `pipedream-lr` and `nesterov` on each seed. Iterations saved are those to the rival's
final training loss (docs/protocol.md, section 10)."""
TRAINING_LEADS_LEGEND = """\
The same as the table `leads`, in nats of training loss: the mean over the last 2 % of the updates.
Most of these sequences are new to the model, and all methods see the same ones on a seed. Learning
rates are still those with the lowest validation loss."""
CAUSES_LEGEND = """\
The predictions, and what refutes each, were written before the runs (docs/protocol.md, section 12).
*Cost* is the final validation loss with the delay minus the one without, in nats; brackets are 95 %
intervals over seeds (Student's t). A prediction is *open* with fewer than three seeds."""
COSTS_LEGEND = """\
Final validation losses in nats, means over seeds. *Cost* is the loss with the delay minus the one
without, with a 95 % interval over seeds (Student's t). Each learning rate was chosen on a seed that
is not reported (docs/protocol.md, section 12). Bases turned by 0 are basis rotation's own."""
DIFFERENCES_LEGEND = """\
How far the arm's cost of delay and its final validation losses are above those of the arm that it
is compared with, in nats: means of the differences by seed, with 95 % intervals (Student's t).
`brx tables causes` judges what was predicted. The other rows are observations, and with so many
intervals, some may exclude zero by chance."""
NORMS_LEGEND = """\
(1,1)-norm of the training loss's Hessian, per parameter, halfway through the training under the
delays of 32 stages. Both norms are measured at the weights of the same run, with the same vectors;
means over seeds. *Ratio*: the one in the basis over the one in the original coordinates, with a
95 % interval over seeds (Student's t)."""
ARCHITECTURES_LEGEND = """\
Final validation losses in nats, means over seeds (two counts: at P = 1, and at P = 32). *GPT*
(scale `tuned`) and *Llama* have the same search, over learning rates and a second setting; for
*GPT, rates alone* (scale `similar`) learning rates alone were searched. *Above basis-rotation* is
how far a method ends above it at the same P, and *cost* is the loss at P = 32 minus the one at P =
1, seed by seed, with 95 % intervals over seeds (Student's t); the difference between the models is
Welch's. Slowdowns are to one training loss per model. *To run*: what has no runs yet
(docs/protocol.md, section 15)."""
ARCHITECTURE_VERDICTS_LEGEND = """\
Strict verdicts (docs/protocol.md, sections 11 and 15). The last row holds if all others do, and
does not if one of them does not."""
PRECISION_LEGEND = """\
Final validation losses in nats, means over seeds. *Harm* is the loss minus fp32's, seed by seed;
the standard error is that of fp32's mean. A setting passes if it loses at most one standard error
at both P, with three seeds or more (docs/protocol.md, section 14)."""
MOMENTUM_LEGEND = """\
Final validation losses in nats under the delays of 32 stages, means over seeds. *First*: what the
search of section 10 chose (docs/protocol.md), with three values of each second setting. *Later*:
what the search with low values of beta1 chose (section 17 for `pipedream`, section 18 for the
others). *Fall* is the first loss minus the later one, seed by seed, with a 95 % interval (Student's
t). The settings that end lower on the tuning seed *count*: the last row has the lead of basis
rotation over the best baseline of each seed, with the first settings and with those that
count."""
LARGER_VALIDATION_LEGEND = """\
Leads of basis rotation in nats of final validation loss, after the fairer search (`tuned`): on
20,000 sequences of the validation data (docs/protocol.md, section 20), and on the 200 sequences on
which the trainings validate. Brackets are 95 % intervals over seeds (Student's t). The parts of a
lead are those of the table `leads`. The last row is the lead over the best baseline if
`pipedream-lr` and `nesterov` may have as little momentum as `pipedream` (section 18)."""
PRECONDITIONED_TABLE = ("pipedream-lr", "nesterov", "muon", "scion", "soap", "basis-rotation")
Note = Callable[..., None]  # tells the user some lines


@dataclass(frozen=True)
class Entry:
    """An entry of a catalogue of figures or tables."""

    name: str  # on the command line, and the stem of its files' names
    place: str  # in the paper, such as `Figure 5`; or empty


@dataclass(frozen=True)
class PaperTable(Entry):
    """A table from the runs of a scale."""

    title: str
    make: Callable[[Experiments], pd.DataFrame]  # texts; empty if no experiment has runs
    legend: str = ""


@dataclass(frozen=True)
class FormulaTable(Entry):
    """A table of closed forms, which needs no runs."""

    title: str
    compute: Callable[[], pd.DataFrame]  # texts
    legend: str = ""

    def make(self, _: Experiments) -> pd.DataFrame:
        """The table's texts; they do not depend on the runs."""
        return self.compute()


@dataclass(frozen=True)
class StudyTable(Entry):
    """A table from the runs of a study, which has its own folder."""

    title: str
    folder: Path  # the study's, unless --runs names another
    load: Callable[[Path], Any]  # reads the study from a folder
    make_from: Callable[[Any], pd.DataFrame]  # texts, from what `load` returns
    legend: str = ""

    def make(self, experiments: Experiments) -> pd.DataFrame:
        """The table's texts, made from the study's own folder.

        The scale's runs do not matter. `experiments` keeps the study, so that several tables of one
        study read its runs once."""
        key = ("study", self.load, self.folder)
        study = experiments.once(key, lambda: self.load(self.folder))
        return self.make_from(study)

    def make_alone(self, folder: Path | None) -> pd.DataFrame:
        """The table's texts, made from another folder than the study's if there is one."""
        return self.make_from(self.load(folder or self.folder))


Table = PaperTable | FormulaTable | StudyTable
Wanted = TypeVar("Wanted", bound=Entry)
Made = TypeVar("Made")


def paper_slowdowns(experiments: Experiments, methods: Sequence[str]) -> pd.DataFrame:
    """A row per method: its slowdown with each side at its own best learning rate, and also with
    both sides at the preset's rate.

    The two slowdowns are to different target losses."""
    rate = preset_with(experiments.scale.preset, {}).optimizer.lr
    at_rate = experiments.at_rate(rate)
    target = experiments.slowdown_target()
    target_at_rate = at_rate.slowdown_target()
    rows = []
    for method in methods:
        ends = experiments.find_ends(method)
        if target is None or ends is None:
            continue
        (slowdown,) = slowdowns(ends, target).to_dict("records")
        row = {
            "method": method,
            f"slowdown at P = {DEEPEST}": slowdown_text(slowdown),
            "seeds": seeds_text(slowdown),
        }
        row |= rate_texts(slowdown, f"lr at P = {DEEPEST}")
        if target_at_rate is not None:
            ends_at_rate = at_rate.find_ends(method)
            if ends_at_rate is not None:
                (slowdown,) = slowdowns(ends_at_rate, target_at_rate).to_dict("records")
                row[f"both at {rate:g}"] = slowdown_text(slowdown)
        # The paper has no number for a method that it does not know.
        if method in SLOWDOWNS:
            row["the paper's"] = number_text(SLOWDOWNS[method], "times")
        row["target loss"] = f"{target:.3f}"
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def final_losses(experiments: Experiments) -> pd.DataFrame:
    """A row per method: its final training loss at every number of stages, mean and range over
    seeds, and how many seeds these are."""
    rows = []
    counts = []
    for method, depths in RUN_AT.items():
        texts = {}
        depths_by_count: dict[int, list[str]] = {}  # by number of seeds
        for P in depths:
            seeds = experiments.find(method, P)
            texts[f"P = {P}"] = "" if seeds is None else final_loss_text(seeds)
            if seeds is not None:
                depths_by_count.setdefault(len(seeds), []).append(str(P))
        if depths_by_count:
            rows.append({"method": method, **texts})
            counts.append(_counts_text(depths_by_count))
    return pd.DataFrame(rows).fillna("").assign(seeds=counts)


def _counts_text(depths_by_count: Mapping[int, Sequence[str]]) -> str:
    """How many seeds there are; at which P, if that differs: `5 at P = 1, 32; 3 at P = 8`."""
    if len(depths_by_count) == 1:
        return str(next(iter(depths_by_count)))
    counts = sorted(depths_by_count, reverse=True)
    return "; ".join(f"{count} at P = {', '.join(depths_by_count[count])}" for count in counts)


def chosen_rates(experiments: Experiments) -> pd.DataFrame:
    """A row per experiment of the main comparison: its learning rate, and how it was chosen."""
    wanted = []
    for method, depths in RUN_AT.items():
        wanted += [{"method": method, "stages": P} for P in depths]
    present = experiments.find_all(wanted)
    if not present:
        return pd.DataFrame()
    chosen = pd.concat(present)
    table = rate_table(experiments.runs, chosen).drop(columns="model")
    if "second" in chosen:
        seconds = [seeds["second"].iloc[0] for seeds in by_experiment(chosen)]
        table.insert(3, "second setting (lowest loss of each value)", seconds)
    return table


def paper_reductions(experiments: Experiments) -> pd.DataFrame:
    """A row per model that has runs of all main methods: the iterations that basis rotation saves
    over the best baseline, as in the paper's headline."""
    tables = []
    for model in experiments.scale.models:
        if model not in SAVED:
            continue
        present = experiments.find_all({"method": method, "model": model} for method in MAIN)
        if len(present) < len(MAIN):
            continue  # which baseline is the best is not known without all of them
        saved = reductions(pd.concat(present))
        if len(saved):
            table = reduction_table(saved).assign(model=model)
            tables.append(table.assign(**{"the paper's": number_text(SAVED[model], "percent")}))
    shown = ["model", "P", "method", "best baseline", "iterations saved", "the paper's"]
    return pd.concat(tables)[shown] if tables else pd.DataFrame()


def make_tables(
    wanted: str, scale: str, runs: Path | None, note: Note
) -> Iterator[tuple[Table, pd.DataFrame]]:
    """Make tables one by one; each comes with its texts.

    Args:
        wanted: a name, a place in the paper (`Table 1`), or `all`.
        scale: the name of the scale.
        runs: the folder of the runs, instead of the scale's or the study's.
        note: tells the user which tables of several could not be made, or not completely.

    Raises:
        UserError: there is no such table, or it is the only one and cannot be made.
    """
    chosen = entries(wanted, TABLES, "table")
    if runs is not None and all(isinstance(table, FormulaTable) for table in chosen):
        raise UserError(f"--runs: table {wanted} is a formula, and not made from a folder of runs")
    needs_scale = any(isinstance(table, PaperTable) for table in chosen)
    experiments = load_noting(scale, runs, note) if needs_scale else None

    def make(table: Table) -> pd.DataFrame:
        if isinstance(table, FormulaTable):
            return table.compute()
        if experiments is None:
            assert isinstance(table, StudyTable), "any other table needs the scale's runs"
            return table.make_alone(runs)
        # If several tables are made, --runs names the scale's folder.
        if isinstance(table, StudyTable):
            return table.make(experiments)
        asked = experiments.fresh()
        texts = table.make(asked)
        if texts.empty:
            raise UserError(f"its runs are not in {asked.folder}, or not all; {asked.advice}")
        note_missing(f"table {table.name}", asked, note)
        return texts

    return made(chosen, make, "table", note)


def write_table(table: Table, texts: pd.DataFrame, folder: Path) -> Path:
    """Write a table as NAME.csv and NAME.md; returns the path of NAME.md."""
    make_folder(folder)
    write_text(folder / f"{table.name}.csv", format_table(texts, "csv") + "\n")
    path = folder / f"{table.name}.md"
    parts = (f"# {table.title}", table.legend, format_table(texts, "markdown"))
    write_text(path, "\n\n".join(filter(None, parts)) + "\n")
    return path


def entries(
    wanted: str, catalogue: Mapping[str, Wanted], kind: str, others: str = ""
) -> list[Wanted]:
    """The chosen entries of a catalogue.

    Args:
        wanted: `all`, or an entry's name or place in the paper, in any case.
        catalogue: entries by name.
        kind: `figure` or `table`, for the message.
        others: names that the command knows in addition, separated by commas, for the message.

    Raises:
        UserError: there is no such entry.
    """
    if wanted == "all":
        return list(catalogue.values())
    by_name = {}
    for entry in catalogue.values():
        by_name[entry.name.lower()] = entry
        if entry.place:
            by_name[entry.place.lower()] = entry
    if wanted.lower() in by_name:
        return [by_name[wanted.lower()]]
    known = [*filter(None, others.split(", ")), "all", "list", *catalogue]
    places = [entry.place for entry in catalogue.values() if entry.place]
    hint = did_you_mean(wanted, [*known, *places])
    raise UserError(f"{kind.upper()}: unknown {kind} '{wanted}'{hint} (known: {', '.join(known)})")


def made(
    chosen: list[Wanted], make: Callable[[Wanted], Made], kind: str, note: Note
) -> Iterator[tuple[Wanted, Made]]:
    """Make the chosen entries one by one, and yield each with what `make` returns.

    If an entry cannot be made, a note says so, and the others follow; if it is the only one, that
    is a UserError. `kind` is `figure` or `table`, for the message."""
    for entry in chosen:
        try:
            yield entry, make(entry)
        except UserError as error:
            line = f"{kind} {entry.name}: {error}"
            if len(chosen) == 1:
                raise UserError(line) from None
            note(line)


def load_noting(scale: str, runs: Path | None, note: Note) -> Experiments:
    """Read a scale's runs from `runs` or from its own folder, and note runs that are left out."""
    experiments = Experiments.load(SCALES[scale], runs)
    note(*experiments.notes)
    return experiments


def note_missing(what: str, asked: Experiments, note: Note) -> None:
    """Note how many experiments of a figure or table are missing, and the commands for them."""
    if asked.missing:
        missing = counted(len(asked.missing), "experiment")
        note(f"{what}: {missing} not there; {asked.advice}")


TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        PaperTable(
            "claims",
            "",
            "What the paper states, and what our runs say",
            lambda experiments: claim_table(judge(experiments, CLAIMS), experiments.scale),
            legend=CLAIMS_LEGEND,
        ),
        PaperTable(
            "final-loss",
            "Figure 5a",
            "Final training loss",
            final_losses,
            legend=FINAL_LOSS_LEGEND,
        ),
        PaperTable(
            "slowdown",
            "Figure 8a",
            "Slowdown by method and estimation strategy",
            partial(paper_slowdowns, methods=BASELINES_AND_STRATEGIES),
        ),
        PaperTable(
            "preconditioned",
            "Table 3",
            "Slowdown of preconditioned methods",
            partial(paper_slowdowns, methods=PRECONDITIONED_TABLE),
        ),
        PaperTable(
            "experiments",
            "",
            "Final losses of every experiment",
            lambda experiments: experiment_table(experiments.chosen),
        ),
        PaperTable(
            "reduction",
            "",
            "Iterations saved over the best baseline, at its final loss",
            paper_reductions,
        ),
        PaperTable(
            "leads",
            "",
            "Leads of basis rotation, without delay and from delay",
            lead_table,
            legend=LEADS_LEGEND,
        ),
        PaperTable(
            "leads-by-training-loss",
            "",
            "Leads of basis rotation by training loss, without delay and from delay",
            partial(lead_table, loss="train_loss"),
            legend=TRAINING_LEADS_LEGEND,
        ),
        PaperTable("ladder", "", "What delay costs, by the length of the training", ladder_table),
        FormulaTable(
            "stages",
            "Table 1",
            "The least number of stages of large models, by the memory of a device",
            lambda: stage_count_table(LLAMAS, DEVICES_GB),
        ),
        FormulaTable(
            "memory",
            "",
            "Memory beyond Adam's moments, GiB per matrix (fp32)",
            llama_overhead,
        ),
        PaperTable(
            "hessian-norm",
            "",
            NORM_TITLE,
            lambda experiments: norm_table(measured_norms([experiments.scale.curvature])),
        ),
        StudyTable(
            "similarity",
            "",
            "What delay costs where one number of the laptop preset is another",
            STUDY_RUNS,
            load_study,
            study_table,
        ),
        StudyTable(
            "causes",
            "",
            "What makes an optimizer stand delay: seven predictions, and what the runs say",
            CAUSES_RUNS,
            Causes.load,
            prediction_table,
            CAUSES_LEGEND,
        ),
        StudyTable(
            "causes-costs",
            "",
            "What each delay costs each arm of the study of causes",
            CAUSES_RUNS,
            Causes.load,
            cost_table,
            COSTS_LEGEND,
        ),
        StudyTable(
            "causes-differences",
            "",
            "How arms of the study of causes differ by seed",
            CAUSES_RUNS,
            Causes.load,
            difference_table,
            DIFFERENCES_LEGEND,
        ),
        StudyTable(
            "causes-norms",
            "",
            "The Hessian's norm in turned bases and in the original coordinates",
            CAUSES_RUNS,
            Causes.load,
            ratio_table,
            NORMS_LEGEND,
        ),
        StudyTable(
            "architectures",
            "",
            "What delay costs GPT's blocks and Llama's",
            ARCHITECTURE_RUNS,
            Architectures.load,
            architecture_table,
            ARCHITECTURES_LEGEND,
        ),
        StudyTable(
            "architecture-verdicts",
            "",
            "Whether the paper's conclusions hold for Llama's blocks",
            ARCHITECTURE_RUNS,
            Architectures.load,
            verdict_table,
            ARCHITECTURE_VERDICTS_LEGEND,
        ),
        StudyTable(
            "precision",
            "",
            "What basis rotation loses by products in TF32, and by covariances of few gradients",
            PRECISION_RUNS,
            losses_in,
            precision_table,
            PRECISION_LEGEND,
        ),
        StudyTable(
            "little-momentum",
            "",
            "What little momentum gains the baselines under delay",
            MOMENTUM_RUNS,
            LittleMomentum.load,
            momentum_table,
            MOMENTUM_LEGEND,
        ),
        StudyTable(
            "larger-validation",
            "",
            "Basis rotation's leads on more validation data",
            SCALES["tuned"].runs,
            LargerValidation.load,
            validation_table,
            LARGER_VALIDATION_LEGEND,
        ),
        PaperTable(
            "learning-rates",
            "",
            "Learning rates, chosen by the final validation loss",
            chosen_rates,
        ),
    )
}
