"""Prompt sources: files of prompts and answers, encoded on demand.

`load_prompts` opens the sources of a run. `PromptSource` says what a prompt row must hold, how it becomes a `Prompt`,
and which rows are too long; `RowSource` is what it shares with demonstrations. `stream.py` orders and mixes the rows,
`chat.py` applies the chat template, `row_files.py` reads the rows.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from gspo_mega.base.errors import DataError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import OneTeacher
from gspo_mega.config.prompt_sources import sources_of
from gspo_mega.config.schema import Data, Source
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.row_files import open_rows
from gspo_mega.data.rows import Enough, Row, type_name

# This many rows are encoded at the start to count those that are too long, which takes a few seconds. Later rows are
# counted as they are drawn.
NUM_ROWS_SURVEYED = 10_000
# What is known of a row; 0: nothing yet.
_FITS, _TOO_LONG, _UNREADABLE = 1, 2, 3
_NUM_NAMED = 3  # a message names this many of the rows that are left out for their answers
# Stands for a row's prompt in a template.
PROMPT_MARK = "{prompt}"
# The marks of `teacher.context`.
_CONTEXT_MARKS = re.compile(r"\{(prompt|answer|metadata\.[^{}\s]+)\}")
# More than the longest token of every known vocabulary, by far.
_MOST_TOKEN_CHARACTERS = 1024
Item = TypeVar("Item")


def load_prompts(
    data: Data,
    tokenizer: Any,
    check_of: Callable[[Source], Callable[[Row], str | None]] = lambda source: lambda row: None,
    needs_answers: bool = True,
    taught: Sequence[OneTeacher] = (),
) -> list[PromptSource]:
    """Open and check every source of `data`, in its order; `PromptStream(sources, weights, ...)` draws from them.

    `check_of(source)(row)` says what else is wrong with a row of a source that has prompt and answer. `taught`: the
    run's teachers, whose own prompts must fit as well. Raises DataError for a malformed file, or one without a single
    prompt that fits `data.max_prompt_tokens`.
    """
    encoder = encoder_of(data, tokenizer)
    return [
        PromptSource(
            source.name,
            source.path,
            data,
            encoder,
            check_of(source),
            needs_answers=needs_answers,
            fits=fits_teacher(taught, source.name, encoder),
        )
        for source in sources_of(data)
    ]


def encoder_of(data: Data, tokenizer: Any) -> PromptEncoder:
    """The encoder that `data` asks for. `tokenizer`: a Hugging Face tokenizer. Raises DataError as `PromptEncoder`."""
    return PromptEncoder(tokenizer, chat_template=data.chat_template, system_prompt=data.system_prompt)


class RowSource(ABC, Generic[Item]):
    """The items of one file of rows. An item is made from its row when it is asked for; rows that are too long are left
    out and counted.

    Attributes:
        name: name of the source; part of every item's id.
        path: path of the file.
        fingerprint: SHA-256 of the file.
        is_whole: whether all rows of the file were read.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        data: Data,
        encoder: PromptEncoder,
        enough: Enough = lambda num_rows: False,
    ) -> None:
        """`data` gives the keys and `max_prompt_tokens`; name and path are not taken from it. `enough(n)`: whether to
        stop after n rows, as for `open_rows`.

        Raises DataError: the file or its rows are malformed, or no row fits.
        """
        self.name = name
        self.path = str(path)
        self._data = data
        self._encoder = encoder
        self._unreadable: list[tuple[int, str]] = []
        self._file = open_rows(path, self._problem_of, enough)
        self.is_whole = self._file.is_whole
        self.fingerprint = self._file.fingerprint
        self._length_class = np.zeros(len(self._file), dtype=np.uint8)
        for row, _ in self._unreadable:
            self._length_class[row] = _UNREADABLE
        self._survey(enough)

    @abstractmethod
    def _problem_of(self, values: Row) -> str | None:
        """What is wrong with a row, or None."""

    @abstractmethod
    def _make(self, row: int, values: Row) -> Item | None:
        """The item of a row without a problem, or None if it is too long."""

    @abstractmethod
    def limits(self) -> str:
        """The limits that "too long" refers to, for a message."""

    def _num_surveyed(self) -> int:
        """How many rows are encoded at the start."""
        return NUM_ROWS_SURVEYED

    def __len__(self) -> int:
        return len(self._file)

    @property
    def num_overlong(self) -> int:
        """The number of rows that so far were too long and left out."""
        return int(np.count_nonzero(self._length_class == _TOO_LONG))

    @property
    def num_examined(self) -> int:
        """The number of rows whose length is known so far, those that are too long included."""
        return int(np.count_nonzero(self._length_class)) - self.num_unreadable

    @property
    def num_unreadable(self) -> int:
        """The number of rows that are left out because no reward can read their answers (`data.unreadable_answers`)."""
        return len(self._unreadable)

    @property
    def unreadable_digest(self) -> str:
        """SHA-256 of the numbers of the rows that `num_unreadable` counts, hexadecimal."""
        return hashlib.sha256(",".join(str(row) for row, _ in self._unreadable).encode()).hexdigest()

    def unreadable_line(self) -> str | None:
        """A line about the rows that are left out for their answers, which names the first; None if there are none."""
        if not self._unreadable:
            return None
        named = "; ".join(f"{self._file.line(row)}: {problem}" for row, problem in self._unreadable[:_NUM_NAMED])
        more = self.num_unreadable - _NUM_NAMED
        return (
            f"{self.path}: {self.num_unreadable} of {len(self)} rows have answers that cannot be read and are left out"
            f" (data.unreadable_answers: drop): {named}{f'; and {more} more' if more > 0 else ''}"
        )

    def values(self, row: int) -> Row:
        """The values of a row as the file has them, by key. Raises DataError if the file was written over."""
        return self._file[row]

    def item(self, row: int) -> Item | None:
        """The item of a row, or None if the row is left out.

        Raises DataError if the row cannot be encoded (a chat template refuses it) or the file was written over.
        """
        if self._length_class[row] in (_TOO_LONG, _UNREADABLE):
            return None
        try:
            item = self._make(row, self._file[row])
        except DataError as error:
            raise DataError(f"{self._file.line(row)}: {error}") from error
        self._length_class[row] = _TOO_LONG if item is None else _FITS
        return item

    def items(self, limit: int | None = None) -> Iterator[Item]:
        """The first `limit` items that fit (all by default), in the order of the file."""
        num_given = 0
        for row in range(len(self)):
            if num_given == limit:
                return
            item = self.item(row)
            if item is not None:
                num_given += 1
                yield item

    def _survey(self, enough: Enough) -> None:
        """Count the rows that are too long among the first ones, and go on until at least one row fits."""
        any_fits = False
        for row in range(len(self)):
            if (row >= self._num_surveyed() and any_fits) or enough(row):
                return
            any_fits |= self.item(row) is not None
        if not any_fits and self._unreadable:
            raise DataError(
                f"{self.path}: none of its {len(self)} rows can be used: {self.num_unreadable} have answers that cannot"
                f" be read, such as {self._file.line(self._unreadable[0][0])}: {self._unreadable[0][1]}; the others are"
                f" too long ({self.limits()})"
            )
        if not any_fits:
            raise DataError(
                f"{self.path}: every one of its {len(self)} rows is too long ({self.limits()}); raise the limit, or"
                " shorten them"
            )


