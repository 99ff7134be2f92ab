"""Writes checkpoints in the background: the state is copied to host memory, and a thread writes the
copy while training goes on.

Every rank writes its stages and announces that they are saved. Rank 0 puts the checkpoint in place
when all ranks have finished. The next checkpoint waits until this one is complete. A rank waits as
long as any rank makes progress, however slow the storage is: `timeout_s` limits the time without
progress.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from brx.config.schema import RunConfig
from brx.errors import NeighbourLostError, RunError
from brx.pipeline.forecasts import copied_to
from brx.pipeline.world import World
from brx.runs import checkpoint
from brx.train.build import Assembly

POLL_S = 0.02
TELL_EVERY_S = 1.0  # a rank announces how much it has written at most once in this time

# Topics under which ranks announce. The rank's number is appended to the first two.
_PROGRESS = "bytes written by"
_SAVED = "stages saved by"
_COMPLETE = "complete checkpoint"
_ABANDONED = "checkpoint that will not be complete"

_StageStates = Iterable[tuple[int, dict[str, Any]]]
"""The index of each stage, and the content of its file."""


class CheckpointWriter:
    """Writes one checkpoint at a time.

    Args:
        run: the run's folder.
        config: says how many checkpoints stay, whether they have rings, and whether training goes
            on meanwhile (`checkpoint`).
    """

    def __init__(self, run: Path, config: RunConfig, world: World) -> None:
        self._run = run
        self._config = config
        self._world = world
        self._thread: threading.Thread | None = None
        self._stages: list[int] = []  # of this rank
        self._iteration = 0  # the iteration of the checkpoint that is being written
        self._error: BaseException | None = None
        self._is_given_up = False
        self._is_cut_off = False
        self._num_bytes = 0  # written by this rank, in all checkpoints
        self._num_steps = 0  # calls of `_count`
        self._told_at = 0.0  # when this rank last announced these two numbers

    def save(self, iteration: int, assembly: Assembly, content: checkpoint.Content) -> None:
        """Begin to write this rank's stages as they are now. Waits for the checkpoint before.

        Args:
            iteration: the last one that was made.
            assembly: what this rank trains with.
            content: the content of the manifest, which rank 0 writes.

        Raises:
            RunError: a checkpoint could not be written.
        """
        self.settle()
        states = self._states(assembly)
        in_background = self._config.checkpoint.background
        if in_background:
            # The training goes on and changes the originals.
            states = [(stage, _copied(state)) for stage, state in states]
        self._iteration = iteration
        self._stages = [stage.index for stage in assembly.stages]
        self._thread = threading.Thread(
            target=self._write, args=(iteration, states, content), daemon=True
        )
        self._thread.start()
        if not in_background:
            self.settle()

    def check(self) -> None:
        """Look for an error of the checkpoint under way, between two iterations.

        Raises:
            RunError: it has failed on this rank.
        """
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def settle(self) -> None:
        """Wait until the checkpoint under way, if there is one, is complete.

        Raises:
            RunError: it has failed on this rank, or nobody has written anything for a while.
        """
        if self._thread is None:
            return
        awaited = str(self._iteration)
        self._wait(lambda: self._world.announced(_COMPLETE) == awaited or self._error is not None)
        self._join()
        self.check()

    def give_up(self) -> None:
        """After a failure of the run: let this rank finish its own files, without waiting for the
        other ranks'."""
        self._is_given_up = True
        self._join()

    def cut_off(self) -> None:
        """Stop writing at once. The checkpoint under way will not be complete."""
        self._is_given_up = self._is_cut_off = True
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _states(self, assembly: Assembly) -> _StageStates:
        for stage in assembly.stages:
            state = assembly.stage_state(stage)
            if not self._config.checkpoint.rings:
                state["versions"] = state["versions"] | {"ring": None}
            yield stage.index, state

    def _write(
        self,
        iteration: int,
        states: _StageStates,
        content: checkpoint.Content,
    ) -> None:
        world = self._world
        try:
            with torch.no_grad():
                entries = [
                    checkpoint.write_stage(self._run, iteration, stage, state, self._count)
                    for stage, state in states
                ]
            saved = json.dumps({"iteration": iteration, "stages": entries})
            world.announce(f"{_SAVED} {world.rank}", saved)
            if world.rank == 0:
                self._finish(iteration, content)
                world.announce(_COMPLETE, str(iteration))
            elif self._is_abandoned(iteration):
                checkpoint.discard(self._run, iteration, self._stages)
        except BaseException as error:  # raised again by `check`, in the main thread
            self._error = error
            self._discard(iteration)

    def _is_abandoned(self, iteration: int) -> bool:
        """Whether rank 0 has said that it will not put this checkpoint in place."""
        # A rank that does not hear rank 0 leaves its files: they may be put in place right now.
        with contextlib.suppress(NeighbourLostError):
            return self._world.announced(_ABANDONED) == str(iteration)
        return False

    def _discard(self, iteration: int) -> None:
        """After an error in `_write`: remove the files, which nobody will put in place.

        Rank 0 also removes the files of ranks that have saved their stages. It announces first
        that it has given up. Other ranks look for this after they have announced that they have
        saved. Whichever comes first, one of the two removes the files.
        """
        world = self._world
        stages = list(self._stages)
        if world.rank == 0:
            with contextlib.suppress(NeighbourLostError):
                world.announce(_ABANDONED, str(iteration))
                for rank in range(world.num_ranks):
                    if self._has_saved(rank, iteration):
                        stages += [entry["stage"] for entry in self._saved_by(rank)["stages"]]
        checkpoint.discard(self._run, iteration, stages)

    def _finish(self, iteration: int, content: checkpoint.Content) -> None:
        """On rank 0: wait for all ranks, and put the checkpoint in place."""
        ranks = range(self._world.num_ranks)
        self._wait(lambda: all(self._has_saved(rank, iteration) for rank in ranks))
        training = self._config.training
        entries: list[checkpoint.Content] = []  # per stage
        for rank in ranks:
            entries += self._saved_by(rank)["stages"]
        checkpoint.finish(
            self._run,
            iteration,
            content | {"rings": self._config.checkpoint.rings},
            entries,
            training.keep_checkpoints,
            training.keep_at,
        )

    def _saved_by(self, rank: int) -> dict[str, Any]:
        """What a rank has announced as saved: `iteration`, and `stages` with an entry per stage for
        the manifest. Empty before its first checkpoint."""
        announced = self._world.announced(f"{_SAVED} {rank}")
        saved: dict[str, Any] = {} if announced is None else json.loads(announced)
        return saved

    def _has_saved(self, rank: int, iteration: int) -> bool:
        return bool(self._saved_by(rank).get("iteration") == iteration)

    def _count(self, num_bytes: int) -> None:
        """Note that this many more bytes are on the disk, and from time to time tell the other
        ranks."""
        if self._is_cut_off:
            raise RunError(f"checkpoint of iteration {self._iteration}: cut off")
        self._num_bytes += num_bytes
        self._num_steps += 1
        now = time.monotonic()
        if now - self._told_at > self._tell_every_s:
            self._told_at = now
            progress = f"{self._num_bytes} in {self._num_steps} steps"
            self._world.announce(f"{_PROGRESS} {self._world.rank}", progress)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until `is_over()` is true, for as long as any rank makes progress.

        Raises:
            NeighbourLostError: no rank has made progress for `pipeline.timeout_s`.
        """
        timeout_s = self._config.pipeline.timeout_s
        seen = self._progress()
        changed_at = looked_at = time.monotonic()
        while not is_over():
            if self._is_given_up:
                raise RunError(f"checkpoint of iteration {self._iteration}: given up")
            now = time.monotonic()
            if now - looked_at > self._tell_every_s:
                looked_at = now
                progress = self._progress()
                if progress != seen:
                    seen = progress
                    changed_at = now
            if now - changed_at > timeout_s:
                problem = f"wrote nothing of a checkpoint for {timeout_s:g} s"
                raise NeighbourLostError(self._first_late(), problem)
            time.sleep(POLL_S)

    @property
    def _tell_every_s(self) -> float:
        return min(TELL_EVERY_S, self._config.pipeline.timeout_s / 4)

    def _progress(self) -> list[str | None]:
        """All announcements of all ranks about the checkpoint under way."""
        topics = [_COMPLETE]
        for rank in range(self._world.num_ranks):
            topics += [f"{_PROGRESS} {rank}", f"{_SAVED} {rank}"]
        return [self._world.announced(topic) for topic in topics]

    def _first_late(self) -> int:
        """The first rank whose stages are not saved. If all are, rank 0 is late: it has not put the
        checkpoint in place."""
        for rank in range(self._world.num_ranks):
            if not self._has_saved(rank, self._iteration):
                return rank
        return 0


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a stage with copies on the CPU of all that the training may change."""
    copied = dict(state)
    for key in Assembly.SHARED:
        if key in state:
            copied[key] = copied_to("cpu", state[key])
    return copied
