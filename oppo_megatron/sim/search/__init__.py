"""Search of the execution plan of a configuration on a cluster: which ranks hold which role, in which layouts."""
