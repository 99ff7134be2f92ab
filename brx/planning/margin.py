"""How much of a device's memory a plan may fill."""

MARGIN = 0.05
"""The share of a device's memory that plans leave free, for CUDA's context and for gaps that the
allocator leaves between tensors. Plans do not count these."""


def usable(device_memory: float) -> float:
    """The bytes that a plan may fill."""
    return (1.0 - MARGIN) * device_memory
