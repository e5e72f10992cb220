"""Verifier rules other than numbers: choices, formats, lengths, mathematics, code.

A rule that can score early has `settled(prefix)`: the score of every response that begins with this text, or None while
continuations differ.
"""
