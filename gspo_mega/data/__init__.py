"""Prompts, chat templates, packing, and the journal of sampled episodes. No torch."""
