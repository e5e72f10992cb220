"""Key/value caches and attention over them.

Legend: T packed tokens, S sequences, C longest chunk, B decode rows, M slots, P blocks, K positions of a block, W
blocks of a table, N query heads, G key/value heads, R = N / G, X = R + 2, L cached positions, D head dimension.
"""
