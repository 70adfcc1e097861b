"""The end tokens of a run, asked of its loaded tokenizer and its chat template: the one place where they are derived.

Rollouts of every kind (training, evaluation, episodes), demonstrations and the exported folder take them from here.
`models/end_tokens.py` owns how the sources become one list.

Marks: unique words in place of the parts of an assistant's message, to be found again in what a template writes.

Owns what the parts of a message are, and how a message looks with marks. What follows from where they stand is
`templates.py`'s.

The text that a chat template puts behind what the policy sampled: what the next turn of a conversation adds.

Owns the rule that sampled tokens are never rendered or encoded again. The whole history is rendered with a mark (a
unique word) in place of each part of every sampled message: its content, its thinking, the argument of each call. What
stands behind the last mark, from the end of the turn on, is the suffix; it is encoded, what was sampled is not. A mark
that is gone, or other text before a message's first mark than it was sampled behind, shows that the template rewrites
the history. The tree of an episode is `episodes.recorder`'s.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_mega.base.errors import DataError
from gspo_mega.data.chat import MaskedText, Message, PromptEncoder
from gspo_mega.models.end_tokens import EndToken, EndTokens, end_tokens

_OPEN_TAG, _CLOSE_TAG = "<think>", "</think>"


@dataclass
class Marked:
    """A message with marks in place of its parts. `marks`: what each stands for, in words, by mark."""

    message: Message
    marks: dict[str, str]


def parts_in(message: Message) -> tuple[str, ...]:
    """The parts of an assistant's message, each of which a mark can stand for. An empty turn has empty content."""
    calls = message.get("tool_calls") or ()
    parts = ["thinking"] if message.get("reasoning_content") else []
    if calls:
        parts.append("calls" if len(calls) == 1 else "several calls")  # of which a template may write one
    if message.get("content") or not calls:
        parts.append("content")
    return tuple(parts)


def marked_message(message: Message, parts: Sequence[str]) -> Marked:
    """`message` with a new mark for each of `parts`, and without the others."""
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        word = f"mark{secrets.token_hex(16)}"
        marks[word] = what
        return word

    out: Message = {"role": "assistant", "content": ""}
    if "thinking" in parts:
        out["reasoning_content"] = mark("thinking")
    if "calls" in parts or "several calls" in parts:
        # A call's name stays: templates may repeat it with the tool's answer.
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"argument": mark(f"call {number}")}}}
            for number, call in enumerate(message["tool_calls"], start=1)
        ]
    if "content" in parts:
        out["content"] = _marked_content(message.get("content") or "", mark)
    return Marked(out, marks)


def _marked_content(content: str, mark: Callable[[str], str]) -> str:
    """A mark for the content; two, with the tags that templates look for, where it holds thinking."""
    thinking, closed, _ = content.rpartition(_CLOSE_TAG)
    if not closed:
        return mark("content")
    opened = _OPEN_TAG if thinking.lstrip().startswith(_OPEN_TAG) else ""
    return f"{opened}{mark('thinking')}{_CLOSE_TAG}{mark('content')}"


def with_words_of(text: MaskedText, other: MaskedText) -> str:
    """`text` with the words that stand for special tokens in `other`."""
    words = {special: word for word, special in other.originals.items()}
    replaced = text.text
    for word, special in text.originals.items():
        replaced = replaced.replace(word, words.get(special, word))
    return replaced


def difference(before: str, now: str) -> str:
    """Where two texts differ, in words."""
    same = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    start = max(0, same - 16)
    return f"{now[start : same + 32]!r} in place of {before[start : same + 32]!r}"


