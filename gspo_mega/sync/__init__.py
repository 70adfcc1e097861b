"""Weights from the trainer to the rollout servers, as one transaction that is verified.

`publish.py` is the way of one version, `transaction.py` takes all servers through it, `broadcast.py` sends through
process groups, and `verify.py` compares. docs/life_of_a_weight.md follows a weight through them.
"""
