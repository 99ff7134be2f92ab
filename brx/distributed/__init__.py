"""Runs on several devices: their processes, the links between neighbours, and the launch. It knows
nothing of methods and run folders."""
