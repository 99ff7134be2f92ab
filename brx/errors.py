"""The two ways in which a command fails on purpose, and two special cases; each becomes one line and an exit code."""


class UserError(Exception):
    """The request cannot be carried out as written (usage, configuration, missing file): exit code 2.

    The message is one line that names the file, key or shape, and says what would be right.
    """


class RunError(Exception):
    """A run that was asked for correctly failed on its way (non-finite loss, full disk, dead rank): exit code 1."""


class DivergedError(RunError):
    """The loss or a gradient is no longer finite: a result of the run's settings, unlike other failures."""


class NeighbourLostError(RunError):
    """Another device (rank `peer`, None if it could be any) closed its connection or stopped answering (`problem`)."""

    def __init__(self, peer: int | None, problem: str) -> None:
        super().__init__(f"{'a rank' if peer is None else f'rank {peer}'} {problem}")
        self.peer = peer
        self.problem = problem
