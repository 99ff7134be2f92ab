"""Optimizers: `BasisRotation` for anyone's training loop, and the methods that brx trains with."""

from brx.optim.basis_rotation import BasisRotation

__all__ = ["BasisRotation"]
