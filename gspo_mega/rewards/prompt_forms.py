"""The text that a judge or a reward model reads: a form with placeholders for the response and what belongs to it."""

from __future__ import annotations

import json
import re
from typing import Any

from gspo_mega.config.remote_rules import PLACEHOLDER
from gspo_mega.rewards.remote import RemoteFailure


def filled(form: str, request: dict[str, Any]) -> str:
    """A form with its placeholders replaced, all at once: braces in what replaces them stand for themselves.

    Raises RemoteFailure: the row or the entry's options have no such key.
    """

    def value(found: re.Match[str]) -> str:
        name, _, key = found[1].partition(".")
        given = request[name]
        if key:
            if key not in given:
                raise RemoteFailure("exception", f"there is no {found[1]} to fill in")
            given = given[key]
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return PLACEHOLDER.sub(value, form)
