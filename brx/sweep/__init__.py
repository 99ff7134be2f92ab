"""Grids of runs, and where they run."""
