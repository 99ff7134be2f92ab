"""Four packets of measurements for a machine with a GPU, eight minutes each: see README.md."""
