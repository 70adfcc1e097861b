"""The catalogue of metrics, how they are reduced, where they go, and what their trends mean."""
