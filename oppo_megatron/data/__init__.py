"""From a user's files to token ids.  No torch here."""
