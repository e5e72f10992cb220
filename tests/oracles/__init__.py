"""Published implementations as oracles: TRL's trainers and verl's core algorithms.

They live in an environment of their own (`make test-oracles`).  `trl_oracle` and `verl_oracle` call their functions with
the rows of a batch; nothing of a formula stands there.
"""
