"""`BasisRotation` for anyone's training loop, and its mathematics; needs torch alone, and can be
lifted as a folder."""

from brx.optim.basis_rotation import BadGradientError, BasisRotation
from brx.optim.param_groups import param_groups

__all__ = ["BadGradientError", "BasisRotation", "param_groups"]
