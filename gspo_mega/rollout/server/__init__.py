"""One SGLang server: what it is started with, its process, its supervision."""
