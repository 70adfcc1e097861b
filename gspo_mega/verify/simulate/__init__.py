"""A run on many machines, simulated: servers, admission, training, publishes, saves and failures on the plan's cost
model. No torch; starts nothing.
"""
