"""Constants of the planner's laws fitted to measurements."""
