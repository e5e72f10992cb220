"""Published implementations as oracles: TRL's trainers, verl's core algorithms, OpenRLHF's losses.

They live in an environment of their own (`make test-oracles`).  `trl_oracle`, `verl_oracle` and `openrlhf_oracle` call their
functions with the rows of a batch; nothing of a formula stands there.
"""
