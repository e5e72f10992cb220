"""What a run costs on a cluster that is described, not present: its devices and links, laws of seconds, events in virtual time."""
