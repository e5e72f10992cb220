"""Actions of guards: skip a step, stop the run or return to a checkpoint, keep the rejected batch, and replay it."""