_OPENED_THINKING = re.compile(r"<think>\s*\Z")
_CLOSED_THINKING = re.compile(r".*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """Text that a template made, and its token ids."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Rewritten:
    """The template doesn't go on from what was sampled: at `message` (its index) its text is another one now."""

    message: int
    why: str


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a conversation. Of a sampled one, `gap` is the template's text between the turn before it (or the
    beginning) and it, and `stop_token` the token that it ended with, None if it ended by length.
    """

    message: Message
    sampled: bool = False
    gap: str = ""
    stop_token: int | None = None


class SuffixRule:
    """Renders the messages of one run's conversations, for one list of tools. Threads may share it."""

    def __init__(
        self,
        encoder: PromptEncoder,
        stop_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`stop_token_ids`: the run's, one of which ends a sampled turn.

        Raises DataError: no chat template, or this template's end of turn is text, or none of `stop_token_ids`.
        """
        if not encoder.chat_template:
            raise DataError("an episode of several turns needs a chat template; set data.chat_template: true")
        self.tools: list[dict[str, Any]] = [dict(tool) for tool in tools or ()]
        self._encoder = encoder
        self._stops = {token: text for token in stop_token_ids if (text := encoder.token_text(token)) is not None}
        self._ends = self._ends_of_turns()
        # Learnt from the conversations: which parts of a message this template has a place for, together, and which
        # not; and the roles whose text it puts behind the assistant's.
        self._known: set[tuple[str, ...]] = set()
        self._unknown: set[tuple[str, ...]] = set()
        self._placed: set[str] = set()

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> SuffixRule:
        """The same rule for an agent that brings its own tools."""
        other = copy.copy(self)  # what was learnt is shared
        other.tools = [dict(tool) for tool in tools or ()]
        return other

    def first(self, messages: Sequence[Message]) -> Rendered:
        """The whole of `messages` as a context, up to where the assistant's answer begins. Raises DataError: the
        template refuses them.
        """
        return self._rendered(self._whole(messages))

    def after(self, history: Sequence[HistoryMessage], new: Sequence[Message]) -> Rendered | Rewritten:
        """What `new` adds behind `history`, whose last message is a sampled one. The token that ended that one is its
        own; where none did, or another than the template writes, the suffix begins with the end of the turn.

        Raises DataError: the template refuses the messages, or has no place for one of `new`.
        """
        marked = {place: self._marked(one.message) for place, one in enumerate(history) if one.sampled}
        messages = [marked[place].message if one.sampled else one.message for place, one in enumerate(history)]
        whole = self._whole([*messages, *new])
        for place, one in marked.items():
            if any(mark not in whole.text for mark in one.marks) and self._learn(messages[: place + 1], one):
                return self.after(history, new)  # marked otherwise from here on
        at = self._end_of_history(history, marked, whole)
        if isinstance(at, Rewritten):
            return at
        suffix = whole[at:]
        for place, one in marked.items():
            if any(mark in suffix.text for mark in one.marks):
                return Rewritten(place, f"the template writes a part of message {place} again behind it")
        self._check_places(history, marked, messages, new)
        return self._rendered(suffix)

    def sampled_text(self, before: Sequence[Message], message: Message) -> Rendered:
        """What a policy would have sampled behind the messages `before` to say `message`, as this template writes the
        last message of a conversation: `text` without the end token of the turn, `token_ids` with it.

        Raises DataError: the template refuses the messages, has no place for a part of `message`, or begins the answer
        with text that is no part of this one.
        """
        if not self._has_place_for(before, message):
            raise DataError(
                f"the chat template has no place for the {' and '.join(parts_in(message))} of an assistant's message"
                " together; write it as one text, its content"
            )
        opened = self._encoder.render(before, self.tools)
        closed = self._encoder.render([*before, message], self.tools, opened=False)
        beginning = with_words_of(opened, closed)
        if not closed.text.startswith(beginning):
            raise DataError(
                "the chat template begins the assistant's answer with text that this message does not begin with:"
                f" {difference(opened.unmasked, closed.unmasked)}"
            )
        marked = self._marked(message)
        tail = self._behind_marks([*before], marked, opened=False)
        if not closed.text.endswith(tail) or len(closed.text) - len(tail) < len(beginning):
            raise DataError("the chat template writes other text behind an assistant's message for this content")
        found = [(at, end) for end in self._ends if (at := tail.find(end)) >= 0]
        end = min(found)[1] if found else self._end_before_next(before, message, marked)
        sampled = closed[len(beginning) : len(closed.text) - len(tail) + (min(found)[0] if found else len(tail))]
        ids = self._encoder.encode(MaskedText(sampled.text + end, sampled.originals))
        return Rendered(ids, sampled.unmasked)

    def _end_before_next(self, before: Sequence[Message], message: Message, marked: Marked) -> str:
        """The token that ends `message` where it is the next message's first: what answers its calls, or a user."""
        behind: Message = {"role": "user", "content": "x"}
        if message.get("tool_calls"):
            call = message["tool_calls"][0]
            name = call["function"]["name"]
            behind = {"role": "tool", "content": "x", "tool_call_id": call.get("id", ""), "name": name}
        text = self._behind_marks(before, marked, behind)
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not found:
            raise DataError(
                "the chat template writes no end of an assistant's turn; the end tokens of this run:"
                f" {self._ends_in_words()}"
            )
        return min(found)[1]

    def _behind_marks(self, before: Sequence[Message], marked: Marked, *behind: Message, opened: bool = True) -> str:
        """The template's text behind the parts of a message. Raises DataError: it leaves one of them out."""
        text = self._encoder.render([*before, marked.message, *behind], self.tools, opened=opened).text
        if any(mark not in text for mark in marked.marks):
            raise DataError("the chat template leaves out a part of the assistant's message")
        return text[self._extent(marked, text)[1] :]

    def given(self, before: Sequence[Message], message: Message, text: str) -> Message:
        """The message that an agent is given for a sampled one behind the messages `before`: `message`, or with
        `text`, all that was sampled, as its content where this template has no place for one of its parts. Its calls
        stay, for the agent to answer.
        """
        if self._has_place_for(before, message):
            return message
        if message.get("reasoning_content"):
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
            thinking = _CLOSED_THINKING.match(text)
            message["content"] = (thinking.group() if thinking else text) + (message["content"] if thinking else "")
        return message if self._has_place_for(before, message) else {**message, "content": text}

    def _has_place_for(self, before: Sequence[Message], message: Message) -> bool:
        parts = parts_in(message)
        if parts not in self._known | self._unknown:
            marked = self._marked(message)
            self._learn([*before, marked.message], marked)
        return parts not in self._unknown

    def _whole(self, messages: Sequence[Message]) -> MaskedText:
        """The template's text of a conversation. An assistant's message that was given to an agent with its calls and
        all its text as content comes back so; a template that refuses both gets the content.
        """
        try:
            return self._encoder.render(messages, self.tools)
        except DataError:
            plain = [
                {key: value for key, value in message.items() if key != "tool_calls"}
                if message.get("tool_calls") and parts_in(message) in self._unknown
                else message
                for message in messages
            ]
            if plain == list(messages):
                raise
            return self._encoder.render(plain, self.tools)

    def _rendered(self, text: MaskedText) -> Rendered:
        return Rendered(self._encoder.encode(text), text.unmasked)

    def _marked(self, message: Message) -> Marked:
        """`message` with a mark for each part that this template has a place for."""
        parts = parts_in(message)
        # Where there is none, content is all that was sampled.
        return marked_message(message, ("content",) if parts in self._unknown else parts)

    def _learn(self, messages: Sequence[Message], marked: Marked) -> bool:
        """Does this template have no place for the parts of the last of `messages`, not even where it is the last one?
        Then it is content from here on.
        """
        parts = parts_in(marked.message)
        if parts in self._known or parts == ("content",):
            return False  # content that is left out is no part without a place
        try:
            alone = self._encoder.render(messages, self.tools, opened=False)
        except DataError:
            alone = MaskedText("", {})  # refuses such a message: the same as no place for it
        if all(mark in alone.text for mark in marked.marks):
            self._known.add(parts)
            return False
        self._unknown.add(parts)
        return True

    def _end_of_history(
        self, history: Sequence[HistoryMessage], marked: Mapping[int, Marked], whole: MaskedText
    ) -> int | Rewritten:
        """Where in `whole` the suffix begins, if every sampled message is where it was sampled."""
        at = 0
        for place, one in marked.items():
            message = history[place]
            missing = [what for mark, what in one.marks.items() if mark not in whole.text]
            if missing:
                return Rewritten(place, f"the template drops the {missing[0]} of message {place}")
            first, last = self._extent(one, whole.text)
            before = whole[at:first].unmasked
            gap = message.gap
            if "thinking" in one.marks.values() and not before.startswith(gap):
                gap = _OPENED_THINKING.sub("", gap)  # what the answer was begun with is a part of its thinking
            if first < at or not before.startswith(gap):
                return Rewritten(
                    place, f"the template writes other text before message {place}: {difference(gap, before)}"
                )
            at = self._end_of_turn(whole.text, last, message.stop_token)
        return at

    def _extent(self, marked: Marked, text: str) -> tuple[int, int]:
        places = [text.find(mark) for mark in marked.marks]
        return min(places), max(place + len(mark) for place, mark in zip(places, marked.marks, strict=True))

    def _end_of_turn(self, text: str, behind: int, stop_token: int | None) -> int:
        """Where the tokens of a turn end whose last part ends at `behind`: behind its `stop_token`, if that is how the
        template ends the turn; before the token with which the template does.
        """
        found = [(at, end) for end in self._ends if (at := text.find(end, behind)) >= 0]
        if not found:
            raise DataError(
                "the chat template goes on behind an assistant's turn without ending it; the end tokens of this run:"
                f" {self._ends_in_words()}"
            )
        at, end = min(found)
        return at + len(end) if stop_token is not None and end == self._stops.get(stop_token) else at

    def _check_places(
        self,
        history: Sequence[HistoryMessage],
        marked: Mapping[int, Marked],
        messages: Sequence[Message],
        new: Sequence[Message],
    ) -> None:
        """Refuse a message whose text the template leaves out, or puts elsewhere. Looked at once for each role."""
        marks = {
            place: f"mark{secrets.token_hex(16)}"
            for place, message in enumerate(new)
            if message["role"] != "assistant" and message["role"] not in self._placed
        }
        if not marks:
            return
        probe = [
            {**message, "content": marks[place]} if place in marks else message for place, message in enumerate(new)
        ]
        try:
            whole = self._whole([*messages, *probe])
        except DataError:
            return  # such a text alone is refused; looked at again with the next message
        at = self._end_of_history(history, marked, whole)
        if isinstance(at, Rewritten):
            return
        for place, mark in marks.items():
            role = new[place]["role"]
            if mark not in whole.text[at:]:
                raise DataError(
                    f"the chat template has no place for a message of the role {role!r} behind the assistant's: it"
                    f" leaves its text out, or writes it before the end of the turn ({self._ends_in_words()})"
                )
            self._placed.add(role)

    def _ends_of_turns(self) -> set[str]:
        """The tokens with which the template may end the assistant's turn: those at which sampling stops; and if it
        writes none of them, the first of its own control tokens.
        """
        word, behind = f"mark{secrets.token_hex(16)}", f"mark{secrets.token_hex(16)}"
        conversation = [("user", "x"), ("assistant", word), ("user", behind)]
        text = self._encoder.render([{"role": role, "content": said} for role, said in conversation], self.tools).text
        _, _, text = text.partition(word)
        between, is_there, _ = text.partition(behind)
        if not is_there:
            raise DataError(
                "the chat template leaves out an assistant's or a user's text; no turn could follow another"
            )
        ends = set(self._stops.values())
        if not any(end in between for end in ends):
            own = [(between.find(token), token) for token in self._encoder.special_tokens if token in between]
            if not own:
                raise DataError(
                    "the chat template's end of an assistant's turn is text and no token of its own, so what a next"
                    f" turn adds has no certain beginning; the end tokens of this run: {self._ends_in_words()}"
                )
            ends.add(min(own)[1])
        return ends

    def _ends_in_words(self) -> str:
        return ", ".join(repr(text) for text in self._stops.values()) or "none that is a token of its own"


def run_end_tokens(
    encoder: PromptEncoder, tokenizer: Any, configured: Sequence[int], vocab_size: int | None, *, calls: bool = False
) -> EndTokens:
    """The tokens at which every response of a run ends, and what to tell the user where their sources differ.

    `encoder`: of the run's prompts, with `tokenizer`, a Hugging Face one. `configured`: `ModelSpec.eos_token_ids`.
    `vocab_size`: the model's, None where it is not known. `calls`: the policy may call tools, and the template may end
    such a turn in another way. Raises DataError where there is none.
    """
    own = None if tokenizer.eos_token_id is None else EndToken(tokenizer.eos_token_id, tokenizer.eos_token)
    by_template = [encoder.turn_end_token_id, encoder.call_end_token_id if calls else None]
    template, call = (
        None if token_id is None else EndToken(token_id, tokenizer.convert_ids_to_tokens(token_id))
        for token_id in by_template
    )
    known = {
        token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in configured if token_id < len(tokenizer)
    }
    found = end_tokens(configured, own, template, vocab_size, known, None if call == template else call)
    if not found.ids:
        said = "".join(f"{text}. " for text in found.notices)
        raise DataError(
            f"{said}No end token is named: give eos_token_id in generation_config.json, or eos_token in"
            " tokenizer_config.json; a response could never end"
        )
    return found


def check_taught_end(encoder: PromptEncoder, end_token_ids: Sequence[int], folder: str) -> None:
    """Raise DataError where demonstrations would end with a token that ends no response, because the model of `folder`
    has no such token. `end_token_ids`: a run's, as `run_end_tokens` gives them.
    """
    if encoder.end_token_id not in end_token_ids:
        raise DataError(
            f"{folder}: demonstrations would end with {encoder.end_token!r} ({encoder.end_token_id}), which is outside"
            " the model's vocabulary; name another eos_token in its tokenizer_config.json"
        )
