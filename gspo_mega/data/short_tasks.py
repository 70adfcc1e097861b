"""Short tasks in English for a small pretrained model: JSON objects of two given values, and arithmetic.

A row has `prompt` and `answer`; a built-in reward checks the response: `json_schema` with `compare`, or `gsm8k`.

Whether a problem is held out depends on the problem only, so no held-out problem is in any train set.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "heldout"]
# One in this many problems is held out.
HELDOUT_EVERY = 8
_WORDS = """
apple river stone cloud table horse green light music paper water house plant chair bread window garden bottle
mountain letter winter summer forest bridge candle pencil guitar island ladder mirror needle orange pocket rabbit
silver ticket tunnel valley wagon yellow anchor basket copper desert engine feather hammer jacket kettle lemon
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class ShortTask:
    """`problems`: all there are, each a tuple that JSON can write. `row`: the row of one. `person`: the task's name in
    hashes.
    """

    person: bytes
    problems: Sequence[tuple[Any, ...]]
    row: Callable[..., dict[str, str]]

    def split_of(self, problem: tuple[Any, ...]) -> Split:
        """The split that a problem belongs to."""
        digest = hashlib.blake2b(json.dumps(problem).encode(), digest_size=8, person=self.person).digest()
        return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"

    def rows(self, split: Split, number: int, seed: int) -> Iterator[dict[str, str]]:
        """Yield `number` different rows of one split, in an order that `seed` decides.

        Raises ValueError: the split has fewer problems.
        """
        problems = [problem for problem in self.problems if self.split_of(problem) == split]
        if number > len(problems):
            raise ValueError(f"{number} {split} problems are asked for; there are {len(problems)}")
        for problem in random.Random(f"{split} {seed}").sample(problems, number):
            yield self.row(*problem)


def _json_row(word: str, number: int) -> dict[str, str]:
    prompt = (
        f'Write a JSON object with the keys "name" and "count", where name is "{word}" and count is {number}.'
        " Write only the JSON."
    )
    return {"prompt": prompt, "answer": json.dumps({"name": word, "count": number})}


def _arithmetic_row(operation: str, a: int, b: int) -> dict[str, str]:
    result = a * b if operation == "times" else a + b
    return {"prompt": f"What is {a} {operation} {b}? Answer with the number only.", "answer": str(result)}


TASKS = {
    "json": ShortTask(b"json objects", tuple(itertools.product(_WORDS, range(1, 100))), _json_row),
    # Products up to 12 x 12, of a digit and a number below twenty, and sums of two numbers of two digits.
    "arithmetic": ShortTask(
        b"arithmetic",
        (
            *itertools.product(["times"], range(2, 10), range(2, 20)),
            *itertools.product(["times"], range(10, 13), range(2, 13)),
            *itertools.product(["plus"], range(10, 36), range(10, 36)),
        ),
        _arithmetic_row,
    ),
}
