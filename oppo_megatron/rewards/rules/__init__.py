"""The rules of kind verifier beside those of numbers: choices, formats, lengths, mathematics, code.

A rule that can tell early has `settled(prefix)`: the score of every response that begins with this text, or None while
continuations differ.
"""
