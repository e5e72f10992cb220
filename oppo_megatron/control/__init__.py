"""Controllers: pure state machines, so that ranks and simulations decide the same."""
