"""Preference training: `oppo dpo` and `oppo kto` on the supervised loop.

tasks.py            rows to micro-batches, and their losses         reference_pass.py  the reference's log-probs, once
logprob_file.py     those log-probs, by the tokens of an answer     fingerprint.py     what a reference is made from
reference_point.py  KTO's z0, measured before each step
"""
