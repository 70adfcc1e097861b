"""What is wrong with a machine before a run finds out: checks that start on the standard library alone."""
