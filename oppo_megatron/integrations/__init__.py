"""Other projects' formats and programs."""
