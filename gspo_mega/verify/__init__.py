"""The commands that check the numbers: `gspo-mega certify`, `mismatch`, `compare`, `simulate`, `trace`."""
