"""Checkpoints of a run.

keeper.py   when a checkpoint is due, its snapshot, and the best one    schema.py, state.py   everything but tensors
saver.py    checkpoints of PPO and of supervised training               caches.py             caches of sequences in flight
writing.py  a snapshot on disk, complete or not at all                  resuming.py           the last complete checkpoint
"""
