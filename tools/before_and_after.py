"""Print what two models answered: `python tools/before_and_after.py PROMPTS.jsonl BEFORE.jsonl AFTER.jsonl`.

PROMPTS is the held-out file, whose rows have `prompt`; the others are of `gspo-mega eval --out` on it. Exit code 0; 2
for a file that is none, or if no prompt is in both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gspo_mega.base.untrusted import printable_output, read_text

_MARKS = {True: "right", False: "wrong", None: "not scored"}


@printable_output()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="before_and_after", description="Print what two models answered to the same prompts."
    )
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl", help="the held-out file")
    parser.add_argument("before", type=Path, metavar="BEFORE.jsonl", help="of `gspo-mega eval --out`")
    parser.add_argument("after", type=Path, metavar="AFTER.jsonl", help="of the other model, on the same prompts")
    options = parser.parse_args(arguments)
    try:
        before, after = first_responses(options.before), first_responses(options.after)
        prompts = [json.loads(line)["prompt"] for line in read_text(options.prompts).splitlines()]
    except (OSError, ValueError, KeyError) as error:
        print(f"not the held-out file and two files of `gspo-mega eval --out`: {error}", file=sys.stderr)
        return 2
    both = [key for key in before if key in after]
    if not both:
        print(f"{options.before} and {options.after} have no prompt in common", file=sys.stderr)
        return 2
    for key in both:
        print(prompts[key[1] - 1])
        for name, line in (("before", before[key]), ("after", after[key])):
            print(f"  {name:<6} ({_MARKS[line['correct']]}): {json.dumps(line['response'], ensure_ascii=False)}")
    return 0


def first_responses(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The first sample of every prompt, by set and row."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in map(json.loads, read_text(path).splitlines()):
        found.setdefault((line["set"], line["row"]), {name: line[name] for name in ("response", "correct")})
    return found


if __name__ == "__main__":
    sys.exit(main())
