"""Generated dialogues to try a chat template with: what agents say, and what a policy would answer.

`dialogues` writes dialogues of every kind (`KINDS`). Every message has words of its own (`w17x`), so that it can be
found in any rendering. `template_certificate.py` compares the dialogues with the template's renderings.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

WORD = re.compile(r"w\d+x")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
    for name in ("look_up", "work_out")
]
_SCRIPTS = [
    "naïve café",
    "数学の問題",
    "мир",
    "שלום",
    "مرحبا",
    "👩‍👩‍👧 🇨🇭",
    "e\u0301",
    "\u00a0\u200b|",
    "a\r\nb\tc",
    "\U0001d518",
]


@dataclass
class DialogueStep:
    """What is said to the policy, and what it answers. `is_cut`: the answer reached the limit of tokens and has no end.
    `in_odd_tokens`: the policy samples other tokens than the tokenizer would choose for its text.
    """

    new: list[Message]
    answer: Message
    is_cut: bool = False
    in_odd_tokens: bool = False


@dataclass
class Dialogue:
    kind: str
    steps: list[DialogueStep]
    tools: list[dict[str, Any]] = field(default_factory=list)


def dialogues(control_tokens: Sequence[str], seed: int = 0, number_of_each: int = 3) -> Iterator[Dialogue]:
    """Yield dialogues of all kinds, always the same for a seed. No text of a message may become one of the
    `control_tokens`.
    """
    for number, (kind, write) in itertools.product(range(number_of_each), _KINDS.items()):
        author = _Author(random.Random(f"{seed} {kind} {number}"), list(control_tokens))
        write(author, dialogue := Dialogue(kind, []))
        yield dialogue


class _Author:
    def __init__(self, rng: random.Random, control_tokens: list[str]) -> None:
        self.rng = rng
        self.control_tokens = control_tokens or ["<|none|>"]
        self._number = rng.randrange(100)

    def words(self, between: Sequence[str] = (" ",)) -> str:
        """Return one to three words that no other message has, with one of `between` between them."""
        said = ""
        for _ in range(self.rng.randint(1, 3)):
            self._number += 1
            said += f"{self.rng.choice(between) if said else ''}w{self._number}x"
        return said

    def user(self, content: str | None = None) -> Message:
        return {"role": "user", "content": self.words() if content is None else content}

    def say(self, content: str | None = None, **more: Any) -> Message:
        return {"role": "assistant", "content": self.words() if content is None else content, **more}

    def call(self, number: int = 1, **more: Any) -> Message:
        calls = [
            {
                "id": f"c{self.rng.randrange(10**8):08d}",
                "type": "function",
                "function": {"name": self.rng.choice(["look_up", "work_out"]), "arguments": {"text": self.words()}},
            }
            for _ in range(number)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls, **more}

    def results(self, answer: Message, content: str | None = None) -> list[Message]:
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": self.words() if content is None else content,
            }
            for call in answer["tool_calls"]
        ]


def _plain(author: _Author, made: Dialogue) -> None:
    made.steps = [DialogueStep([author.user()], author.say()) for _ in range(3)]


def _with_system(author: _Author, made: Dialogue) -> None:
    _plain(author, made)
    made.steps[0].new.insert(0, {"role": "system", "content": author.words()})


def _tools(author: _Author, made: Dialogue, between: Callable[[], dict[str, Any]] = dict) -> None:
    """Calls, their results and an answer, and then another question."""
    made.tools = TOOLS
    new = [author.user()]
    for _ in range(author.rng.randint(1, 2)):
        answer = author.call(author.rng.randint(1, 2), **between())
        made.steps.append(DialogueStep(new, answer))
        new = author.results(answer)
    made.steps += [DialogueStep(new, author.say(**between())), DialogueStep([author.user()], author.say(**between()))]


def _calls_beside_content(author: _Author, made: Dialogue) -> None:
    _tools(author, made, lambda: {"content": author.words()})


def _thinking(author: _Author, made: Dialogue) -> None:
    made.steps = [DialogueStep([author.user()], author.say(reasoning_content=author.words())) for _ in range(3)]


def _thinking_and_tools(author: _Author, made: Dialogue) -> None:
    _tools(author, made, lambda: {"reasoning_content": author.words()})


def _unicode(author: _Author, made: Dialogue) -> None:
    _plain(author, made)
    for step in made.steps:
        step.new[0]["content"] = author.words(_SCRIPTS)
        step.answer["content"] = author.words(_SCRIPTS)


def _empty_turns(author: _Author, made: Dialogue) -> None:
    for content in ("", author.words(), ""):
        made.steps.append(DialogueStep([author.user()], author.say(content)))
    made.steps.append(DialogueStep([author.user("")], author.say()))


def _control_tokens(author: _Author, made: Dialogue) -> None:
    """Users who write out what would end a turn, begin another or forge a call."""
    evil = [*author.control_tokens, "<think>", "</think>", "<tool_call>", "</tool_call>", "</tool_response>"]
    _plain(author, made)
    for step in made.steps:
        step.new[0]["content"] = author.words([f" {author.rng.choice(evil)}\n" for _ in range(4)]) + "".join(
            author.rng.sample(evil, 2)
        )


def _control_tokens_of_tools(author: _Author, made: Dialogue) -> None:
    _tools(author, made)
    for step in made.steps:
        for message in step.new:
            message["content"] += author.rng.choice(author.control_tokens) + author.words()


def _cut_turns(author: _Author, made: Dialogue) -> None:
    _plain(author, made)
    for step in made.steps[:2]:
        step.is_cut = True


def _odd_tokens(author: _Author, made: Dialogue) -> None:
    _plain(author, made)
    for step in made.steps:
        step.in_odd_tokens = True


_KINDS: dict[str, Callable[[_Author, Dialogue], None]] = {
    "plain": _plain,
    "system": _with_system,
    "tools": _tools,
    "content beside calls": _calls_beside_content,
    "thinking": _thinking,
    "thinking and tools": _thinking_and_tools,
    "unicode": _unicode,
    "empty turns": _empty_turns,
    "control tokens": _control_tokens,
    "control tokens of tools": _control_tokens_of_tools,
    "cut turns": _cut_turns,
    "odd tokens": _odd_tokens,
}
KINDS = tuple(_KINDS)
