"""The two ways in which a command fails on purpose; each becomes one line on stderr and an exit code."""


class UserError(Exception):
    """The request cannot be carried out as written (usage, configuration, missing file): exit code 2.

    The message is one line that names the file, key or shape, and says what would be right.
    """


class RunError(Exception):
    """A run that was asked for correctly failed on its way (non-finite loss, full disk, dead rank): exit code 1."""
