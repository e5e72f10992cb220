"""A run that can be looked into: the page of `oppo report` and the terminal of `oppo watch`."""
