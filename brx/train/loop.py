"""The training loop. Every device runs it on its own stages, and it is the same for one device and
for many.

`Trainer.run` trains segment after segment (`_run_segment`). Between two segments the pipeline is
empty, for a validation or a checkpoint. Within a segment, the engine makes one update after another
(`brx.pipeline.engine`).
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import profiler
from torch.utils.checkpoint import CheckpointError

from brx.config.schema import OwnModelConfig, RunConfig
from brx.config.user_code import allowed, fault, is_raised_in
from brx.data.batches import Prefetcher, check_validation_examples, validation_set
from brx.data.prepare import PreparedData, prepare
from brx.errors import DivergedError, NeighbourLostError, RunError, UserError, counted
from brx.files import make_folder
from brx.methods.trajectory_version import TRAJECTORY_VERSION
from brx.model.checks import check_model_of
from brx.model.stage import partition
from brx.pipeline.delay import shortfall
from brx.pipeline.engine import StepResult, check_finite
from brx.pipeline.world import World
from brx.planning.cuts import assign
from brx.planning.placement import check_memory
from brx.planning.stage_times import measure_stage_costs
from brx.progress import ProgressBar, tell
from brx.runs import checkpoint
from brx.runs.checkpoint import (
    DamagedError,
    check_data,
    check_request,
    choose_checkpoint,
    what_is_saved,
)
from brx.runs.folder import RunFolder, name_of_run
from brx.runs.lock import hold
from brx.runs.metrics import truncate_metrics
from brx.runs.trajectory import trajectory_of
from brx.train.agreement import agree, facts_of
from brx.train.build import assemble, training_batches
from brx.train.checks import check_head, check_method
from brx.train.code_facts import with_facts
from brx.train.device import (
    StopSignal,
    autocast,
    check_compiler,
    check_gpus_differ,
    choose_device,
    is_out_of_memory,
    out_of_memory_in_one_line,
    set_up,
)
from brx.train.recorder import RunPoint, RunRecorder, StepNumbers, peak_memory
from brx.train.saving import CheckpointWriter
from brx.train.trackers import check_trackers

Status = Literal["finished", "interrupted", "out of time"]
"""How a session ended. `out of time` means that its time was used up, which is not a failure."""


# What a rank announces when it is asked to stop.
SIGNAL = "signal"
OUT_OF_TIME = "out of time"


@dataclass(frozen=True)
class _TimedResult:
    """An update that is not reported yet."""

    result: StepResult
    seconds: float  # of training when it was made, over all sessions


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    world: World | None = None,
    profile: bool = False,
    seconds: float = math.inf,
    verify: bool = False,
) -> Status:
    """Train or continue one run, to its end or until it is asked to stop.

    Code that the configuration names is imported. A line on stderr names it before.

    Args:
        out: the run's folder.
        resume: continue from the newest checkpoint in `out`, if there is one. Otherwise `out` must
            hold no run.
        world: the processes of the run; by default this one alone.
        profile: record a few iterations with torch's profiler, into `out`/profile.
        seconds: the most time from this call until the session saves and ends.
        verify: compute the SHA-256 of the token files, even if they look unchanged.

    Returns:
        How the session ended.

    Raises:
        UserError: the run cannot be trained as configured.
        RunError: it failed. `DivergedError`, if a loss or gradient is not finite.
    """
    deadline = time.monotonic() + min(seconds, config.training.session_seconds)
    world = world or World()
    folder = RunFolder(out)
    with allowed(), hold(out) if world.rank == 0 else nullcontext():
        if world.rank == 0:
            check_request(folder, config, resume=resume)
            check_trackers(config)
        with out_of_memory_in_one_line():
            fingerprint = checkpoint.recorded_fingerprint(out) if resume else None
            trainer = Trainer(config, folder, world, verify=verify, fingerprint=fingerprint)
            return trainer.run(resume=resume, profile=profile, deadline=deadline)


class Trainer:
    """One run on one device."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        world: World,
        *,
        verify: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        """
        Args:
            world: the processes of the run.
            verify: compute the SHA-256 of the token files, even if they look unchanged.
            fingerprint: the fingerprint of the data that the run was trained on before, if it was.

        Raises:
            UserError: the run cannot be trained as configured.
        """
        self.config = config
        self.folder = folder
        self.world = world
        self.is_writer = world.rank == 0  # writes metrics, summary and progress
        self.device, self.device_reason = choose_device(
            config.runtime.device, world.local_rank, share_gpus=config.runtime.share_gpus
        )
        self._prepare_device()
        self._check_settings()
        ranges = self._stage_ranges()
        check_head(config)
        self.planned_memory = check_memory(config, self.device, world, ranges)
        self.data = self._prepare_data(verify, fingerprint)
        self.prefetcher = Prefetcher(training_batches(config, self.data).batch, self.device)
        # For optimizers that draw numbers of their own; a checkpoint has the generator's state.
        torch.manual_seed(config.training.seed)
        self.assembly = assemble(
            config, self.prefetcher.batch, device=self.device, world=world, own=ranges[world.rank]
        )
        self.iteration = 0
        self.training_seconds = 0.0
        self._end = 0  # last iteration of the current segment
        self._last = config.training.last_iteration
        self._writer = CheckpointWriter(folder.path, config, world)
        # After which iteration all ranks stop: rank 0 announces it.
        self._stop_at: int | None = None
        self._has_asked = False  # whether this rank has asked for a stop
        self._deadline = math.inf
        self._recorder: RunRecorder | None = None  # only the writer's
        self._after_iteration: Callable[[], None] = lambda: None
        self._traces = folder.path / "profile"

    def _prepare_device(self) -> None:
        """Make sure that all ranks train the same run on devices of their own, and set this one
        up."""
        runtime = self.config.runtime
        agree(self.world, facts_of(self.config))
        if not runtime.share_gpus:
            check_gpus_differ(self.world, self.device)
        check_compiler(runtime, self.device)
        set_up(runtime, self.device, self.world.num_local_ranks)

    def _check_settings(self) -> None:
        """Refuse what can be refused without data, before hours go into preparing them."""
        config = self.config
        autocast(config.runtime, self.device)
        check_method(config, self.device)
        check_model_of(config)
        if config.data.tokens is not None:
            check_budget(config, config.data.tokens)

    def run(self, *, resume: bool, profile: bool = False, deadline: float = math.inf) -> Status:
        """Train until the run's end, a signal, or the deadline.

        Args:
            resume: continue from the newest checkpoint, if there is one.
            profile: record a few iterations, into `profile` in the run's folder.
            deadline: a time of `time.monotonic`.
        """
        self._deadline = deadline
        self._prepare_folder(resume=resume)
        note = shortfall([stage.delay for stage in self.assembly.stages])
        if note is not None:
            self._say(note)
        with ExitStack() as stack:
            stack.enter_context(closing(self.prefetcher))
            if profile:
                recorded = stack.enter_context(iteration_profiler(self._traces, self.world.rank))
                self._after_iteration = recorded.step
            stop = stack.enter_context(StopSignal())
            progress = stack.enter_context(self._make_progress_bar())
            if self.is_writer:
                self._open_recorder(progress, stack, resume=resume)
            try:
                self._train(stop)
                self._writer.settle()
            except KeyboardInterrupt:  # a second Ctrl-C: the first one only asks for a stop
                self._writer.cut_off()
                progress.say(what_is_saved(self.folder.path, self.iteration))
                raise
            except DivergedError as error:
                # Several ranks may have found different stages. All of them, and summary.json, name
                # the one that was announced first.
                raise DivergedError(self._fail(error)) from None
            except Exception as error:
                self._fail(error)
                raise
            return self._finish(progress, profile=profile)

    def _prepare_folder(self, *, resume: bool) -> None:
        """Clear up after a crash, restore the newest checkpoint, and write config.yaml."""
        if self.is_writer:
            checkpoint.recover(self.folder.path)
        self.world.barrier()
        if resume:
            self._restore()
        if self.is_writer:
            self.folder.create(with_facts(self.config, self.assembly), resume=resume)

    def _make_progress_bar(self) -> ProgressBar:
        name = name_of_run(self.folder.path)
        is_quiet = not self.is_writer
        return ProgressBar(name, "iteration", self._last, self.iteration, quiet=is_quiet)

    def _open_recorder(self, progress: ProgressBar, stack: ExitStack, *, resume: bool) -> None:
        """On rank 0: open metrics and trackers, without what was written after the checkpoint."""
        if resume:
            truncate_metrics(self.folder.metrics, self.iteration)
            checkpoint.remove_after(self.folder.path, self.iteration)
        self._recorder = RunRecorder(
            self.config,
            self.folder,
            progress,
            stack,
            assembly=self.assembly,
            device=self.device,
            fingerprint=self.data.fingerprint,
            start=RunPoint(self.iteration, self.training_seconds),
        )
        progress.say(f"device {self.device} ({self.device_reason})")
        if self.iteration >= self._last:
            progress.say(self._why_nothing_is_left())
        self.assembly.updater.tell_first_bases(
            lambda done, total: progress.say_at_times(f"first bases: {done:,} of {total:,}")
        )

    def _why_nothing_is_left(self) -> str:
        """What to say of a run that is continued and has made all its iterations already."""
        training = self.config.training
        why = f"all {counted(self.iteration, 'iteration', ',')} are done already"
        if self._last < training.iterations:
            why += (
                f", up to training.stop_after; --set training.stop_after=null goes on to "
                f"{training.iterations:,}"
            )
        return why

    def _fail(self, error: Exception) -> str:
        """Tell the other ranks about an error here, and write the failed run's summary.

        Returns:
            The run's error: what a rank has announced, or else the error here.
        """
        # A lost neighbour is only the consequence of another rank's error.
        if not isinstance(error, NeighbourLostError):
            topic = "diverged" if isinstance(error, DivergedError) else "failed"
            self.world.announce_first(topic, str(error) or type(error).__name__)
        self._writer.give_up()
        status, problem = self._cause_of(error)
        if self._recorder is not None:
            self._recorder.summarize(status, self.iteration, self.training_seconds, problem)
        return problem

    def _cause_of(self, error: Exception) -> tuple[str, str]:
        """The status of the failed run and its error: what a rank has announced, or else the error
        here."""
        # Where the announcements are lost as well, the summary still says that the run failed.
        with suppress(NeighbourLostError):
            for status in ("diverged", "failed"):
                problem = self.world.announced(status)
                if problem is not None:
                    return status, problem
        return "diverged" if isinstance(error, DivergedError) else "failed", str(error)

    def _finish(self, progress: ProgressBar, *, profile: bool) -> Status:
        """After a session without an error: write summary.json, and say how it ended."""
        is_finished = self.iteration >= self._last
        # summary.json does not tell a session whose time was up from other interrupted ones.
        status_in_summary: Literal["finished", "interrupted"]
        status_in_summary = "finished" if is_finished else "interrupted"
        status: Status = status_in_summary
        if not is_finished and self.world.announced("stop-asked") == OUT_OF_TIME:
            status = "out of time"
        memory = self.world.gather((peak_memory(self.device), self.planned_memory.peak))
        if self._recorder is None:
            return status
        self._recorder.summarize(
            status_in_summary,
            self.iteration,
            self.training_seconds,
            memory=memory,
        )
        if profile:
            self._tell_profile(progress)
        if not is_finished:
            why = " as its time is over" if status == "out of time" else ""
            progress.say(f"stopped after iteration {self.iteration}{why}; continue with --resume")
        return status

    def _tell_profile(self, progress: ProgressBar) -> None:
        share = self.prefetcher.seconds_waited / max(self.training_seconds, 1e-9)
        if any(self._traces.iterdir()):
            result = f"profile in {self._traces}"
        else:
            result = "no profile before 12 iterations"
        progress.say(f"{result}; waited for data {share:.1%} of the time")

    def _train(self, stop: StopSignal) -> None:
        """Run segment after segment. The pipeline is empty between them, for validations and
        checkpoints."""
        training = self.config.training
        is_stopped = False
        while self.iteration < self._last and not is_stopped:
            self._run_segment(self._end_of_segment(), stop)
            is_last = self.iteration == self._last
            is_stopped = self.iteration == self._stop_at
            if is_last or self.iteration % training.validation_every == 0:
                self._validate()
            is_due = self.iteration % training.checkpoint_every == 0
            is_kept = self.iteration in training.keep_at
            if is_due or is_kept or is_last or is_stopped:
                self._save()

    def _end_of_segment(self) -> int:
        """The next iteration after which there is a validation or a checkpoint."""
        training = self.config.training
        ends = [self._last]
        for every in (training.validation_every, training.checkpoint_every):
            ends.append((self.iteration // every + 1) * every)
        ends += [at for at in training.keep_at if at > self.iteration]
        return min(ends)

    def _run_segment(self, end: int, stop: StopSignal) -> None:
        """Train to iteration `end`, or to an earlier one if asked to stop on the way."""
        # A stop that is known already counts from the start of the segment. Later it would be too
        # late, because forward passes of further micro-batches would already be under way.
        self._end = self._until_stop(end)
        pending: list[_TimedResult] = []
        started = time.perf_counter()
        seconds_before = self.training_seconds
        try:
            for result in self._updates():
                self.iteration = result.iteration
                seconds = seconds_before + time.perf_counter() - started
                pending.append(_TimedResult(result, seconds))
                self._after_iteration()
                self._look_for_stop(stop)
                self._writer.check()
                self._end = self._until_stop(end)
                is_log_point = self.iteration % self.config.training.log_every == 0
                if is_log_point or self.iteration == self._end:
                    reported, pending = pending, []
                    self._report(reported)
        except RunError:
            # With several devices, the others can no longer be asked for their numbers.
            if self.world.num_ranks == 1:
                self._report(pending)
            raise
        finally:
            self.training_seconds = seconds_before + time.perf_counter() - started

    def _updates(self) -> Iterator[StepResult]:
        """The updates up to `_end`, as they are made."""
        with self._model_faults_in_one_line():
            yield from self.assembly.engine.run(self.iteration + 1, lambda: self._end)

    @contextmanager
    def _model_faults_in_one_line(self) -> Iterator[None]:
        """A context in which an exception from the file of a user's own model becomes a RunError of
        one line."""
        try:
            yield
        except (Exception, SystemExit) as error:  # sys.exit() would end the run as if it were done
            model = self.config.model
            if not isinstance(model, OwnModelConfig):
                raise
            # A checkpoint fails in the backward pass, where no line of the model's file is.
            is_from_model = is_raised_in(error, model.name) or isinstance(error, CheckpointError)
            if isinstance(error, RunError) or is_out_of_memory(error) or not is_from_model:
                raise
            at = f"after iteration {self.iteration}"
            raise RunError(f"model.class {model.name}: {at}: {fault(error, model.name)}") from error

    def _look_for_stop(self, stop: StopSignal) -> None:
        """Between two iterations: tell all ranks if this one was asked to stop, and learn after
        which iteration they all stop.

        Rank 0 chooses the iteration. When it has made update t, it has begun no forward pass of an
        update later than t + R - 1. Every rank needs such a pass for update t + R, so it finds the
        choice announced when it makes that update. Its own forward passes are then at most R - 1
        updates ahead. So all ranks learn in time of a stop after iteration t + 2R - 1.
        """
        world = self.world
        if self._stop_at is not None:
            return
        is_asked_here = stop.requested or time.monotonic() > self._deadline
        if is_asked_here and not self._has_asked:
            self._has_asked = True
            if world.announced("stop-asked") is None:
                world.announce("stop-asked", SIGNAL if stop.requested else OUT_OF_TIME)
        if world.rank == 0 and world.announced("stop-asked") is not None:
            later = 2 * world.num_ranks - 1 if world.num_ranks > 1 else 0
            world.announce("stop", str(self.iteration + later))
        announced = world.announced("stop")
        self._stop_at = None if announced is None else int(announced)

    def _until_stop(self, end: int) -> int:
        return end if self._stop_at is None else min(end, self._stop_at)

    def _report(self, pending: list[_TimedResult]) -> None:
        """Let rank 0 record these iterations, up to the first one that is not finite.

        Raises:
            DivergedError: there is such an iteration.
        """
        steps, diverged = self._fetch(pending)
        # With several devices, the other ranks may have found nothing wrong. They would not take
        # part in the gathering.
        if steps and (diverged is None or self.world.num_ranks == 1):
            reports = self.world.gather((steps, peak_memory(self.device)))
            if self._recorder is not None:
                seconds = [timed.seconds for timed in pending[: len(steps)]]
                self._recorder.record(reports, seconds)
        if diverged is not None:
            raise diverged

    def _fetch(self, pending: list[_TimedResult]) -> tuple[list[StepNumbers], DivergedError | None]:
        """The numbers of these iterations, before the first one that is not finite; and the error
        for that one. On a GPU this waits for the device."""
        failed_refreshes = self.assembly.updater.num_failed_refreshes
        first_stage = self.assembly.stages[0].index
        steps: list[StepNumbers] = []
        for timed in pending:
            step = StepNumbers.of(timed.result, failed_refreshes)
            try:
                check_finite(step.iteration, step.loss, torch.tensor(step.grad_norms), first_stage)
            except DivergedError as error:
                return steps, error
            steps.append(step)
        return steps, None

    def _validate(self) -> None:
        """Record the loss of the newest weights on the validation set.

        Raises:
            DivergedError: it is not finite. The training loss after the last update is not
                computed, so this may be the first to show it.
        """
        training = self.config.training
        batches = validation_set(
            self.data.validation,
            sequence_length=self.config.model.sequence_length,
            examples=training.validation_examples,
            batch_size=training.batch_size,
        )
        on_device = [
            (inputs.to(self.device), targets.to(self.device)) for inputs, targets in batches
        ]
        with (
            self.assembly.updater.evaluation(self.iteration),
            self._model_faults_in_one_line(),
        ):
            own_loss = self.assembly.engine.evaluate(on_device)
        losses = self.world.gather(own_loss)
        if self._recorder is None:
            return
        loss = losses[-1]  # the last device has the head
        assert loss is not None
        if not math.isfinite(loss):
            raise DivergedError(f"iteration {self.iteration}: the validation loss is {loss}")
        self._recorder.record_validation(self.iteration, loss)

    def _save(self) -> None:
        """Begin to write a checkpoint: every device its stages, rank 0 the rest."""
        if self._recorder is not None:
            self._recorder.metrics.sync()  # a checkpoint is no use without the metrics before it
        content = {
            "fingerprint": self.data.fingerprint,
            "trajectory_version": TRAJECTORY_VERSION,
            "settings": trajectory_of(self.config),
            "num_stages": self.config.pipeline.stages,
            "training_seconds": self.training_seconds,
        }
        self._writer.save(self.iteration, self.assembly, content)

    def _restore(self) -> None:
        """Continue from the newest checkpoint that can be continued from, if there is one."""
        newest = self._intact_checkpoint()
        if newest is None:
            if self.folder.metrics.exists():
                self._say(f"{self.folder.path}: has no checkpoint; it begins at iteration 1 again")
            return
        manifest = checkpoint.read_manifest(newest)
        check_data(manifest, newest, self.data.fingerprint)
        self.assembly.restore(newest)
        self.iteration = manifest["iteration"]
        if not manifest.get("rings", True):
            self._say(
                f"{newest}: has no older weight versions (checkpoint.rings: false); the newest "
                f"weights take their place, so losses differ from a run without interruption"
            )
        self.training_seconds = manifest["training_seconds"]

    def _intact_checkpoint(self) -> Path | None:
        """The newest checkpoint whose stages every rank has found intact; None if there is no
        checkpoint at all.

        Raises:
            UserError: no checkpoint can be continued from.
        """
        damaged: dict[Path, DamagedError] = {}
        while True:
            chosen: tuple[Path | None, str] = (None, "")
            if self.is_writer:
                chosen = choose_checkpoint(self.folder, self.config, damaged)
            newest, note = self.world.broadcast(chosen)
            if note:
                self._say(note)
            if newest is None:
                break
            error = self.world.broadcast(self._first_damage(newest))
            if error is None:
                for before in damaged.values():
                    self._say(f"{before.problem}; continuing from {newest}")
                return newest
            damaged[newest] = error
        if damaged:
            raise next(iter(damaged.values()))
        return None

    def _first_damage(self, chosen: Path) -> DamagedError | None:
        """On rank 0: the first damage that any rank has found in its stages of a checkpoint."""
        error = None
        try:
            checkpoint.check_stage_files(chosen, [stage.index for stage in self.assembly.stages])
        except DamagedError as damage:
            error = damage
        damages = [damage for damage in self.world.gather(error) if damage is not None]
        return damages[0] if damages else None

    def _say(self, note: str) -> None:
        if self.is_writer:
            tell(note)

    def _prepare_data(self, verify: bool, fingerprint: str | None) -> PreparedData:
        """Make or find the token files; UserError if they do not suffice for the run."""
        # Rank 0 makes the token files. The other ranks wait here until it has made them, and then
        # find them.
        if not self.is_writer:
            self.world.barrier(patient=True)
        # One rank of each machine hashes them, as every machine may have token files of its own.
        is_first_here = self.world.local_rank == 0
        data = prepare(
            self.config.data,
            quiet=not self.is_writer,
            always_hash=verify and is_first_here,
            fingerprint=fingerprint,
        )
        if self.is_writer:
            self.world.barrier(patient=True)
        # A machine with a data.directory of its own may take as long with its token files.
        self.world.barrier(patient=True)
        agree(self.world, {"fingerprint of the data": data.fingerprint})
        check_enough_data(self.config, data)
        return data

    def _stage_ranges(self) -> list[range]:
        """The stages of each rank."""
        ranges = partition(self.config.pipeline.stages, self.world.num_ranks)
        if self.config.pipeline.balance == "time" and self.world.num_ranks > 1:
            # Measured once, on rank 0, because all ranks have to agree. The trajectory does not
            # depend on the ranges.
            costs = measure_stage_costs(self.config, self.device) if self.is_writer else []
            ranges = assign(self.world.broadcast(costs), self.world.num_ranks)
        return ranges


def check_enough_data(config: RunConfig, data: PreparedData) -> None:
    """UserError if the token files do not suffice for the run."""
    check_budget(config, data.train.num_tokens)
    check_validation_examples(
        data.validation, config.model.sequence_length, config.training.validation_examples
    )


def check_budget(config: RunConfig, num_tokens: int) -> None:
    """UserError if the run reads its `num_tokens` training tokens more often than `data.max_epochs`
    times."""
    needed = config.training.last_iteration * config.tokens_per_update
    epochs = needed / num_tokens
    if epochs > config.data.max_epochs:
        raise UserError(
            f"data.source {config.data.source}: the run reads {needed:,} tokens, there are "
            f"{num_tokens:,}: {epochs:.2f} epochs; allow it with "
            f"data.max_epochs={math.ceil(epochs * 100) / 100:.2f}"
        )


def iteration_profiler(folder: Path, rank: int) -> profiler.profile:
    """A profiler that records iterations 8 to 12 of a session into FOLDER/rank-R.json, with the
    schedule's actions as named ranges. Call its `step` after each iteration."""
    make_folder(folder)
    path = folder / f"rank-{rank}.json"
    # 5 iterations are left out (allocators, kernel choices), 2 warm the profiler up, 5 are
    # recorded.
    schedule = profiler.schedule(wait=5, warmup=2, active=5, repeat=1)
    return profiler.profile(
        schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path))
    )
