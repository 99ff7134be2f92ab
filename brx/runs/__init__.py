"""What a run leaves on disk, and how it is read: folder, metrics, checkpoints, and what is computed from many runs."""
