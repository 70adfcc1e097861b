"""The ranks: the training loop, its session, batches and their sources, checkpointing, evaluation, step metrics.

`loop.py` is the loop that every rank runs; `rank0.py` has what only rank 0 does, and `scatter.py` how its batches reach
the other ranks. `critic_step.py` trains a critic; `reports.py` computes a step's metrics.
"""
