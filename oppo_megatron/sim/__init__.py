"""What a run costs on a cluster that is described, not present: devices and links, laws of seconds, events in virtual time."""
