"""Which tokens end a response: those of a model's configuration, of its tokenizer, and of its chat template.

This module makes one list of these sources, and a notice if they differ. Rollouts stop at any token of the list. The
tokenizer's and the template's tokens are what a model was taught to end with, and what a cold start teaches. In the
folder of a base model they may well differ from the configuration: a response that ended with a token outside the list
would continue up to its limit.

`stated_end` reads the tokenizer's files as JSON, for a plan, which has no tokenizer. `data/templates.py` asks a loaded
tokenizer and the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIGURATION = "config.json and generation_config.json"
TOKENIZER = "the tokenizer"
TEMPLATE = "the chat template"
CALL = "the chat template after a call"
# A tokenizer.json of the largest vocabularies has some 30 MB.
_MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class EndToken:
    """`token_id` as a source names it; `text` is the tokenizer's text for it, None if that is not known."""

    token_id: int
    text: str | None = None

    def __str__(self) -> str:
        return str(self.token_id) if self.text is None else f"{self.text!r} ({self.token_id})"


@dataclass(frozen=True)
class EndTokens:
    """`ids`: each of them ends a response; those of the configuration come first. `notices`: texts for the user if the
    sources differ.
    """

    ids: tuple[int, ...]
    notices: tuple[str, ...] = ()


def end_tokens(
    configured: Sequence[int],
    tokenizer: EndToken | None,
    template: EndToken | None,
    vocab_size: int | None,
    texts: Mapping[int, str] | None = None,
    call: EndToken | None = None,
) -> EndTokens:
    """Every token that one of the sources names, each once.

    `configured`: ids of config.json and generation_config.json (`ModelSpec.eos_token_ids`). `template`: the token with
    which the chat template ends an assistant's turn. None: the source names none. `vocab_size`: rows of the model's
    head, which bound the ids that can be sampled; None: not known. `texts`: texts of ids, as far as they are known.
    `call`: the token with which the template ends a turn that calls a tool, if it is another one.
    """
    ids, notices = list(configured), []
    others = ((TOKENIZER, tokenizer), (TEMPLATE, template), (CALL, call))
    for source, end in others:
        if end is not None and vocab_size is not None and end.token_id >= vocab_size:
            notices.append(
                f"the end token of {source}, {end}, is outside the model's vocabulary of {vocab_size}: no response can"
                " end with it"
            )
        elif end is not None and end.token_id not in ids:
            ids.append(end.token_id)
    if len(ids) > len(configured):
        named = [EndToken(token_id, (texts or {}).get(token_id)) for token_id in configured]
        said = [f"{CONFIGURATION} name {' and '.join(map(str, named)) or 'none'}"]
        said += [f"{source} {end}" for source, end in others if end is not None and end.token_id in ids]
        notices.append(
            f"the sources of the end token differ: {', '.join(said)}; a response ends at any of these tokens"
        )
    return EndTokens(tuple(ids), tuple(notices))


def planned_end_tokens(folder: Path, configured: Sequence[int], vocab_size: int) -> EndTokens:
    """`end_tokens` from the files of a Hugging Face folder, without the chat template."""
    ids_by_text = _TokenIds(folder)
    stated = stated_end(folder, ids_by_text)
    # The texts of the configuration's ids are looked up only if a notice needs them.
    if stated is None or stated.token_id in configured:
        return EndTokens(tuple(configured))
    return end_tokens(configured, stated, None, vocab_size, ids_by_text.texts(configured))


def stated_end(folder: Path, ids_by_text: _TokenIds | None = None) -> EndToken | None:
    """The end token that a folder's tokenizer files name. None if no file names one, or if they cannot be read; in that
    case loading the tokenizer will say why.
    """
    settings = _read_object(folder / "tokenizer_config.json")
    named = settings.get("eos_token")
    # As in transformers, the older file counts if the newer one does not list the added tokens.
    if not settings.get("added_tokens_decoder"):
        named = _read_object(folder / "special_tokens_map.json").get("eos_token", named)
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    token_id = (ids_by_text or _TokenIds(folder)).id_of(text)
    return None if token_id is None else EndToken(token_id, text)


class _TokenIds:
    """Ids by text in the tokenizer files of a folder. The large file is read only if the small ones lack an id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._large: dict[str, int] | None = None
        listed = _read_object(folder / "tokenizer_config.json").get("added_tokens_decoder")
        self._small = {
            token["content"]: int(token_id)
            for token_id, token in (listed.items() if isinstance(listed, dict) else ())
            if isinstance(token, dict) and isinstance(token.get("content"), str) and token_id.isdecimal()
        }
        self._small |= _ids_in(_read_object(folder / "added_tokens.json"))

    def id_of(self, text: str) -> int | None:
        return self._small[text] if text in self._small else self._all().get(text)

    def texts(self, ids: Sequence[int]) -> dict[int, str]:
        by_id = {token_id: text for text, token_id in self._small.items()}
        if not by_id.keys() >= set(ids):
            by_id |= {token_id: text for text, token_id in self._all().items()}
        return {token_id: by_id[token_id] for token_id in ids if token_id in by_id}

    def _all(self) -> dict[str, int]:
        if self._large is None:
            whole = _read_object(self._folder / "tokenizer.json")
            model = whole.get("model")
            vocabulary = model.get("vocab") if isinstance(model, dict) else None
            added = whole.get("added_tokens")
            self._large = _ids_in(vocabulary) | {
                token["content"]: token["id"]
                for token in (added if isinstance(added, list) else ())
                if isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(token.get("id"))
            }
        return self._large


def _ids_in(value: Any) -> dict[str, int]:
    return {text: found for text, found in value.items() if _is_id(found)} if isinstance(value, dict) else {}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is missing, too large, or holds no object."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return {}
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
