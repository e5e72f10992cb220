"""A reward as a service over HTTP: for runs of `kind: http`."""
