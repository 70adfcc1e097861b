"""Typed look-ups in a parsed `config.json`, with every problem collected instead of raised at the first."""

from __future__ import annotations

from typing import Any

from gspo_mega.model.table_rows import Family


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
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problem(
            key,
            "missing; a positive whole number" if value is None else f"is {value!r}; must be a positive whole number",
        )
        return 0

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is where the key is absent."""
        value = self.raw.get(key)
        return 0 if value in (None, 0) and not isinstance(value, bool) else self.size(key)

    def number(self, key: str) -> float:
        return self.check_number(key, self.raw.get(key))

    def check_number(self, key: str, value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.problem(key, "missing; a positive number" if value is None else f"is {value!r}; must be a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, f"is {value!r}; must be true or false")
        return default
