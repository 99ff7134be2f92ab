"""What trains under delay: the table of methods, their optimizers, learning rates, refresh
schedules. Knows no file."""
