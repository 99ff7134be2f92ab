"""The live table of a sweep in a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from brx.progress import duration, error_console, is_live
from brx.sweep.cell import Cell
from brx.sweep.state import State, iterations_done

REFRESH_S = 2.0  # between two drawings of the live table


class SweepDisplay:
    """Follows the cells of a sweep on stderr: a live table on a terminal, a line per change
    otherwise."""

    def __init__(self) -> None:
        self._console = error_console()
        self._is_live = is_live(self._console)
        self._live = Live(console=self._console, auto_refresh=False)
        # By trajectory id: cells beyond the grid may have the name of another one.
        self._states: dict[str, State] = {}
        self._cells: dict[str, Cell] = {}
        self._started: dict[str, tuple[float, int]] = {}  # when, and at which iteration
        self._begun = time.monotonic()
        self._last_refresh = 0.0
        if self._is_live:
            self._live.start()

    def begin(self, cells: Sequence[Cell]) -> None:
        """Follow further cells."""
        self._cells |= {cell.trajectory_id: cell for cell in cells}
        waiting = dict.fromkeys((cell.trajectory_id for cell in cells), State.WAITING)
        self._states = waiting | self._states

    def changed(self, cell: Cell, state: State, reason: str = "") -> None:
        """Note a cell's state, and print it if there is no live table."""
        was_running = self._states[cell.trajectory_id] is State.RUNNING
        self._states[cell.trajectory_id] = state
        self._cells[cell.trajectory_id] = cell  # its folder may be another one by now
        if state is State.RUNNING:
            self._started[cell.trajectory_id] = (time.monotonic(), iterations_done(cell.folder))
        if not self._is_live and (state is not State.DONE or was_running):
            num_done = Counter(self._states.values())[State.DONE]
            what = f"{state.value}: {cell.name}{f' ({reason})' if reason else ''}"
            line = f"{what}  [{num_done} of {len(self._states)} done{self._left()}]"
            self._console.print(line, soft_wrap=True)

    def refresh(self) -> None:
        """Draw the live table again, every `REFRESH_S` at most."""
        now = time.monotonic()
        if self._is_live and now - self._last_refresh > REFRESH_S:
            self._last_refresh = now
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """Leave the table as it is now on the terminal."""
        if self._is_live:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def _render(self) -> Group:
        counts = Counter(self._states.values())
        table = Table("running", "iteration", "of", "s / iteration", box=None)
        for key, cell in self._cells.items():
            if self._states[key] is State.RUNNING:
                since, first = self._started[key]
                done = iterations_done(cell.folder)
                pace = ""
                if done > first:
                    pace = f"{(time.monotonic() - since) / (done - first):.3f}"
                table.add_row(cell.name, str(done), str(cell.config.training.last_iteration), pace)
        line = ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        return Group(Text(line + self._left()), table)

    def _left(self) -> str:
        """The time that is left at the pace of all cells together so far, as `, 12 min left`; empty
        if there is no pace yet."""
        done = {key: iterations_done(cell.folder) for key, cell in self._cells.items()}
        done_here = sum(done[key] - first for key, (_, first) in self._started.items())
        remaining = 0
        for key, state in self._states.items():
            if state in (State.RUNNING, State.WAITING):
                remaining += self._cells[key].config.training.last_iteration - done[key]
        if done_here <= 0 or not remaining:
            return ""
        per_iteration = (time.monotonic() - self._begun) / done_here
        return f", {duration(per_iteration * remaining)} left"
