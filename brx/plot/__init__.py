"""One look for all figures, and the figures that any runs can have."""
