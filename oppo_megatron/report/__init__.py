"""Reports on runs: the page of `oppo report` and the terminal view of `oppo watch`."""
