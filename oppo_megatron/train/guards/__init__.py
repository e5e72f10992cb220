"""What guards do with a batch or an update: keep it, skip it, stop the run or take it back to a checkpoint; and replay it."""
