"""Rank 0's side of a run: prompts, servers, rewards, rollout batches, evaluation.

Owns these parts' lives and how they fit; what each does is its own package's. Exists on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gspo_mega import beats
from gspo_mega.batches.held_out import Evaluation, HeldOut, summarize
from gspo_mega.batches.journalled import batches_of
from gspo_mega.batches.provenance import made_by
from gspo_mega.config.prompt_sources import source_rewards, sources_of
from gspo_mega.config.schema import Config
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.data.prompts import PromptSource, load_prompts
from gspo_mega.data.stream import PromptStream
from gspo_mega.journal.journal import Journal
from gspo_mega.model.spec import ModelSpec
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.reward.scoring_pool import ScoringPool
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.server_pool import ServerPool
from gspo_mega.run_folder import Attempt


class RolloutSide:
    """Everything rank 0 needs to turn committed weights into scored trajectories. A context manager.

    Constructing it reads and checks the data and starts the scoring processes; it waits for no server.
    Raises DataError, RewardError before anything is sampled.
    """

    def __init__(self, config: Config, spec: ModelSpec, attempt: Attempt) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.held_out = HeldOut(config, self.tokenizer)
        self.sources: list[PromptSource] = load_prompts(config.data, self.tokenizer, self.held_out.check_of)
        self.prompts: PromptStream[Prompt] = PromptStream(
            self.sources,
            [source.weight for source in sources_of(config.data)],
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            accept_changed=config.data.accept_changed,
        )
        self.pool = ServerPool(config.rollout, spec, attempt)
        self.scoring = ScoringPool(config.reward, source_rewards(config))
        try:
            self.pool.loop.run(self.scoring.start())
        except BaseException:
            self.pool.close()
            raise
        self.collector = Collector(config, self.pool, self.prompts, self._score, self.decode, spec.eos_token_ids)
        journal = Journal(attempt.run_folder.journal_dir)
        self._made_by = made_by(config)
        self.batches = batches_of(config, journal, self.prompts, self)

    async def _score(self, trajectory: Trajectory) -> None:
        await self.scoring.score(trajectory)
        beats.beat()  # sampled and scored: a long rollout is no stuck one

    def decode(self, token_ids: list[int]) -> str:
        """Text of sampled tokens, for rewards and people; never tokenised again."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def data_report(self) -> list[str]:
        """A line a source: rows, and how many were found too long so far; then what is to be known of the held-out
        prompts.
        """
        return [
            f"data     {source.path}: {len(source)} prompts"
            + (
                f"; {source.num_overlong} of {source.num_examined} examined are longer than data.max_prompt_tokens and"
                " left out"
                if source.num_overlong
                else ""
            )
            for source in self.sources
        ] + self.held_out.report()

    def take(
        self, step: int, weight_version: int, on_wait: Callable[[], None], say: Callable[[str], None]
    ) -> RolloutBatch:
        """The rollout batch of `step`: `source.take(step)` of the loop. What the journal has of it is not sampled
        again.
        """
        return self.batches.take(step, weight_version, on_wait, say)

    def made_by(self, step: int) -> dict[str, str]:
        return self._made_by

    def upcoming(self, step: int, count: int) -> list[Prompt]:
        """The next `count` prompts; the order stays where it is."""
        before = self.prompts.state_dict()
        try:
            return [self.prompts.next() for _ in range(count)]
        finally:
            self.prompts.load_state_dict(before)

    def sample(
        self, step: int, known: Mapping[int, Group], keep: Callable[[Trajectory], None], on_wait: Callable[[], None]
    ) -> RolloutBatch:
        """The batch of `step` from the servers, the groups `known` apart.

        What `on_wait` raises ends the batch; its prompts are then the next ones again, so that a checkpoint skips none.
        """
        before = self.prompts.state_dict()
        self.collector.start(step, known, keep)
        try:
            return self.collector.take(step, on_wait)
        except BaseException:
            # On the collector's own thread, behind its cancellation: nothing draws after this.
            self.pool.loop.run(self._draw_again(before))
            raise

    async def _draw_again(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state)

    def evaluate(self, on_wait: Callable[[], None]) -> Evaluation:
        """Sample every held-out prompt from the committed weights and score the responses. Raises RewardError as
        `summarize`.
        """
        evaluation = self.config.eval
        assert evaluation is not None, "evaluate() without an eval section"
        groups = self.collector.sample(
            self.held_out.prompts, evaluation.samples_per_prompt, evaluation.temperature, on_wait=on_wait
        )
        return summarize(groups, evaluation.correct_threshold, self.held_out.num_left_out)

    def __enter__(self) -> RolloutSide:
        return self

    def __exit__(self, *_: Any) -> None:
        self.collector.close()
        self.pool.loop.run(self.scoring.close())
        self.pool.close()
