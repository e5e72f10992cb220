"""Key/value caches and attention over them.

Legend of the room: T packed tokens of a call, S sequences of the call, C longest chunk of the call, B rows of a decode step, M
slots, P blocks, K positions of a block, W blocks of a table, N query heads, G key/value heads of this rank, R query heads per
key/value head, X = R + 2 (query heads, key, value), L cached positions, D head dimension.
"""
