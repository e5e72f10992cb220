"""Whether a schedule can be carried out: the dry run in virtual time, and every fault that it or the lists show."""
