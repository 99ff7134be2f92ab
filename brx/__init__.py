"""brx: GPT training under asynchronous pipeline parallelism, and basis rotation against gradient delay."""

__version__ = "0.1.0"
