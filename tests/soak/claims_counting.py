"""The task of the study's block `mini_batches`: responses of 145 tokens that a tiny model learns in minutes.

    python tests/soak/claims_counting.py OUT_DIR      OUT_DIR/train.jsonl and OUT_DIR/heldout.jsonl

A prompt has a number and a step, the response counts on from the number: 12 sums modulo 1000, each after a letter that
says which one it is. All numbers have three digits, ones first, so that a carry is known when it is needed:

    {"prompt": "714+320:", "answer": "a714+320=044b044+320=364c364+320=684..."}          417 + 23 = 440, 440 + 23 = 463

No problem is in both files.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_SUMS, SUM_LENGTH = 12, 12  # sums of a response, characters (which are tokens) of a sum
NUM_TRAIN, NUM_HELDOUT = 20_000, 512


def written(number: int) -> str:
    """The last three digits of a number, ones first."""
    return f"{number % 1000:03d}"[::-1]


def row_of(start: int, step: int) -> dict[str, str]:
    """The JSONL row of one problem; the solution is also the demonstration."""
    sums = []
    for label in string.ascii_lowercase[:NUM_SUMS]:
        sums.append(f"{label}{written(start)}+{written(step)}={written(start + step)}")
        start += step
    return {"prompt": sums[0][1:9].replace("=", ":"), "answer": "".join(sums), "response": "".join(sums)}


def is_held_out(start: int, step: int) -> bool:
    """Whether a problem is held out, as one in sixteen is."""
    return hashlib.blake2b(f"{start}+{step}".encode(), digest_size=1).digest()[0] % 16 == 0


def rows(heldout: bool, number: int) -> Iterator[dict[str, str]]:
    """So many different problems of one split, always the same ones."""
    rng = random.Random(f"counting/{heldout}")
    seen: set[tuple[int, int]] = set()
    while len(seen) < number:
        problem = rng.randrange(1000), rng.randrange(1, 1000)
        if problem not in seen and is_held_out(*problem) == heldout:
            seen.add(problem)
            yield row_of(*problem)


def score(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float | bool]:
    """The share of the sums that are right before the first mistake; text after the last one counts as mistakes.
    Correct is a response with all sums and nothing else.
    """
    given, right = response.strip(), str(answer)
    num_right, length = 0, SUM_LENGTH
    while num_right < NUM_SUMS and given[:length] == right[:length]:
        num_right, length = num_right + 1, length + SUM_LENGTH
    return {"reward": num_right / max(NUM_SUMS, -(-len(given) // SUM_LENGTH)), "correct": given == right}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, heldout, number in (("train", False, NUM_TRAIN), ("heldout", True, NUM_HELDOUT)):
        lines = (json.dumps(row) + "\n" for row in rows(heldout, number))
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
