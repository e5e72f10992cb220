"""Planning of rounds."""
