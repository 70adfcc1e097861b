"""The ranks: the training loop, its session, batches and their sources, checkpointing, evaluation, step metrics."""
