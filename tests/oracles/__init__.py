"""Published implementations as oracles: TRL's trainers and verl's core algorithms.

They have their own environment (`make test-oracles`).  `trl_oracle` and `verl_oracle` call their functions and contain no
formula.
"""
