"""The order of a round: generators, the cut, the cost model and the messages."""
