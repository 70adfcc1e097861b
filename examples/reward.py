"""A reward function of your own, named in the YAML.

    gspo-mega train configs/gsm8k.yaml reward=examples.reward:score          one function without options

    reward:                                                                  the same with options and a second function
      functions:
        - {function: "examples.reward:score", options: {longest: 400}}
        - {function: format, weight: 0.1}

The name is `package.module:function`. The module is looked for in the folder from which the run is started, then on the
Python path, and last in the YAML file's folder. It needs nothing of `gspo_mega`.

    python examples/reward.py          from the repository's root

reads a configuration and calls the function as a run does, in a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def score(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any], longest: int = 1000) -> dict[str, Any]:
    """1 where the last word of the response is the answer, less 0.1 where the response is too long."""
    words = response.split()
    right = bool(words) and words[-1].rstrip(".") == str(answer)
    too_long = len(response) > longest
    return {"reward": float(right) - 0.1 * too_long, "correct": right, "too_long": float(too_long)}


async def rewards_of(responses: list[str], answer: str, overrides: list[str]) -> list[float | None]:
    """The reward of each response under the section `reward` of a configuration."""
    # Imported here, so that a scoring process, which needs `score` only, does not import them.
    from gspo_mega.base.episodes import one_turn_episode
    from gspo_mega.base.records import Prompt
    from gspo_mega.config import load_config
    from gspo_mega.rewards.pool import ScoringPool

    settings = load_config(ROOT / "configs/gsm8k.yaml", overrides).config.reward
    prompt = Prompt("train:0", "train", (1, 2), "What is 17 + 4?", answer)
    found = []
    async with ScoringPool(settings) as pool:
        for place, text in enumerate(responses):
            # The tokens, their log-probs (nats) and weight versions do not matter to this function.
            episode = one_turn_episode(f"sample-{place}", 0, prompt, [3], [-0.1], [0], "stop", text)
            await pool.score(episode)
            found.append(episode.reward)
    return found


def main() -> None:
    responses = ["17 + 4 = 21", "It is 22.", "Let me think. " * 40 + "21"]
    overrides = [
        "reward={functions: [{function: 'examples.reward:score', options: {longest: 400}}]}",
        "reward.num_workers=1",
    ]
    for text, reward in zip(responses, asyncio.run(rewards_of(responses, "21", overrides))):
        print(f"{reward:+.1f}  {text[-30:]}")


if __name__ == "__main__":
    if Path.cwd() != ROOT:
        sys.exit(f"start it from {ROOT}, where the module examples.reward is found")
    main()
