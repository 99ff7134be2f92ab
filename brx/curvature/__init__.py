"""Measures the curvature of the training loss at a checkpoint: Hessian-vector products, (1,1)-norms
from Cauchy vectors, bases, and oscillation."""
