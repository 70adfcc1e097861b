"""Run programs from responses in a sandbox."""
