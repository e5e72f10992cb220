"""Reads a model's directory without loading the model: headers, sizes, vocabularies, ids.  No torch here."""
