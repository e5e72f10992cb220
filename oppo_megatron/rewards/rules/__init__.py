"""Verifier rules other than numbers: choices, formats, lengths, mathematics, code."""
