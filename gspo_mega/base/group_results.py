"""What a function of the user sees of a group of responses: its prompt, and what became of each response.

`rollout.group_filter` and `data.source` get these objects (docs/hooks.md). They are a copy without tokens, so that a
function cannot change what is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_mega.base.episodes import Group


@dataclass(frozen=True)
class ResponseResult:
    """A response, or an episode of several turns, that has a reward.

    `parts`: the value of each reward function by its name. `correct`: None if no function says so. `num_tokens`:
    sampled tokens. `is_truncated`: whether a limit cut it off.
    """

    reward: float
    parts: dict[str, float]
    correct: bool | None
    num_tokens: int
    is_truncated: bool


@dataclass(frozen=True)
class GroupResult:
    """The responses to one prompt, in the order of their places; those whose scoring failed are left out.

    `prompt_id`: `<source>:<zero-based row>`. `metadata`: the row's other keys.
    """

    prompt_id: str
    source: str
    prompt: str
    answer: Any
    metadata: dict[str, Any]
    responses: tuple[ResponseResult, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(response.reward for response in self.responses)

    @property
    def mean_reward(self) -> float:
        """The mean reward; 0 without responses."""
        return sum(self.rewards) / max(len(self.responses), 1)


def group_result(group: Group) -> GroupResult:
    """Return the result of a group. Its dictionaries are copies."""
    prompt = group.prompt
    responses = tuple(
        ResponseResult(
            float(episode.reward or 0.0),
            dict(episode.reward_parts),
            episode.correct,
            episode.num_sampled_tokens,
            episode.is_truncated,
        )
        for episode in sorted(group.scored, key=lambda episode: episode.episode_id)
    )
    return GroupResult(prompt.prompt_id, prompt.source, prompt.text, prompt.answer, dict(prompt.metadata), responses)
