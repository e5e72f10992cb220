"""What a model's directory holds, read without loading it: headers, sizes, vocabularies, ids.  No torch here."""
