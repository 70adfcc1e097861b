"""Turn a prompt's text or messages into token ids: chat template, special tokens, plain text.

`PromptEncoder` makes sure that no text of a row can act as a control token of the chat. A literal `<|im_end|>` in a
user's text, encoded naively after the template was applied, becomes the token that ends the turn (and often the
response). Here it is encoded as the characters that it consists of, while the template's own control tokens stay what
they are. An added token that is not special (`<tool_call>` of Qwen) is left to the tokenizer: it ends no turn, and
servers of the trained model encode it in the same way.

`problem_of_message` and `read_message` read the chat messages of data rows. Arrow, and so Parquet and every data set
that `datasets` wrote, gives all messages of a column the same keys: a key that only some messages have is null in the
others. So null means that the key is absent, in JSONL as in Parquet. Only the role, and the text of a message that
calls no tool, are required. `load_tokenizer` and `check_vocabulary` come last.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gspo_mega.base.errors import DataError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.hub import missing_hint
from gspo_mega.base.untrusted import find_unreadable_entry
from gspo_mega.data.rows import read_plain, type_name
from gspo_mega.data.template_process import ChatTemplate
from gspo_mega.models.spec import ModelSpec

Message: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[Message]
_FORM = '{"role": "user", "content": "text"}'
_CALL_FORM = '{"function": {"name": "text", "arguments": {...}}}'
# A model's embedding is padded by a few rows. A tokenizer that knows a smaller share of them likely belongs to another
# model.
_SHARE_WITH_TEXT = 0.9
# Whether a Hugging Face tokenizer splits special tokens is a state that it keeps between calls. Encoders share
# tokenizers, and threads share encoders, so one thread must not change that state while another encodes.
_ENCODING = threading.Lock()


@dataclass(frozen=True)
class MaskedText:
    """A rendered text in which unique words (`originals`: word -> special token) replace the special tokens that the
    messages contained as text. All other special tokens are the template's.
    """

    text: str
    originals: Mapping[str, str]

    @property
    def unmasked(self) -> str:
        return _replace(self.text, self.originals)

    def __getitem__(self, part: slice) -> MaskedText:
        return MaskedText(self.text[part], self.originals)


class PromptEncoder:
    """Encodes the prompts and the demonstrated responses of one run, with one tokenizer.

    With `chat_template`, a prompt is a list of messages (a text is one user message), rendered up to where the
    assistant's answer begins. Without it, a text is used as it is: no token is added, and a special token written out
    in it counts as one, because a text that was rendered beforehand must come through unchanged.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool, system_prompt: str | None = None) -> None:
        """`tokenizer`: a Hugging Face tokenizer.

        Raises DataError if there is no chat template to apply, or a system prompt without a chat template.
        """
        if chat_template and not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; add one (chat_template.jinja in its folder) or set"
                " data.chat_template:"
                " false"
            )
        if system_prompt is not None and not chat_template:
            raise DataError("data.system_prompt needs data.chat_template: true")
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._template = _template_of(tokenizer) if chat_template else None
        self._system_prompt = system_prompt
        self._arguments_are_text = False  # learnt when the template first refuses calls as objects
        special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        # Longest first, so that a token that is part of another does not hide that one.
        self._special = sorted(special, key=len, reverse=True)
        self._ids_by_special = special
        self._special_ids = frozenset(special.values())

    def problem_of(self, prompt: Any) -> str | None:
        """What is wrong with a row's prompt, in words, or None: its type, its messages' shape, emptiness."""
        if isinstance(prompt, str):
            return None if prompt.strip() else "is empty"
        if not isinstance(prompt, list):
            return "must be a text or a list of chat messages"
        if not self.chat_template:
            return "is a list of chat messages, which needs data.chat_template: true"
        if not prompt:
            return "is an empty list of messages"
        for number, message in enumerate(prompt, start=1):
            if (problem := problem_of_message(message)) is not None:
                return f"has message {number} that {problem}"
        if self._system_prompt is not None and prompt[0]["role"] == "system":
            return "brings a system message of its own, and data.system_prompt is set too; keep one of them"
        if prompt[-1]["role"] == "assistant":
            return "ends with the assistant's message; the last one must ask for an answer"
        return None if (prompt[-1]["content"] or "").strip() else "ends with an empty message"

    def messages_of(self, prompt: str | Messages) -> Messages:
        """A prompt without a problem as a new list of messages, the system prompt included."""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [read_message(m) for m in prompt]
        )
        if self._system_prompt is not None:
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        return messages

    def encode_prompt(
        self, prompt: str | Messages, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[int]]:
        """The rendered text of a prompt without a problem, and its token ids. `tools`: schemas for the template.

        Raises DataError if the chat template refuses the messages, or if the tokenizer cannot encode the characters of
        a special token as plain text.
        """
        if not self.chat_template:
            assert isinstance(prompt, str)
            return prompt, self._encode(prompt)
        rendered = self.render(self.messages_of(prompt), tools)
        return rendered.unmasked, self.encode(rendered)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, opened: bool = True
    ) -> MaskedText:
        """The template's text of exactly these messages, in OpenAI form; no system prompt is added. It ends where the
        assistant's answer begins; without that beginning if not `opened`.

        Raises DataError if the template refuses the messages, or if they hold half a surrogate pair, which is no text.
        """
        as_text = self._arguments_are_text
        try:
            return self._masked(messages, tools, opened, as_text)
        except DataError:
            # In Hugging Face's form a call's arguments are an object. A few templates need them as text.
            if as_text or not any(message.get("tool_calls") for message in messages):
                raise
            with contextlib.suppress(DataError):
                made = self._masked(messages, tools, opened, arguments_are_text=True)
                self._arguments_are_text = True  # set only now, because other threads are rendering
                return made
            raise

    def _masked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        opened: bool,
        arguments_are_text: bool,
    ) -> MaskedText:
        asked: list[Any] = [for_template(message, arguments_are_text) for message in messages]
        asked += [dict(tool) for tool in tools or ()]
        written = "\0".join(_texts(asked))
        try:
            written.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the messages hold U+{ord(written[error.start]):04X}, half a surrogate pair, which is no text"
            ) from None
        # Words that no text contains and no template treats in a special way.
        placeholders = {
            special: f"placeholder{secrets.token_hex(16)}" for special in self._special if special in written
        }
        if placeholders:
            asked = _map_texts(asked, lambda text: _replace(text, placeholders))
        text = self._render(asked[: len(messages)], asked[len(messages) :], opened)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the tokenizer's chat template writes U+{ord(text[error.start]):04X}, half a surrogate pair, which is"
                " no text"
            ) from None
        return MaskedText(text, {placeholder: special for special, placeholder in placeholders.items()})

    def encode(self, rendered: MaskedText) -> list[int]:
        """Token ids of a rendered text. Special tokens that messages contained become their characters.

        Raises DataError if the tokenizer cannot encode the characters of a special token as plain text.
        """
        if not rendered.originals:
            return self._encode(rendered.text)
        return self._encode_masked(rendered.text, rendered.originals)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the special tokens, which no text of a message becomes."""
        return tuple(self._special)

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of the added tokens that are not special, so that the text of a message can become them."""
        return tuple(sorted({one.content for one in self._tokenizer.added_tokens_decoder.values() if not one.special}))

    def token_text(self, token_id: int) -> str | None:
        """The text of an added token, which templates can write; None for all other tokens."""
        added = self._tokenizer.added_tokens_decoder.get(token_id)
        return None if added is None else added.content

    @functools.cached_property
    def turn_end_token_id(self) -> int | None:
        """The special token that the chat template writes right after an assistant's last message; None if it writes
        other text or nothing there, or without a template.
        """
        if not self.chat_template:
            return None
        mark = f"mark{secrets.token_hex(16)}"
        try:
            text = self.render(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}], opened=False
            ).text
        except DataError:
            return None  # the template does not accept such a conversation
        tail = text.rpartition(mark)[2].lstrip() if mark in text else ""
        return next((self._ids_by_special[special] for special in self._special if tail.startswith(special)), None)

    @functools.cached_property
    def call_end_token_id(self) -> int | None:
        """The special token with which the chat template ends an assistant's last message that calls a tool; None if
        there is none, or if the token also stands between two calls.
        """
        if not self.chat_template:
            return None
        marks = [f"mark{secrets.token_hex(16)}" for _ in range(2)]
        calls = [
            {"type": "function", "id": f"call{n}0000", "function": {"name": "f", "arguments": {"x": mark}}}
            for n, mark in enumerate(marks)
        ]
        properties = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
        tool = {"type": "function", "function": {"name": "f", "description": "f", "parameters": properties}}

        def rendered(*called: dict[str, Any]) -> str:
            message = {"role": "assistant", "content": "", "tool_calls": list(called)}
            try:
                return self.render([{"role": "user", "content": "x"}, message], [tool], opened=False).text
            except DataError:
                return ""  # the template does not accept such a conversation

        _, is_there, tail = rendered(calls[0]).rpartition(marks[0])
        if not is_there:
            return None
        end = next((special for special in self._special if tail.rstrip().endswith(special)), None)
        both = rendered(*calls)
        if end is None or (marks[1] in both and end in both.partition(marks[0])[2].partition(marks[1])[0]):
            return None
        return self._ids_by_special[end]

    @property
    def end_token_id(self) -> int:
        """The token that ends a demonstrated response: the one with which the chat template ends a turn, or else the
        tokenizer's end token. Raises DataError if neither has one.
        """
        if self.turn_end_token_id is not None:
            return self.turn_end_token_id
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer names no end token (eos_token in tokenizer_config.json); a demonstrated response could"
                " not end"
            )
        return self._tokenizer.eos_token_id

    @property
    def end_token(self) -> str:
        """The text of `end_token_id`."""
        return self._tokenizer.convert_ids_to_tokens(self.end_token_id)

    def encode_response(self, response: str) -> list[int]:
        """Token ids of a demonstrated response, all of it encoded as plain text, and the end token. Raises DataError as
        `end_token_id` does.
        """
        return [*self._encode_plain(response), self.end_token_id]

    def _render(self, messages: Messages, tools: list[dict[str, Any]], opened: bool) -> str:
        if self._template is not None:
            return self._template.render(messages, tools, opened=opened)
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=opened
            )
        except Exception as error:  # a tokenizer's own chat code may raise anything
            raise DataError(f"the tokenizer's chat template refuses these messages: {error}") from error

    def _encode_masked(self, masked: str, originals: Mapping[str, str]) -> list[int]:
        """Encode a rendered text in which placeholders replace special tokens that messages contained.

        The special tokens that are left are the template's. They cut the text into segments. A segment with a
        placeholder gets its text back and is encoded as plain text; everything else is encoded as usual. Tokenizers
        never merge across a special token, so the cuts change nothing.
        """
        ids: list[int] = []
        usual: list[str] = []
        for segment in self._segments(masked):
            plain = _replace(segment, originals)
            if plain == segment:
                usual.append(segment)
                continue
            ids += self._encode("".join(usual)) + self._encode_plain(plain)
            usual.clear()
        return ids + self._encode("".join(usual))

    def _segments(self, text: str) -> list[str]:
        """`text` cut before and after every special token; joined, they are the text again."""
        segments = [text]
        for special in self._special:
            cut: list[str] = []
            for segment in segments:
                if segment in self._special:
                    cut.append(segment)
                    continue
                pieces = segment.split(special)
                for number, piece in enumerate(pieces):
                    cut += ([special] if number else []) + ([piece] if piece else [])
            segments = cut
        return segments

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        with _ENCODING:
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        with _ENCODING:
            ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not self._special_ids.isdisjoint(ids):
            tokens = ", ".join(repr(s) for s in self._special if s in text)
            raise DataError(
                f"{tokens} is written out in the text, and this tokenizer cannot encode it as plain text; take it out"
            )
        return ids


