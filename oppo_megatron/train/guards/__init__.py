"""Actions of guards: skip a step, stop the run or return to a checkpoint, and keep the rejected batch."""
