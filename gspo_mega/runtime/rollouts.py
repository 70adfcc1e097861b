"""Rank 0's side of a run: prompts, servers, rewards, rollout batches, evaluation.

Owns these parts' lives and how they fit; what each does is its own package's. Exists on rank 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_mega import beats
from gspo_mega.config.schema import Config
from gspo_mega.config.sources import sources_of
from gspo_mega.data.prompts import PromptSource, load_prompts
from gspo_mega.data.stream import PromptStream
from gspo_mega.errors import DataError
from gspo_mega.journal.journal import Journal
from gspo_mega.model.spec import ModelSpec
from gspo_mega.records import Group, Prompt, RolloutBatch, Trajectory
from gspo_mega.reward.pool import ScoringPool
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.run_folder import Attempt
from gspo_mega.runtime.journalled import batches_of
from gspo_mega.runtime.provenance import made_by


@dataclass(frozen=True)
class Evaluation:
    """Held-out results, means over prompts of the means over their samples.

    `accuracy`: samples with full reward (the sum of the positive weights); `standard_error`: of the accuracy, from
    the spread between prompts.
    """

    accuracy: float
    standard_error: float
    reward_mean: float
    num_prompts: int
    num_samples: int
    truncated_fraction: float
    response_tokens_mean: float
    num_reward_failures: int


class RolloutSide:
    """Everything rank 0 needs to turn committed weights into scored trajectories. A context manager.

    Constructing it reads and checks the data and starts the scoring processes; it waits for no server.
    Raises DataError, RewardError before anything is sampled.
    """

    def __init__(self, config: Config, spec: ModelSpec, attempt: Attempt) -> None:
        from transformers import AutoTokenizer

        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=False)
        self.sources: list[PromptSource] = load_prompts(config.data, self.tokenizer)
        self.prompts: PromptStream[Prompt] = PromptStream(
            self.sources,
            [source.weight for source in sources_of(config.data)],
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            accept_changed=config.data.accept_changed,
        )
        self.held_out = self._load_held_out()
        self.pool = ServerPool(config, spec, attempt)
        source_rewards = {s.name: s.reward for s in sources_of(config.data) if s.reward is not None}
        self.scoring = ScoringPool(config.reward, source_rewards)
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

    def _load_held_out(self) -> list[Prompt]:
        evaluation = self.config.eval
        if evaluation is None:
            return []
        data = self.config.data.model_copy(update={"path": evaluation.path, "sources": ()})
        (source,) = load_prompts(data, self.tokenizer)
        prompts = list(source.items(evaluation.num_prompts))
        if evaluation.num_prompts is not None and len(prompts) < evaluation.num_prompts:
            raise DataError(
                f"{evaluation.path}: eval.num_prompts asks for {evaluation.num_prompts} prompts; {len(prompts)} are there "
                f"({source.num_overlong} left out as longer than data.max_prompt_tokens)"
            )
        return prompts

    def data_report(self) -> list[str]:
        """A line a source: rows, and how many were found too long so far."""
        return [
            f"data     {source.path}: {len(source)} prompts"
            + (f"; {source.num_overlong} of {source.num_examined} examined are longer than data.max_prompt_tokens and left out" if source.num_overlong else "")
            for source in self.sources
        ]

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None], say: Callable[[str], None]) -> RolloutBatch:
        """The rollout batch of `step`: `source.take(step)` of the loop. What the journal has of it is not sampled again."""
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
        """Sample every held-out prompt from the committed weights and score the responses."""
        evaluation = self.config.eval
        assert evaluation is not None, "evaluate() without an eval section"
        groups = self.collector.sample(
            self.held_out, evaluation.samples_per_prompt, evaluation.temperature, on_wait=on_wait
        )
        full = sum(f.weight for f in self.config.reward.functions if f.weight > 0)
        return summarize(groups, full)

    def __enter__(self) -> RolloutSide:
        return self

    def __exit__(self, *_: Any) -> None:
        self.collector.close()
        self.pool.loop.run(self.scoring.close())
        self.pool.close()


def summarize(groups: list[Group], full_reward: float) -> Evaluation:
    """The results of sampled and scored groups; `full_reward` is what a correct response gets."""
    correct = [[float(r >= full_reward - 1e-9) for r in g.rewards] for g in groups]
    means = [sum(c) / len(c) for c in correct]
    trajectories = [t for g in groups for t in g.trajectories]
    mean = sum(means) / len(means)
    spread = sum((m - mean) ** 2 for m in means) / max(len(means) - 1, 1)
    return Evaluation(
        accuracy=mean,
        standard_error=math.sqrt(spread / len(means)),
        reward_mean=sum(sum(g.rewards) / len(g.rewards) for g in groups) / len(groups),
        num_prompts=len(groups),
        num_samples=len(trajectories),
        truncated_fraction=sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        response_tokens_mean=sum(t.num_response_tokens for t in trajectories) / len(trajectories),
        num_reward_failures=sum(t.reward_error is not None for t in trajectories),
    )
