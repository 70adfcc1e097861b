"""Configuration: the typed schema of a run's YAML, and the one way to read, check and render it. No torch."""

from gspo_mega.config.loader import LoadedConfig, load_config, render_config, render_json_schema
from gspo_mega.config.prompt_sources import data_sources
from gspo_mega.config.schema import Config

__all__ = ["Config", "LoadedConfig", "data_sources", "load_config", "render_config", "render_json_schema"]
