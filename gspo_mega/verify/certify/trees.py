"""Make recorded episodes of several turns and branches, for the certificate of a configuration that has them."""

from __future__ import annotations

from collections.abc import Callable

from gspo_mega.base.episodes import Episode, Node
from gspo_mega.base.errors import PlanError
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import episode_lengths, is_one_turn
from gspo_mega.config.schema import Config

# The parent of each turn, -1 for the prompt. The shapes: one turn, three in a row, a turn that was sampled again, and
# two branches of which one branches once more.
_SHAPES = ((-1,), (-1, 0, 1), (-1, 0, 0), (-1, -1, 0, 0))

_CONTEXT_TOKENS = 2


def recorded_tree(
    episode_id: str, group_id: int, prompt: Prompt, place: int, length: int, tokens: Callable[[int], list[int]]
) -> Episode:
    """Return an episode of `length` sampled tokens, spread over the turns of the shape that `place` chooses; with fewer
    tokens than turns it has fewer turns. A turn that follows another turn comes after a message of two tokens.
    `tokens(n)`: n token ids.
    """
    parents = _SHAPES[place % len(_SHAPES)][:length]
    nodes = [Node(0, -1, "context", [{"role": "user", "content": ""}], list(prompt.token_ids))]
    turns: list[int] = []
    left = length
    for number, parent in enumerate(parents):
        above = 0
        if parent >= 0:
            above = len(nodes)
            nodes.append(
                Node(above, turns[parent], "context", [{"role": "tool", "content": ""}], tokens(_CONTEXT_TOKENS))
            )
        later = len(parents) - number - 1
        count = min(left - left // 2, left - later) if later else left
        left -= count
        turns.append(len(nodes))
        message = [{"role": "assistant", "content": ""}]
        nodes.append(
            Node(len(nodes), above, "sampled", message, tokens(count), [0.0] * count, [0] * count, None, "stop")
        )
        nodes[-1].reward = 0.25 * number if number % 2 else None
    return Episode(episode_id, group_id, prompt, nodes)


def require_room(config: Config) -> None:
    """Raise PlanError if the recorded episodes are longer than the configuration allows."""
    longest_path = max(len(parents) for parents in _SHAPES)
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens + _CONTEXT_TOKENS * longest_path
    if not is_one_turn(config.rollout) and episode_lengths(config).tokens < needed:
        raise PlanError(
            f"episodes.max_tokens: {episode_lengths(config).tokens}, but the recorded episodes of a certificate have up"
            f" to {needed} tokens (max_prompt_tokens + max_new_tokens + {_CONTEXT_TOKENS * longest_path}); at least"
            f" {needed}"
        )
