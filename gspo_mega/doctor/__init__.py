"""Find out what is wrong with a machine before a run does: checks that need the standard library alone."""