class PromptSource(RowSource[Prompt]):
    """Prompts with their answers. A prompt of more than `data.max_prompt_tokens` tokens is too long."""

    def __init__(
        self,
        name: str,
        path: str | Path,
        data: Data,
        encoder: PromptEncoder,
        check: Callable[[Row], str | None] = lambda row: None,
        template: str | None = None,
        template_keys: Sequence[str] = (),
        enough: Enough = lambda num_rows: False,
        needs_answers: bool = True,
        fits: Callable[[Prompt], bool] = lambda prompt: True,
    ) -> None:
        """The arguments of `RowSource`, and: `check(row)` says why the rewards cannot use the answer of a row that has
        a prompt and an answer, or None; it is called once per row, in order, and `data.unreadable_answers` says what
        happens to such a row. `template`: text in which `{prompt}` stands for a row's prompt, and `{key}` for its value
        of each of `template_keys`. Without `needs_answers` rows need no answer, and every answer is None.
        `fits(prompt)` says whether a prompt's teacher has room for its own, and raises DataError for a row that the
        teacher cannot read.
        """
        self._check = check
        self._num_checked = 0
        self._template, self._template_keys = template, template_keys
        self._needs_answers = needs_answers
        self._fits = fits
        super().__init__(name, path, data, encoder, enough)

    def _problem_of(self, values: Row) -> str | None:
        row, self._num_checked = self._num_checked, self._num_checked + 1
        problem = (
            problem_of_prompt(values, self._data, self._encoder)
            or problem_of_templated(values, self._data.prompt_key, self._template, self._template_keys)
            or (problem_of_keys(values, answer_keys(self._data)) if self._needs_answers else None)
        )
        if problem is None and (unreadable := self._check(values)) is not None:
            if self._data.unreadable_answers == "refuse":
                return f"{unreadable} (data.unreadable_answers: drop leaves such rows out)"
            self._unreadable.append((row, unreadable))
        return problem

    def _make(self, row: int, values: Row) -> Prompt | None:
        data = self._data
        prompt = values[data.prompt_key]
        if self._template is not None:
            prompt = _filled(self._template, prompt, {key: values[key] for key in self._template_keys})
        # A tokenizer may take hours for a text of many megabytes, and no token is that long.
        if _num_characters(prompt) > data.max_prompt_tokens * _MOST_TOKEN_CHARACTERS:
            return None
        text, token_ids = self._encoder.encode_prompt(prompt)
        if len(token_ids) > data.max_prompt_tokens:
            return None
        used = {data.prompt_key, *(key for _, key in answer_keys(data)), data.response_key}
        made = Prompt(
            prompt_id=f"{self.name}:{row}",
            source=self.name,
            token_ids=tuple(token_ids),
            text=text,
            answer=answer_of(values, data) if self._needs_answers else None,
            metadata={key: value for key, value in values.items() if key not in used},
            messages=tuple(self._encoder.messages_of(prompt)) if data.chat_template else (),
        )
        return made if self._fits(made) else None

    def limits(self) -> str:
        return f"data.max_prompt_tokens: {self._data.max_prompt_tokens}"


