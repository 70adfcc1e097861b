"""The supervisor of a Slurm job: its size, its steps, its nodes, its end."""
