"""The responses of an evaluation as a file: one JSON object per response, all that a person compares."""

from __future__ import annotations

import json
from typing import TextIO

from gspo_mega.base.rollout_batch import Group
from gspo_mega.config.prompt_sources import HeldOutSet
from gspo_mega.train.held_out import is_correct


def write_responses(file: TextIO, asked: HeldOutSet, groups: list[Group]) -> None:
    """Append every response of a set, scored or not; of episodes with several turns the last turn's text."""
    for group in groups:
        for sample, episode in enumerate(group.episodes):
            row = {
                "set": asked.name,
                "row": int(episode.prompt.prompt_id.rpartition(":")[2]) + 1,
                "sample": sample,
                "episode_id": episode.episode_id,
                "prompt": episode.prompt.text,
                "answer": episode.prompt.answer,
                "response": episode.response_text,
                "reward": episode.reward,
                "correct": is_correct(episode, asked.correct_threshold, asked.place) if episode.is_scored else None,
                "reward_parts": episode.reward_parts,
                "failure": episode.failure or episode.reward_error,
                "num_tokens": episode.num_sampled_tokens,
                "num_turns": episode.num_turns,
                "is_truncated": episode.is_truncated,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
