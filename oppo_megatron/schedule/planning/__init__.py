"""What is to be done in a round: the books of all roles, the planner, and the merge of what the replicas decoded."""
