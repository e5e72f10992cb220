"""When everything is done: generators, the cut of a round, the cost model that both use, and the pass that adds messages."""
