"""Compares the tokens of a dialogue with a chat template's own rendering of it.

Owns what is a drift (wrong) and what is worth a note. The dialogues are led by `template_certificate.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo_mega.agents.template_dialogues import WORD, Message
from gspo_mega.data.chat import MaskedText, PromptEncoder, for_template
from gspo_mega.data.message_marks import difference


@dataclass(frozen=True)
class Observation:
    """`kind`: of dialogues. `level` and `what` as in the doctor's findings."""

    level: Literal["ok", "note", "wrong"]
    what: Literal["drift", "branch", "spelling", "tokens", "refusal", "template", "added"]
    kind: str
    text: str


@dataclass
class Part:
    """A node's text and tokens. `message`: the index of its first message in the history. `end`: the text of the end
    token of a sampled one, which is the end of its text; empty where it has none.
    """

    message: int
    text: str
    token_ids: list[int]
    is_sampled: bool = False
    end: str = ""


class Comparison:
    """Of one dialogue's paths. Attributes: observations; num_turns and num_context_tokens that were compared."""

    def __init__(self, tokenizer: Any, encoder: PromptEncoder, kind: str, tools: list[dict[str, Any]]) -> None:
        """`tokenizer`: the Hugging Face one, whose own rendering is compared with the encoder's."""
        self.observations: list[Observation] = []
        self.num_turns = self.num_context_tokens = 0
        self._tokenizer, self._encoder, self._kind, self._tools = tokenizer, encoder, kind, tools

    def check(self, path: Sequence[Part], history: Sequence[Message]) -> None:
        """Compare a path that ends with a context with the rendering of the whole `history`, which it should be."""
        whole = self._encoder.render(history, self._tools)
        self._check_against_transformers(whole, history)
        self._check_control_tokens(whole, history)
        self.num_turns += 1
        self.num_context_tokens += sum(len(part.token_ids) for part in path if not part.is_sampled)
        written = self._align(path, whole.unmasked)
        if written is None:
            return
        pieces = _cut(whole, written)
        for place, (part, piece) in enumerate(zip(path, pieces, strict=True)):
            if not part.is_sampled or piece.unmasked == part.text:
                continue
            is_closed = self._is_closed_once(part, piece, path[place + 1].text)
            if not is_closed or WORD.findall(part.text) != WORD.findall(piece.unmasked):
                self._drift(part if is_closed else path[place + 1], piece.unmasked, part.text)
                return
            self.observe(
                "note",
                "spelling",
                f"sampled {short(part.text)}, in the history {short(piece.unmasked)}; what was sampled stays",
            )
        self._check_tokens(path, pieces, whole)

    def _is_closed_once(self, part: Part, piece: MaskedText, context: str) -> bool:
        """Does nothing lie between the end of a turn and the context behind it? It is closed by its end token, or by
        the control token with which the context begins.
        """
        if part.end and piece.text.endswith(part.end):
            return True
        closing = next((token for token in self._encoder.special_tokens if context.startswith(token)), None)
        return closing is not None and not any(token in piece.text for token in (closing, part.end) if token)

    def _align(self, path: Sequence[Part], whole: str) -> list[str] | None:
        """What `whole` has for each part: exactly the text of contexts, and anything between them."""
        written: list[str] = []
        at = 0
        for place, part in enumerate(path):
            if part.is_sampled:
                continue
            found = whole.find(part.text, at) if place else (0 if whole.startswith(part.text) else -1)
            is_last = place == len(path) - 1
            if is_last and found >= 0:
                found = len(whole) - len(part.text) if whole.endswith(part.text) else -1
            if found < at:
                shown = whole[at:] if not place else whole[at + _num_same(whole[at:], path[place - 1].text) :]
                self._drift(part, shown, part.text)
                return None
            if place:
                written.append(whole[at:found])
            written.append(part.text)
            at = found + len(part.text)
        return written

    def _check_tokens(self, path: Sequence[Part], pieces: Sequence[MaskedText], whole: MaskedText) -> None:
        """Are the tokens of the contexts those of the whole rendering, encoded at once?"""
        ours: list[int] = []
        owners: list[tuple[Part, bool]] = []  # of each token, and whether it touches what was sampled
        for place, (part, piece) in enumerate(zip(path, pieces, strict=True)):
            ids = part.token_ids
            if part.is_sampled:
                ids = self._encoder.encode(piece)
                if ids != part.token_ids and piece.unmasked == part.text:
                    self.observe(
                        "note",
                        "tokens",
                        f"{short(part.text)}: {len(part.token_ids)} tokens were sampled and stay; encoded again it is"
                        f" {len(ids)} others",
                    )
            ours += ids
            touches = [part.is_sampled or (n == len(ids) - 1 and place + 1 < len(path)) for n in range(len(ids))]
            owners += [(part, one) for one in touches]
        theirs = self._encoder.encode(whole)
        if ours == theirs:
            return
        at = _num_same(ours, theirs)
        part, touches_sampled = owners[min(at, len(owners) - 1)]
        shown = [repr(self._tokenizer.decode(ids[at : at + 3])) for ids in (theirs, ours)]
        if touches_sampled:
            self.observe(
                "note", "tokens", f"encoded as a whole, a token {shown[0]} would cross the beginning of a turn"
            )
        else:
            text = f"encoded as a whole the tokens are {shown[0]}, and here {shown[1]}"
            self.observe("wrong", "drift", f"message {part.message}: {text}")

    def _check_against_transformers(self, whole: MaskedText, history: Sequence[Message]) -> None:
        """Does transformers render the same text?"""
        texts: list[str] = []
        for arguments_are_text in (False, True):
            messages = [for_template(message, arguments_are_text) for message in history]
            try:
                texts.append(
                    self._tokenizer.apply_chat_template(
                        messages, tools=self._tools or None, tokenize=False, add_generation_prompt=True
                    )
                )
            except Exception as error:  # a template may raise anything
                texts.append(f"an error: {error}"[:200])
        if whole.unmasked not in texts:
            self.observe(
                "wrong", "template", f"transformers renders another text: {difference(whole.unmasked, texts[0])}"
            )

    def _check_control_tokens(self, whole: MaskedText, history: Sequence[Message]) -> None:
        """No text of a message becomes a control token: a harmless text in its place gives as many of them."""
        control = self._encoder.special_tokens
        if not any(token in str(message.get("content")) for token in control for message in history):
            return
        expected = self._num_control(self._harmless(history, range(len(history))))
        if self._count(self._encoder.encode(whole)) == expected:
            return
        for place, message in enumerate(history):
            if self._num_control(self._harmless(history, [n for n in range(len(history)) if n != place])) != expected:
                self.observe(
                    "wrong",
                    "drift",
                    f"message {place}: a text of the {message['role']}'s becomes a control"
                    f" token: {short(str(message.get('content')))}",
                )
                return

    def _harmless(self, history: Sequence[Message], places: Iterable[int]) -> list[Message]:
        changed = [dict(message) for message in history]
        for place in places:
            content = str(changed[place].get("content") or "")
            for token in self._encoder.special_tokens:
                content = content.replace(token, "x")
            changed[place]["content"] = content
        return changed

    def _num_control(self, history: Sequence[Message]) -> Counter[int]:
        return self._count(self._encoder.encode(self._encoder.render(history, self._tools)))

    def _count(self, ids: Sequence[int]) -> Counter[int]:
        control = set(self._tokenizer.convert_tokens_to_ids(list(self._encoder.special_tokens)))
        return Counter(token for token in ids if token in control)

    def _drift(self, part: Part, theirs: str, ours: str) -> None:
        text = f"message {part.message}: the template writes {difference(ours, theirs)}"
        self.observe("wrong", "drift", text)

    def observe(self, level: Any, what: Any, text: str) -> None:
        self.observations.append(Observation(level, what, self._kind, text))


def _cut(whole: MaskedText, texts: Sequence[str]) -> list[MaskedText]:
    """`whole` in pieces that say these texts."""
    pieces = []
    for text in texts:
        end = _end_of(whole, len(text))
        pieces.append(whole[:end])
        whole = whole[end:]
    return pieces


def _end_of(text: MaskedText, length: int) -> int:
    """Where `text` has said `length` characters."""
    at = said = 0
    while said < length:
        word = next((word for word in text.originals if text.text.startswith(word, at)), None)
        at += 1 if word is None else len(word)
        said += 1 if word is None else len(text.originals[word])
    return at


def _num_same(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-16:]}")
