"""Everything that turns committed weights into scored trajectories: prompts, servers, rewards, held-out evaluation.

Owns the lives of these parts and how they fit together; each part is its own package's. Rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from gspo_mega.base import beats
from gspo_mega.base.episode_records import Episode
from gspo_mega.base.records import Prompt
from gspo_mega.base.rollout_batch import Group
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.episode_lengths import is_one_turn
from gspo_mega.config.lora_rules import publishes_adapters
from gspo_mega.config.prompt_sources import HeldOutSet, names_prompts, source_rewards, sources_of
from gspo_mega.config.schema import Config
from gspo_mega.data.chat import check_vocabulary, load_tokenizer
from gspo_mega.data.end_of_turn import run_end_tokens
from gspo_mega.data.prompts import PromptSource, encoder_of, load_prompts
from gspo_mega.data.stream import PromptStream
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.low_rank import SERVED_NAME
from gspo_mega.models.spec import ModelSpec
from gspo_mega.rewards.scoring_pool import ScoringPool
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.sampling import Servers
from gspo_mega.rollout.server.reward_server import RewardServers
from gspo_mega.rollout.server_pool import ServerPool
from gspo_mega.train.episode_parts import episode_driver
from gspo_mega.train.held_out import Evaluation, HeldOut, summarize


class Rollouts:
    """The parts that sample and score. A context manager.

    The constructor reads and checks the data and starts the processes of rewards and episodes; it waits for no
    server. Raises DataError, RewardError, EpisodeError before anything is sampled.
    """

    def __init__(self, config: Config, spec: ModelSpec, attempt: Attempt, needs_answers: bool = True) -> None:
        """`needs_answers`: false where the training data are demonstrations, which nothing scores."""
        self.tokenizer = load_tokenizer(config.model.path)
        check_vocabulary(self.tokenizer, spec)
        encoder = encoder_of(config.data, self.tokenizer)
        self._planned_ends = planned_end_tokens(Path(config.model.path), spec.eos_token_ids, spec.vocab_size)
        self.end_tokens = run_end_tokens(
            encoder, self.tokenizer, spec.eos_token_ids, spec.vocab_size, calls=not is_one_turn(config)
        )
        self.held_out = HeldOut(config, self.tokenizer)
        self._sources: list[PromptSource] = []
        weights = [1.0] * len(self.held_out.sets)
        if names_prompts(config.data):
            self._sources = load_prompts(
                config.data,
                self.tokenizer,
                lambda source: self.held_out.check_of(source, needs_answers),
                needs_answers,
            )
            weights = [source.weight for source in sources_of(config.data)]
        self.prompts: PromptStream[Prompt] = PromptStream(
            self._sources or [one.source for one in self.held_out.sets],  # an evaluation alone draws from none
            weights,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            accept_changed=config.data.accept_changed,
        )
        self.pool = ServerPool(config.rollout, spec, attempt, SERVED_NAME if publishes_adapters(config) else None)
        self._scoring = ScoringPool(
            config.reward,
            source_rewards(config),
            lambda name: RewardServers(attempt, name, config.rollout.no_server_deadline_seconds),
        )
        self._driver = episode_driver(config, self.tokenizer, self.end_tokens.ids, self._decode)
        try:
            self.pool.loop.run(self._start())
        except BaseException:
            self.pool.loop.run(self._end())
            self.pool.close()
            raise
        self.collector = Collector(
            config,
            self.pool,
            self.prompts,
            self._driver,
            self._score,
            self.end_tokens.ids,
            snapshot=self.prompts.state_dict,
        )

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Of the tools that the policy may call, as the chat template is given them."""
        return self._driver.runner.tool_schemas

    async def _start(self) -> None:
        await self._scoring.start()
        await self._driver.start()

    async def _end(self) -> None:
        await self._driver.close()
        await self._scoring.close()

    async def _score(self, episode: Episode) -> None:
        await self._scoring.score(episode)
        beats.beat()  # sampled and scored: a long rollout is no stuck one

    def _decode(self, token_ids: list[int]) -> str:
        """Text of sampled tokens, for rewards and people; never tokenised again."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def describe(self) -> list[str]:
        """Lines for the user: the end tokens where their sources differ; one per prompt source, with the rows found too
        long so far; then the held-out prompts.
        """
        lines = self.describe_ends()
        for source in self._sources:
            left_out = (
                f"; {source.num_overlong} of {source.num_examined} examined are longer than data.max_prompt_tokens and"
                " left out"
                if source.num_overlong
                else ""
            )
            lines.append(f"data     {source.path}: {len(source) - source.num_unreadable} prompts{left_out}")
            if (unreadable := source.unreadable_line()) is not None:
                lines.append(f"notice   {unreadable}")
        return lines + self.held_out.report()

    def describe_ends(self) -> list[str]:
        """A line for each thing to know about the tokens that end a response and that the plan could not tell."""
        return [f"notice   {text}" for text in self.end_tokens.notices if text not in self._planned_ends.notices]

    def evaluate(
        self,
        on_wait: Callable[[], None],
        names: Collection[str] | None = None,
        keep: Callable[[HeldOutSet, list[Group]], None] = lambda settings, groups: None,
        servers: Servers | None = None,
    ) -> dict[str, Evaluation]:
        """Sample every prompt of the named held-out sets (all by default) from the committed weights, set by set, and
        score the responses. The results by the set's name. Calls `on_wait` while it waits, and `keep` with the
        responses of each set. `servers`: as for `Collector.sample`. Raises RewardError as `summarize`.
        """
        found = {}
        for one in self.held_out.sets:
            asked = one.settings
            if names is not None and asked.name not in names:
                continue
            groups = self.collector.sample(
                one.prompts,
                asked.samples_per_prompt,
                asked.temperature,
                name=asked.episodes,
                max_new_tokens=asked.max_new_tokens,
                on_wait=on_wait,
                servers=servers,
            )
            keep(asked, groups)
            found[asked.name] = summarize(groups, asked.correct_threshold, one.num_left_out, asked.votes, asked.place)
        return found

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.close()
        self.pool.loop.run(self._end())
        self.pool.close()
