"""Simulate a run on many machines: servers, admission, training, publishes, saves and failures, on the plan's cost
model. Imports no torch and starts nothing.
"""
