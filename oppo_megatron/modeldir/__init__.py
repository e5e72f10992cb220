"""The content of a model's directory, read without loading the model: headers, sizes, vocabularies, ids.  No torch here."""
