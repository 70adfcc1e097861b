"""What runs the episodes of a configuration: its function, its workers, its chat template, its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gspo_mega.agents.conversation import Conversation
from gspo_mega.agents.driver import EpisodeDriver, EpisodeRunner
from gspo_mega.agents.episode_pool import EpisodePool
from gspo_mega.agents.foreign import ForeignAgents
from gspo_mega.agents.message_parts import FORMATS
from gspo_mega.agents.one_turn import OneTurn
from gspo_mega.agents.turn import Limits
from gspo_mega.config.episode_lengths import episode_lengths, is_one_turn
from gspo_mega.config.schema import Config
from gspo_mega.data.prompts import encoder_of
from gspo_mega.data.template_suffix import SuffixRule


def episode_driver(
    config: Config, tokenizer: Any, end_token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> EpisodeDriver:
    """The driver of a run's episodes, not yet started. `end_token_ids`: the run's, one of which ends a turn. Raises
    DataError: no several turns with this template.
    """
    lengths = episode_lengths(config)
    limits = Limits(lengths.turns, lengths.tokens)
    if is_one_turn(config):
        return EpisodeDriver(Conversation(decode), limits, OneTurn(), config.run.seed)
    template = str(tokenizer.get_chat_template())
    rule = SuffixRule(encoder_of(config.data, tokenizer), end_token_ids)
    conversation = Conversation(decode, rule, tool_format=config.episodes.tool_format, template=template)
    runner: EpisodeRunner
    if config.rollout.episode.function == "foreign":
        openers = sorted({opener for one in FORMATS.values() for opener in one.format.openers})
        runner = ForeignAgents(config, decode, openers, end_token_ids)
    else:
        runner = EpisodePool(config.episodes, config.rollout.episode, config.rollout.tools)
    return EpisodeDriver(conversation, limits, runner, config.run.seed)
