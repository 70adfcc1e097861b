"""The text that a chat template puts after what the policy sampled, and the tokens at which a turn ends.

`SuffixRule` gives what the next turn of a conversation adds, so that sampled tokens are never rendered or encoded
again. It renders the whole history with a mark (a unique word) in place of each part of every sampled message: its
content, its thinking, the argument of each call. The text after the last mark, from the end of the turn on, is the
suffix. The suffix is encoded; the sampled text is not. If a mark is gone, or a message's first mark follows other text
than the message was sampled after, the template rewrites the history. (`agents/recorder.py` has the tree of an
episode.)

`run_end_tokens` asks a run's tokenizer and chat template for its end tokens. It is the only place where they are
derived: rollouts of every kind (training, evaluation, episodes), demonstrations and the exported folder take them from
here. `models/end_tokens.py` makes one list of the sources.
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
_OPENED_THINKING = re.compile(r"<think>\s*\Z")
_CLOSED_THINKING = re.compile(r".*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """Text that a template made, and its token ids."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Rewritten:
    """The template does not continue what was sampled: from the message with index `message` on, its text differs."""

    message: int
    why: str


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a conversation. If it was sampled, `gap` is the template's text between it and the turn before it
    (or the beginning), and `stop_token` is the token that it ended with, None if it ended by length.
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
        """`stop_token_ids`: the run's end tokens, one of which ends a sampled turn.

        Raises DataError if there is no chat template, or if this template ends a turn with text and no token.
        """
        if not encoder.chat_template:
            raise DataError("an episode of several turns needs a chat template; set data.chat_template: true")
        self.tools: list[dict[str, Any]] = [dict(tool) for tool in tools or ()]
        self._encoder = encoder
        self._stops = {token: text for token in stop_token_ids if (text := encoder.token_text(token)) is not None}
        self._ends = self._ends_of_turns()
        # Learnt from the conversations: for which combinations of a message's parts this template has a place and for
        # which it has none; and the roles whose text it puts after the assistant's.
        self._known: set[tuple[str, ...]] = set()
        self._unknown: set[tuple[str, ...]] = set()
        self._placed: set[str] = set()

    def with_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> SuffixRule:
        """The same rule for an agent that brings its own tools."""
        other = copy.copy(self)  # which shares what was learnt
        other.tools = [dict(tool) for tool in tools or ()]
        return other

    def first(self, messages: Sequence[Message]) -> Rendered:
        """All of `messages` as a context, up to where the assistant's answer begins. Raises DataError if the template
        refuses them.
        """
        return self._rendered(self._whole(messages))

    def after(self, history: Sequence[HistoryMessage], new: Sequence[Message]) -> Rendered | Rewritten:
        """What `new` adds after `history`, whose last message was sampled. The token that ended that message belongs to
        it. If no token ended it, or another than the template writes, the suffix begins with the end of the turn.

        Raises DataError if the template refuses the messages or has no place for one of `new`.
        """
        marked = {place: self._marked(one.message) for place, one in enumerate(history) if one.sampled}
        messages = [marked[place].message if one.sampled else one.message for place, one in enumerate(history)]
        whole = self._whole([*messages, *new])
        for place, one in marked.items():
            if any(mark not in whole.text for mark in one.marks) and self._learn(messages[: place + 1], one):
                return self.after(history, new)  # which marks the message in another way now
        at = self._end_of_history(history, marked, whole)
        if isinstance(at, Rewritten):
            return at
        suffix = whole[at:]
        for place, one in marked.items():
            if any(mark in suffix.text for mark in one.marks):
                return Rewritten(place, f"the template writes a part of message {place} again after it")
        self._check_places(history, marked, messages, new)
        return self._rendered(suffix)

    def sampled_text(self, before: Sequence[Message], message: Message) -> Rendered:
        """What a policy would have sampled after the messages `before` to say `message`, as this template writes the
        last message of a conversation: `text` without the end token of the turn, `token_ids` with it.

        Raises DataError if the template refuses the messages, has no place for a part of `message`, or begins the
        answer with text with which `message` does not begin.
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
        tail = self._text_after_marks([*before], marked, opened=False)
        if not closed.text.endswith(tail) or len(closed.text) - len(tail) < len(beginning):
            raise DataError("the chat template writes other text after an assistant's message for this content")
        found = [(at, end) for end in self._ends if (at := tail.find(end)) >= 0]
        end = min(found)[1] if found else self._end_before_next(before, message, marked)
        sampled = closed[len(beginning) : len(closed.text) - len(tail) + (min(found)[0] if found else len(tail))]
        ids = self._encoder.encode(MaskedText(sampled.text + end, sampled.originals))
        return Rendered(ids, sampled.unmasked)

    def _end_before_next(self, before: Sequence[Message], message: Message, marked: Marked) -> str:
        """The token that ends `message`, for templates that write it only before the next message: the answer to its
        calls, or a user's message.
        """
        following: Message = {"role": "user", "content": "x"}
        if message.get("tool_calls"):
            call = message["tool_calls"][0]
            name = call["function"]["name"]
            following = {"role": "tool", "content": "x", "tool_call_id": call.get("id", ""), "name": name}
        text = self._text_after_marks(before, marked, following)
        found = [(at, end) for end in self._ends if (at := text.find(end)) >= 0]
        if not found:
            raise DataError(
                "the chat template writes no end of an assistant's turn; the end tokens of this run:"
                f" {self._ends_in_words()}"
            )
        return min(found)[1]

    def _text_after_marks(
        self, before: Sequence[Message], marked: Marked, *following: Message, opened: bool = True
    ) -> str:
        """The template's text after the parts of a message. Raises DataError if it leaves out a part."""
        text = self._encoder.render([*before, marked.message, *following], self.tools, opened=opened).text
        if any(mark not in text for mark in marked.marks):
            raise DataError("the chat template leaves out a part of the assistant's message")
        return text[self._extent(marked, text)[1] :]

    def given(self, before: Sequence[Message], message: Message, text: str) -> Message:
        """The message that an agent gets for one that was sampled after the messages `before`: `message`; or, if this
        template has no place for one of its parts, the message with `text`, all that was sampled, as its content. Its
        calls stay, for the agent to answer.
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
        """The template's text of a conversation. An assistant's message that `given` gave to an agent with its calls
        and all its text as content comes back in that form. A template that refuses both gets only the content.
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
        # Without a place for them, the content is all that was sampled.
        return marked_message(message, ("content",) if parts in self._unknown else parts)

    def _learn(self, messages: Sequence[Message], marked: Marked) -> bool:
        """Learn whether this template has a place for the parts of the last of `messages`, at least if that is the last
        message. Returns True if it has none; such a message is only content from now on.
        """
        parts = parts_in(marked.message)
        if parts in self._known or parts == ("content",):
            return False  # a template may leave out content although it has a place for it
        try:
            alone = self._encoder.render(messages, self.tools, opened=False)
        except DataError:
            alone = MaskedText("", {})  # it refuses such a message, so it has no place for it
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

    def _end_of_turn(self, text: str, part_end: int, stop_token: int | None) -> int:
        """Where the tokens of a turn end whose last part ends at `part_end`: after its `stop_token` if the template
        ends the turn with that token, else before the token with which the template ends it.
        """
        found = [(at, end) for end in self._ends if (at := text.find(end, part_end)) >= 0]
        if not found:
            raise DataError(
                "the chat template goes on after an assistant's turn without ending it; the end tokens of this run:"
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
        """Refuse a message whose text the template leaves out or puts elsewhere. Checks each role once."""
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
            return  # only such a text is refused; the next message is checked again
        at = self._end_of_history(history, marked, whole)
        if isinstance(at, Rewritten):
            return
        for place, mark in marks.items():
            role = new[place]["role"]
            if mark not in whole.text[at:]:
                raise DataError(
                    f"the chat template has no place for a message of the role {role!r} after the assistant's: it"
                    f" leaves its text out, or writes it before the end of the turn ({self._ends_in_words()})"
                )
            self._placed.add(role)

    def _ends_of_turns(self) -> set[str]:
        """The tokens with which the template may end the assistant's turn: those at which sampling stops; if it writes
        none of them, also the first of its own control tokens.
        """
        word, next_word = f"mark{secrets.token_hex(16)}", f"mark{secrets.token_hex(16)}"
        conversation = [("user", "x"), ("assistant", word), ("user", next_word)]
        text = self._encoder.render([{"role": role, "content": said} for role, said in conversation], self.tools).text
        _, _, text = text.partition(word)
        between, is_there, _ = text.partition(next_word)
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


@dataclass
class Marked:
    """A message with marks in place of its parts. `marks`: by mark, what it stands for, in words."""

    message: Message
    marks: dict[str, str]


def parts_in(message: Message) -> tuple[str, ...]:
    """The parts of an assistant's message that marks can replace. An empty turn has the part content."""
    calls = message.get("tool_calls") or ()
    parts = ["thinking"] if message.get("reasoning_content") else []
    if calls:
        parts.append("calls" if len(calls) == 1 else "several calls")  # a template may write only one of several
    if message.get("content") or not calls:
        parts.append("content")
    return tuple(parts)


def marked_message(message: Message, parts: Sequence[str]) -> Marked:
    """`message` with a new mark for each of `parts`, and without its other parts."""
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        word = f"mark{secrets.token_hex(16)}"
        marks[word] = what
        return word

    out: Message = {"role": "assistant", "content": ""}
    if "thinking" in parts:
        out["reasoning_content"] = mark("thinking")
    if "calls" in parts or "several calls" in parts:
        # A call keeps its name, because templates may repeat it with the tool's answer.
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"argument": mark(f"call {number}")}}}
            for number, call in enumerate(message["tool_calls"], start=1)
        ]
    if "content" in parts:
        out["content"] = _marked_content(message.get("content") or "", mark)
    return Marked(out, marks)


