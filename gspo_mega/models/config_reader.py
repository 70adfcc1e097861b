"""Typed look-ups in a parsed `config.json`, with every problem collected instead of raised at the first."""

from __future__ import annotations

from typing import Any

from gspo_mega.models.table_rows import Family

# Of numbers that are gone through one by one, or multiplied: far beyond any model.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace", "max_window_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2**14),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 2**14),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 2**24),
    **dict.fromkeys(("shared_expert_intermediate_size",), 2**24),
    "vocab_size": 2**28,
}
_MOST_SIZE = 2**31
_MOST_NUMBER = 1e30
MOST_EXPERTS_OF_ALL_LAYERS = 2**18


def shown(value: Any) -> str:
    """The beginning of a value, as Python writes it; of one that is nested too deeply, its type."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:80]}..."


class ConfigReader:
    """Typed look-ups in a config.json; problems are collected, and 0 stands in for a bad size meanwhile."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{key}: {text}")

    def is_omitted(self, key: str, family: Family) -> bool:
        """Is it absent, and may be so in this family?"""
        return self.raw.get(key) is None and key in family.may_omit

    def size(self, *keys: str) -> int:
        key = next((key for key in keys if self.raw.get(key) is not None), keys[0])
        value = self.raw.get(key)
        most = _MOST.get(key, _MOST_SIZE)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            self.problem(key, f"is {shown(value)}; no model has more than {most}")
            return 0
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problem(
            key,
            "missing; a positive whole number"
            if value is None
            else f"is {shown(value)}; must be a positive whole number",
        )
        return 0

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is where the key is absent."""
        value = self.raw.get(key)
        return 0 if value in (None, 0) and not isinstance(value, bool) else self.size(key)

    def number(self, key: str) -> float:
        return self.check_number(key, self.raw.get(key))

    def check_number(self, key: str, value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST_NUMBER:
            return float(value)
        self.problem(
            key, "missing; a positive number" if value is None else f"is {shown(value)}; must be a positive number"
        )
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, f"is {shown(value)}; must be true or false")
        return default
