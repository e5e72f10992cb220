"""Planning of rounds: the books of all roles, the planner, and the merge of the replicas' tokens."""