def _marked_content(content: str, mark: Callable[[str], str]) -> str:
    """A mark for the content; if it contains thinking, two marks with the tags that templates look for."""
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
    """The first difference of two texts, in words."""
    same = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    start = max(0, same - 16)
    return f"{now[start : same + 32]!r} in place of {before[start : same + 32]!r}"


def run_end_tokens(
    encoder: PromptEncoder, tokenizer: Any, configured: Sequence[int], vocab_size: int | None, *, calls: bool = False
) -> EndTokens:
    """The tokens at which every response of a run ends, and notices for the user if their sources differ.

    `encoder`: the one of the run's prompts, with `tokenizer`, a Hugging Face tokenizer. `configured`:
    `ModelSpec.eos_token_ids`. `vocab_size`: the model's, None if it is not known. `calls`: whether the policy may call
    tools, because the template may end such a turn in another way. Raises DataError if there is no end token.
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
    """Raise DataError if demonstrations would end with a token that ends no response, because the model of `folder` has
    no such token. `end_token_ids`: those of the run, as `run_end_tokens` gives them.
    """
    if encoder.end_token_id not in end_token_ids:
        raise DataError(
            f"{folder}: demonstrations would end with {encoder.end_token!r} ({encoder.end_token_id}), which is outside"
            " the model's vocabulary; name another eos_token in its tokenizer_config.json"
        )
