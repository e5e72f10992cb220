"""Controllers: pure state machines without clock, random numbers or I/O, so that ranks and simulations decide the same."""
