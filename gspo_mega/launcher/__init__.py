"""Starts and watches a run, on one machine or as a Slurm job; checks machines and inputs before it starts."""