def _num_characters(prompt: Any) -> int:
    """The number of characters of a prompt's text, or of all texts of its messages."""
    if isinstance(prompt, str):
        return len(prompt)
    inner = prompt.values() if isinstance(prompt, dict) else prompt if isinstance(prompt, list) else ()
    return sum(map(_num_characters, inner))


def _filled(template: str, prompt: str, further: Mapping[str, Any]) -> str:
    """The template with its marks replaced. Marks inside the texts that replace them stay as they are."""
    texts = {PROMPT_MARK: prompt} | {f"{{{key}}}": _as_text(value) for key, value in further.items()}
    return re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], template)


def fits_teacher(taught: Sequence[OneTeacher], source: str, encoder: PromptEncoder) -> Callable[[Prompt], bool]:
    """Return a function that says whether the teacher of this source, if it reads another prompt (`teacher.context`),
    has room for it. It raises DataError as `taught_prompt`.
    """
    own = next((one.settings for one in taught if one.source in (None, source)), None)
    if own is None or own.context is None or own.max_prompt_tokens is None:
        return lambda prompt: True
    context, most = own.context, own.max_prompt_tokens
    return lambda prompt: len(taught_prompt(encoder, context, prompt)) <= most


def taught_prompt(encoder: PromptEncoder, context: str, prompt: Prompt) -> list[int]:
    """The token ids of the prompt that a teacher reads: `context` (`teacher.context`), with its marks replaced, in
    place of the prompt's last message, or of its text without a chat template. `prompt`: with its messages.

    Raises DataError if the row has no such column, or as `encode_prompt`.
    """
    messages = [dict(message) for message in prompt.messages]
    own = str(messages[-1]["content"]) if messages else prompt.text

    def value(found: re.Match[str]) -> str:
        name, _, key = found[1].partition(".")
        if name != "metadata":
            return own if name == "prompt" else _written(prompt.answer)
        if key not in prompt.metadata:
            raise DataError(f"teacher.context: no key {key!r}; the row has {', '.join(map(repr, prompt.metadata))}")
        return _written(prompt.metadata[key])

    text = _CONTEXT_MARKS.sub(value, context)
    if not messages:
        return encoder.encode_prompt(text)[1]
    messages[-1]["content"] = text
    return encoder.encode(encoder.render(messages))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def missing_key(values: Row, key: str, setting: str) -> str | None:
    """None if a row has the key; else a sentence with the keys that it has and the setting that chooses the key."""
    if key in values:
        return None
    near = difflib.get_close_matches(key, values, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no key {key!r}; {guess}the line has {', '.join(map(repr, values)) or 'no keys at all'} ({setting} chooses the"
        " key)"
    )


def answer_keys(data: Data, place: str = "data") -> list[tuple[str, str]]:
    """(setting, key) of every key of a row that belongs to its answer. `place`: the section that names the keys."""
    if data.answer_keys:
        return [(f"{place}.answer_keys", key) for key in data.answer_keys]
    return [(f"{place}.answer_key", data.answer_key)]


def answer_of(values: Row, data: Data) -> Any:
    """The answer of a row that has the keys: one value, or with `data.answer_keys` an object of several by key."""
    if data.answer_keys:
        return {key: values[key] for key in data.answer_keys}
    return values[data.answer_key]


def problem_of_keys(values: Row, keys: Iterable[tuple[str, str]]) -> str | None:
    """What is wrong with a row that must have the keys of `keys`, as (setting, key); None if nothing is."""
    return next((problem for setting, key in keys if (problem := missing_key(values, key, setting))), None)


def problem_of_prompt(values: Row, data: Data, encoder: PromptEncoder) -> str | None:
    """What is wrong with the prompt of a row (missing, of a wrong type, empty), or None."""
    missing = missing_key(values, data.prompt_key, "data.prompt_key")
    if missing is not None:
        return missing
    problem = encoder.problem_of(values[data.prompt_key])
    return None if problem is None else f"{data.prompt_key!r} {problem}"


def problem_of_templated(values: Row, key: str, template: str | None, further: Sequence[str]) -> str | None:
    """What is wrong with a row for `template`, which is put around its prompt, under `key`; or None."""
    if template is None:
        return None
    if not isinstance(values[key], str):
        return f"{key!r} is {type_name(values[key])}; a template is put around a text only"
    return next((problem for one in further if (problem := missing_key(values, one, "template_keys"))), None)
