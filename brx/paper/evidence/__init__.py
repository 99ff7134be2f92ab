"""What our runs say on each of the paper's claims: functions from `Experiments` to `Evidence`."""
