"""A task of your own for a small pretrained model: its rows and its reward, in one file to copy and change.

    launch/setup.sh && launch/smollm2_model.sh && source .venv/bin/activate
    python examples/own_task.py runs/list-data                   writes train.jsonl and heldout.jsonl
    gspo-mega train configs/smollm2_json.yaml run.dir=runs run.name=list reward=examples.own_task:score \\
      data.path=runs/list-data/train.jsonl eval.path=runs/list-data/heldout.jsonl eval.num_prompts=64 \\
      rollout.temperature=0.7 eval.temperature=0.7 train.num_steps=10 eval.every_steps=5 batch.share_prefixes=prompts

For a task of your own, copy this file as my_task.py next to your YAML file, in which you write `reward: my_task:score`.
The command finds the module there, from whichever folder you start it.

The model is asked for a numbered list of three words and for nothing else. The reward is 1 for exactly that. A response
that has some of the lines gets some of it, so that responses to one prompt differ while hardly any is right.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = """apple basket bridge candle castle cloud copper desert engine feather forest garden glass hammer harbor island
kettle ladder lantern lemon market meadow mirror needle orange paper pencil pepper pillow planet pocket ribbon river
rocket saddle silver spider stone sugar summer table thunder ticket tiger tower valley velvet violin window winter"""


def rows(number: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `number` different problems as rows with a prompt and an answer."""
    chosen, seen = random.Random(seed), set[tuple[str, ...]]()
    while len(seen) < number:
        words = tuple(chosen.sample(WORDS.split(), 3))
        if words not in seen:
            seen.add(words)
            prompt = f"Write a numbered list of these three words: {', '.join(words)}. Write only the list."
            yield {"prompt": prompt, "answer": "\n".join(f"{place}. {word}" for place, word in enumerate(words, 1))}


def score(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """1 for the list and nothing else; otherwise up to 0.5 for the share of its lines, less 0.05 for each other line.

    `correct` is what the held-out accuracy counts. Further numbers, here `lines`, are recorded with the reward.
    """
    wanted = answer.split("\n")
    found = [line.strip() for line in response.strip().split("\n") if line.strip()]
    right = found == wanted
    share = sum(line in found for line in wanted) / len(wanted)
    others = sum(line not in wanted for line in found)
    return {"reward": 1.0 if right else max(0.0, 0.5 * share - 0.05 * others), "correct": right, "lines": share}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files; created if missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    made = list(rows(500, seed=1))
    for name, part in (("train", made[:400]), ("heldout", made[400:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
