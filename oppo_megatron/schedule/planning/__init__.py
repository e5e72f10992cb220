"""Planning of rounds: the books of all roles, and the planner."""
