"""Weights from the trainer to the rollout servers, as one transaction that is verified."""
