"""PPO arithmetic on packed response tokens, without process groups."""
