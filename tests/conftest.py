"""What holds for all tests."""

from hypothesis import settings

# The same examples in every run, however slow the machine: a change that breaks nothing must not fail by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
