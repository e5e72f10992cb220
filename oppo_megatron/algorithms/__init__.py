"""PPO arithmetic on packed response tokens: tensors in, tensors out; no process groups, no reductions over ranks."""
