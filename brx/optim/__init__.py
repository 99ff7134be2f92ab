"""`BasisRotation` for anyone's training loop, and its mathematics; needs torch alone, and can be
lifted as a folder."""

from .basis_rotation import BasisRotation
from .gradient_guard import BadGradientError
from .param_groups import param_groups

__all__ = ["BadGradientError", "BasisRotation", "param_groups"]
