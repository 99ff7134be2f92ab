"""Plans a run before it starts: its memory, operations, stages per device, and time."""
