"""The `gspo-mega` command line: one file per command."""
