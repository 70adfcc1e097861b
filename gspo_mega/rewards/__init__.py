"""Verifiers and the pool of isolated processes that scores responses."""
