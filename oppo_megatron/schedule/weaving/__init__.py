"""The order of a round: generators, the cut, the cost model that both use, and the pass that adds messages."""
