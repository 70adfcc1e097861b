"""From a Hugging Face `config.json` to a ModelSpec, and the tables of model families. No torch."""
