"""A `Config` as YAML text with every value written out: `config.resolved.yaml`.

What is written loads back to an equal configuration, and other YAML readers see the same values: text that
any of them would take for something else is quoted.
"""

from __future__ import annotations

import re

import yaml

from gspo_mega.config.schema import Config
from gspo_mega.config.strict_yaml import implicit_resolvers


def _union_of_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Ours first, so that `1e-06` may stand as a number; YAML 1.1's after them, so that the text `no` is quoted."""
    table = {first: list(entries) for first, entries in implicit_resolvers().items()}
    for first, entries in yaml.resolver.Resolver.yaml_implicit_resolvers.items():
        table.setdefault(first, []).extend(entries)
    return table


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _union_of_resolvers()

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # Only double quotes escape line breaks (there are five in Unicode); other styles fold them.
    style = '"' if any(character in value for character in "\n\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def render_config(config: Config) -> str:
    """YAML text in the schema's order; `load_config` of it gives an equal Config."""
    values = config.model_dump(mode="json")
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000
    )
