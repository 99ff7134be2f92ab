"""How much of a device's memory a plan may fill."""

MARGIN = 0.05
"""The share that no plan counts: CUDA's context, and gaps that the allocator leaves between
tensors."""


def usable(device_memory: float) -> float:
    """The bytes that a plan may fill."""
    return (1.0 - MARGIN) * device_memory
