"""A short task in English for a small pretrained model: write a JSON object with two given values.

A row has `prompt` and `answer`; the built-in reward `json_schema` with `compare` checks a response.

Whether a problem is held out depends on the problem only, so no held-out problem is in any train set.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "heldout"]
# One in this many problems is held out.
HELDOUT_EVERY = 8
WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "table",
    "horse",
    "green",
    "light",
    "music",
    "paper",
    "water",
    "house",
    "plant",
    "chair",
    "bread",
    "window",
    "garden",
    "bottle",
    "mountain",
    "letter",
    "winter",
    "summer",
    "forest",
    "bridge",
    "candle",
    "pencil",
    "guitar",
    "island",
    "ladder",
    "mirror",
    "needle",
    "orange",
    "pocket",
    "rabbit",
    "silver",
    "ticket",
    "tunnel",
    "valley",
    "wagon",
    "yellow",
    "anchor",
    "basket",
    "copper",
    "desert",
    "engine",
    "feather",
    "hammer",
    "jacket",
    "kettle",
    "lemon",
]


def json_row(word: str, number: int) -> dict[str, str]:
    """The row of the problem that asks for the object of `word` and `number`."""
    prompt = (
        f'Write a JSON object with the keys "name" and "count", where name is "{word}" and count is {number}.'
        " Write only the JSON."
    )
    return {"prompt": prompt, "answer": json.dumps({"name": word, "count": number})}


PROBLEMS = tuple(itertools.product(WORDS, range(1, 100)))


def split_of(problem: tuple[str, int]) -> Split:
    """The split that a problem belongs to."""
    text = json.dumps(problem).encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"json objects").digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"


def rows(split: Split, number: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `number` different rows of one split, in an order that `seed` decides.

    Raises ValueError: the split has fewer problems.
    """
    problems = [problem for problem in PROBLEMS if split_of(problem) == split]
    if number > len(problems):
        raise ValueError(f"{number} {split} problems are asked for; there are {len(problems)}")
    for problem in random.Random(f"{split} {seed}").sample(problems, number):
        yield json_row(*problem)
