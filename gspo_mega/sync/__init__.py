"""Weights from the trainer to the rollout servers, as one transaction that is verified.

`publish.py` publishes one version, `transaction.py` takes all servers through the steps, `broadcast.py` sends through
process groups, and `verify.py` compares what arrived. docs/life_of_a_weight.md follows a weight through them.
"""
