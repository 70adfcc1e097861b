"""The HTTP client of one SGLang server."""
