"""How much of a device's memory a plan may fill."""

# Of a device's memory, what no plan counts: the context of CUDA, buffers of communicators, and gaps
# that the allocator leaves between tensors.
MARGIN = 0.05


def usable(device_memory: float) -> float:
    """Of a device's memory, the bytes that a plan may fill."""
    return (1.0 - MARGIN) * device_memory
