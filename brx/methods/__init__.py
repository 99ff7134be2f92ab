"""What trains under delay: the table of methods, with their optimizers, learning rates and refresh
schedules. It reads and writes no files."""
