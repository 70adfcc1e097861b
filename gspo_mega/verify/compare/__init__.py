"""`gspo-mega compare`: what other objectives would do with a run's recorded rollouts."""
