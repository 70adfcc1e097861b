"""A run's state on disk; import from and export to Hugging Face folders; conversion between formats."""
