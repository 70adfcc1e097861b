"""A run as a page: curves, trajectories, verdicts, and the differences between two runs."""
