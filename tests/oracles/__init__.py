"""TRL's trainers and verl's core algorithms as oracles, in their own environment (`make test-oracles`)."""