def _template_of(tokenizer: Any) -> ChatTemplate | None:
    """The tokenizer's template, to be rendered in a separate process; None if the tokenizer renders chats with code of
    its own.
    """
    if type(tokenizer).apply_chat_template.__module__ != "transformers.tokenization_utils_base":
        return None
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates and no default
        raise DataError(f"the tokenizer's chat template cannot be chosen: {error}") from error
    return ChatTemplate(
        template,
        {
            name: str(value) if not isinstance(value, list) else [str(v) for v in value]
            for name, value in tokenizer.special_tokens_map.items()
        },
    )


def for_template(message: Message, arguments_are_text: bool) -> Message:
    """A message in the form that templates read: missing content is empty, and a call's arguments are an object instead
    of JSON text, unless this template needs the text.
    """
    given = {**message, "content": "" if message.get("content") is None else message["content"]}
    if given.get("tool_calls"):
        calls = []
        for call in given["tool_calls"]:
            arguments = arguments_of(call)
            if arguments_are_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        given["tool_calls"] = calls
    return given


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a tool call in OpenAI form: the object that their JSON text states, or the text if it states
    none.
    """
    written = call["function"].get("arguments") or {}
    if not isinstance(written, str):
        return written
    read = read_plain(written.strip())
    return read[0] if read is not None and read[1] == len(written.strip()) and isinstance(read[0], dict) else written


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(inner, change) for inner in value]
    return value


def _replace(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def problem_of_message(message: Any) -> str | None:
    """What is wrong with one message of a row, or None: a phrase that continues "has message 3 that" and names the
    key.
    """
    if not isinstance(message, dict):
        return f"is {type_name(message)}, not of the form {_FORM}"
    if (problem := _problem_of_text(message, "role")) is not None:
        return problem
    if (calls := message.get("tool_calls")) is not None and (problem := _problem_of_calls(message, calls)) is not None:
        return problem
    for key, value in message.items():
        if key not in ("role", "content", "tool_calls") and not isinstance(value, str | None):
            return f"has {key!r} that is {type_name(value)}, not a text"
    if calls and message.get("content") is None:
        return None
    return _problem_of_text(message, "content")


def read_message(message: Message) -> Message:
    """A message without a problem, as it is used: null keys and an empty list of calls are left out, and null content
    becomes empty. Nulls inside calls and their arguments are left out, too; arguments that are JSON text do not change.
    """
    read = {key: value for key, value in message.items() if value is not None}
    read.setdefault("content", "")
    calls = read.pop("tool_calls", None)
    return read | {"tool_calls": _without_nulls(calls)} if calls else read


def _problem_of_text(message: Message, key: str) -> str | None:
    if key not in message:
        return f"has no {key!r}, so that it is not of the form {_FORM}"
    return None if isinstance(message[key], str) else f"has {key!r} that is {type_name(message[key])}, not a text"


def _problem_of_calls(message: Message, calls: Any) -> str | None:
    if calls and message["role"] != "assistant":
        return "calls tools, which only the assistant does"
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return f"has tool_calls that are no list of {_CALL_FORM}"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), dict | str | None)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def load_tokenizer(folder: str) -> Any:
    """The Hugging Face tokenizer of a model's folder. Raises DataError if it cannot be read or needs code from the
    folder.
    """
    if not Path(folder).is_dir():  # transformers would ask the network for a model of that name
        raise DataError(
            f"{folder}: no such folder; give a Hugging Face folder with a tokenizer and weights{missing_hint(folder)}"
        )
    if (odd := find_unreadable_entry(Path(folder))) is not None:
        raise DataError(f"{odd}; the tokenizer of the folder is not loaded")
    with uncollected():  # it brings two thousand modules
        from transformers import AutoTokenizer

    try:
        # Without this argument, transformers would ask at the terminal whether the code may run.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:  # a damaged tokenizer.json can raise anything, even what is no Exception (from Rust)
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        reason, first = _in_words(error), error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        # transformers' own message may only say that some class could not be imported.
        caused = "" if first is error or _in_words(first) in reason else f"; its cause: {_in_words(first)}"
        raise DataError(f"{folder}: its tokenizer cannot be loaded: {reason}{caused}") from error


def _in_words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def check_vocabulary(tokenizer: Any, spec: ModelSpec) -> list[str]:
    """Compare a tokenizer with the model that reads its ids. Returns notices.

    Raises DataError if a text or the chat template can become an id for which the model has no embedding.
    """
    size = spec.vocab_size
    added = tokenizer.added_tokens_decoder
    beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= size}
    template = str(tokenizer.chat_template or "")
    unreached = {
        token_id
        for token_id, token in beyond.items()
        if token_id in added and added[token_id].special and token not in template
    } - {tokenizer.eos_token_id}
    reached = {token_id: token for token_id, token in beyond.items() if token_id not in unreached}
    if reached:
        first = min(reached)
        raise DataError(
            f"the tokenizer makes ids that the model has no embedding of: vocab_size in config.json is {size}, and"
            f" {len(reached)} of its tokens have higher ids, from {reached[first]!r} (id {first}) on; give the model"
            " its own tokenizer, or add rows to its embedding"
        )
    notices = []
    if beyond:
        notices.append(
            f"{len(beyond)} special tokens of the tokenizer ({', '.join(map(repr, beyond.values()))}) have ids beyond"
            f" the model's vocab_size {size}; no prompt reaches them"
        )
    if len(tokenizer) < _SHARE_WITH_TEXT * size:
        notices.append(
            f"the tokenizer knows {len(tokenizer)} tokens and the model {size} (vocab_size): those that it does not"
            " know can be sampled, and are no text. Is it the model's own?"
        )
    return notices
