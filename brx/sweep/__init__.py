"""Sweeps: grids of runs, how they are chosen among, and where they run."""
