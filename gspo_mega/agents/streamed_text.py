"""The text of a turn while it is sampled: what a reader may already be shown, and never has to take back.

Owns the text of tokens that come in pieces, and what of it is content for sure: not a part of a character, not thinking
or a call, nor the beginning of what may become one, nor white space at either end, which content beside a call has not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_BROKEN = "�"  # what decoders write for a part of a character
# Tokens are decoded with these many before them, which some decoders need for the space in front of a word.
_BEFORE = 8
# A character has at most four bytes, each a token at worst.
_MOST_OF_A_CHARACTER = 4
# More tokens than these without a whole character at their end are no text; they wait for the end of the turn.
_MOST_WAITING = 64


class TokenText:
    """Tokens to text, piece by piece; each token is decoded a bounded number of times."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._read = 0
        self._is_text = True

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, without a part of a character at its end."""
        self._token_ids += token_ids
        start = max(0, self._read - _BEFORE)
        before = self._decode(self._token_ids[start : self._read])
        for end in range(len(self._token_ids), self._read, -1) if self._is_text else ():
            text = self._decode(self._token_ids[start:end])
            if not text.endswith(_BROKEN) and text.startswith(before):
                self._read = end
                return text[len(before) :]
            if len(self._token_ids) - end >= _MOST_OF_A_CHARACTER:
                break
        self._is_text = self._is_text and len(self._token_ids) - self._read < _MOST_WAITING
        return ""


class StreamedContent:
    """Which part of a turn's content may be sent. `add` is fed the reports of a turn, `rest` the whole content."""

    def __init__(self, decode: Decode, openers: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        """`openers`: texts at which thinking or a call may begin."""
        self._text = TokenText(decode)
        self._openers = tuple(openers)
        self._stops = frozenset(stop_token_ids)
        self._num_tokens = 0
        self._held = ""
        self._is_over = False
        self.sent = ""

    def hold(self) -> None:
        """Send nothing before the whole message is known."""
        self._is_over = True

    def add(self, position: int, token_ids: Sequence[int]) -> str:
        """The content to send now, of tokens from `position` of the turn on. Where tokens were taken back, nothing more
        is sent before the end.
        """
        if position != self._num_tokens:
            self._is_over = True
        self._num_tokens = position + len(token_ids)
        if self._is_over:
            return ""
        self._held += self._text.add([token for token in token_ids if token not in self._stops])
        return self._take(self._sure())

    def rest(self, content: str) -> str | None:
        """What is left of the whole content; None where it does not begin with what was sent."""
        return content[len(self.sent) :] if content.startswith(self.sent) else None

    def _sure(self) -> int:
        """How much of what is held is content, whatever follows."""
        held = self._held
        if not self.sent and held[:1].isspace():
            self._is_over = True
            return 0
        places = [place for opener in self._openers if (place := held.find(opener)) >= 0]
        if places:
            self._is_over = True
            return len(held[: min(places)].rstrip())
        end = len(held)
        for opener in self._openers:
            for length in range(min(len(opener) - 1, len(held)), 0, -1):
                if held.endswith(opener[:length]):
                    end = min(end, len(held) - length)
                    break
        return len(held[:end].rstrip())

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self.sent += taken
        return taken
