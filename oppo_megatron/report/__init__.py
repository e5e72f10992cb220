"""Reports on runs: the page of `oppo report` and its terminal view (--watch)."""
