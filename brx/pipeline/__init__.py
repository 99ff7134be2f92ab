"""The delay engine: which weights a stage uses when, on any number of devices."""
