"""The tool task of the small runs: a sum that is worked out with a calculator, one call after the other.

This file has the problems, their demonstrations, the split into train and held-out, the tool, and the chat template of
the model. A row is

    {"prompt": "47*86+39=", "answer": "4081", "response": [
        {"role": "assistant", "content": "[47*86]"}, {"role": "tool", "content": "4042"},
        {"role": "assistant", "content": "[4042+39]"}, {"role": "tool", "content": "4081"},
        {"role": "assistant", "content": "#4081"}]}

A call is written in brackets; a third of the problems (`47*86=`) need one call, the others two. The tool does the
arithmetic, so the policy has to learn to ask for the right thing and to copy what comes back. A reward function judges
the last turn (`rewards/`), and `agents/driver.py` runs the loop of turns.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from gspo_mega.data import quickstart
from gspo_mega.data.quickstart import HELDOUT_EVERY, Split

# The quickstart's turns, and before them a system turn that names each tool and its arguments.
CHAT_TEMPLATE = (
    """\
{%- if tools %}
    {{- '<|im_start|>system\\ntools:' }}
    {%- for tool in tools %}
        {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
"""
    + quickstart.CHAT_TEMPLATE
)
# Characters of the longest expression that the tool takes; `9801+99` has seven.
LONGEST_EXPRESSION = 12
_SUM = re.compile(r"[0-9]+(?:[-+*][0-9]+)*")
_TERM = re.compile(r"([-+]?)([0-9]+(?:\*[0-9]+)*)")


class Problem(NamedTuple):
    """a * b, followed by `sign` c if there is a sign."""

    a: int
    b: int
    sign: str = ""
    c: int = 0

    @property
    def text(self) -> str:
        return f"{self.a}*{self.b}" + (f"{self.sign}{self.c}" if self.sign else "") + "="

    @property
    def answer(self) -> int:
        return self.a * self.b + (self.c if self.sign == "+" else -self.c)


def calculator(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: whole numbers with +, - and * between them, such as 47*86.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"{len(expression)} characters; at most {LONGEST_EXPRESSION}")
    if not _SUM.fullmatch(expression):
        raise ValueError("not whole numbers with +, - or * between them")
    return str(sum(int(sign + "1") * prod(map(int, term.split("*"))) for sign, term in _TERM.findall(expression)))


def split_of(problem: Problem) -> Split:
    """The split that a problem belongs to; the problem with its factors exchanged belongs to the same. As with
    `quickstart.split_of`, it depends only on the problem.
    """
    low, high = sorted(problem[:2])
    digest = hashlib.blake2b(
        f"{low}*{high}{problem.sign}{problem.c}".encode(), digest_size=8, person=b"gspo_mega split"
    ).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"


def demonstrate(problem: Problem) -> list[dict[str, str]]:
    """The messages that solve a problem: a call for each operation, then the result after `#`."""
    calls = [f"{problem.a}*{problem.b}"]
    if problem.sign:
        calls.append(f"{problem.a * problem.b}{problem.sign}{problem.c}")
    messages = []
    for call in calls:
        messages += [{"role": "assistant", "content": f"[{call}]"}, {"role": "tool", "content": calculator(call)}]
    return [*messages, {"role": "assistant", "content": f"#{problem.answer}"}]


def row_of(problem: Problem) -> dict[str, Any]:
    """The JSONL row of one problem: `prompt`, `answer` and the demonstration `response`."""
    return {"prompt": problem.text, "answer": str(problem.answer), "response": demonstrate(problem)}


def problems(split: Split, num_problems: int, seed: int) -> Iterator[Problem]:
    """Yield `num_problems` different problems of one split, every third with a single operation, in an order that
    `seed` decides. All numbers have two digits.

    Raises ValueError if more than half of the split's problems with a single operation would be needed.
    """
    pairs = 90 * 91 // 2
    share = pairs // HELDOUT_EVERY if split == "heldout" else pairs - pairs // HELDOUT_EVERY
    # Exchanging the factors gives another prompt, so there are about twice as many.
    if num_problems > 3 * share:
        raise ValueError(f"{num_problems} {split} problems requested; at most {3 * share} can be drawn")
    rng = random.Random(f"calculator/{split}/{seed}")
    seen: set[Problem] = set()
    while len(seen) < num_problems:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        problem = Problem(a, b) if len(seen) % 3 == 2 else Problem(a, b, rng.choice("+-"), rng.randint(10, 99))
        if problem not in seen and split_of(problem) == split:
            seen.add(problem)
            yield problem
