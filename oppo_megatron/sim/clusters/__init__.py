"""A cluster as `cluster.yaml` describes it, with the source of each of its constants."""
