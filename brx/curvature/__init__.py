"""Curvature of a training loss at a checkpoint: Hessian products, Cauchy norms, bases,
oscillation."""
