"""The quickstart's task: adding two numbers on paper, column by column.

Owns the problems, their worked solutions and the split into train and held-out. A row is

    {"prompt": "4719+2386=", "answer": "7105", "response": "9+6=15,1+8+1=10,7+3+1=11,4+2+1=7#7105"}

The solution works from the ones column to the left and carries a 1 along where there is one, so the final
number after `#` can hardly be right unless the steps before it are. Judging a response is `reward/`'s.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "heldout"]

NUM_DIGITS = 4
# Of problems of several lengths: longer ones are harder, which a critic can see before the first token of an answer.
MIXED_DIGITS = (3, 4, 5, 6)
# One in this many problems belongs to the held-out split.
HELDOUT_EVERY = 16


def split_of(a: int, b: int) -> Split:
    """The split that the problem a + b (the same problem as b + a) belongs to.

    It depends on the pair alone, not on a seed or an order, so no held-out problem is in any train set that is ever
    generated.
    """
    pair = f"{min(a, b)}+{max(a, b)}".encode()
    digest = hashlib.blake2b(pair, digest_size=8, person=b"gspo_mega split").digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_EVERY == 0 else "train"


def solve(a: int, b: int) -> str:
    """The worked addition of two non-negative numbers: one `digit+digit[+1]=sum` per column, `#`, the result."""
    columns: list[str] = []
    carry = 0
    left, right = a, b
    while not columns or left or right:
        left, digit_a = divmod(left, 10)
        right, digit_b = divmod(right, 10)
        total = digit_a + digit_b + carry
        columns.append(f"{digit_a}+{digit_b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ",".join(columns) + f"#{a + b}"


def row_of(a: int, b: int) -> dict[str, str]:
    """The JSONL row of one problem: `prompt`, `answer` and the demonstration `response`."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b), "response": solve(a, b)}


def problems(split: Split, num_problems: int, seed: int, num_digits: int = NUM_DIGITS) -> Iterator[tuple[int, int]]:
    """Yield `num_problems` different problems of one split, in an order that `seed` decides.

    Both numbers have exactly `num_digits` digits; a + b and b + a count as one problem.

    Raises:
        ValueError: the split has too few such problems (more than half of about
            9 * 10^(num_digits-1) squared / 2 of them are asked for).
    """
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1
    size = high - low + 1
    num_pairs = size * (size + 1) // 2
    share = num_pairs // HELDOUT_EVERY if split == "heldout" else num_pairs - num_pairs // HELDOUT_EVERY
    if num_problems > share // 2:
        raise ValueError(
            f"{num_problems} {split} problems of {num_digits} digits requested; at most {share // 2} can be drawn"
            " without repeating one: ask for fewer, or for more digits"
        )
    rng = random.Random(f"arithmetic/{split}/{num_digits}/{seed}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < num_problems:
        a, b = rng.randint(low, high), rng.randint(low, high)
        pair = (min(a, b), max(a, b))
        if pair in seen or split_of(a, b) != split:
            continue
        seen.add(pair)
        yield a, b


def mixed_problems(split: Split, num_problems: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield problems as `problems` does, of each of `MIXED_DIGITS` in turn, equally many but for a rest."""
    each = -(-num_problems // len(MIXED_DIGITS))
    streams = [problems(split, each, seed, num_digits) for num_digits in MIXED_DIGITS]
    for number in range(num_problems):
        yield next(streams[number % len(streams)])
