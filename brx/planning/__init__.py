"""What a run will need before it starts: memory, multiplications, stages per device, time."""
