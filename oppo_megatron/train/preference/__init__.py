"""Preference training: `oppo dpo` on the supervised loop.

tasks.py      rows as micro-batches, their losses, and KTO's z0     reference_pass.py  the reference's log-probs, computed once
logprobs.py   these log-probs, by the tokens of an answer
"""
