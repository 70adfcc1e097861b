"""`gspo-mega compare`: show what other objectives would do with a run's recorded rollouts."""
