"""Everything that turns committed weights into scored trajectories: prompts, servers, rewards, held-out evaluation.
Rank 0 only.

`Rollouts` starts these parts, connects them and closes them; each part is in its own package. `episode_driver` chooses
what runs the episodes of a configuration: its function, workers, chat template and limits.

At the end are the protocols of the sources of rollout batches, which `sources.py` implements. The loop calls
`JournalledSource.take`, which asks the source that it wraps for the groups that are not in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gspo_mega.agents.driver import EpisodeDriver, EpisodeRunner, OneTurn
from gspo_mega.agents.external_agent import ForeignAgents
from gspo_mega.agents.messages import FORMATS
from gspo_mega.agents.pool import EpisodePool
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.base import progress
from gspo_mega.base.episodes import Episode, Group, RolloutBatch
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.derived import episode_lengths, has_served_teacher, is_one_turn, teachers
from gspo_mega.config.precision import publishes_adapters
from gspo_mega.config.prompt_sources import HeldOutSet, eval_sets, names_prompts, source_rewards, sources_of
from gspo_mega.config.schema import Config
from gspo_mega.data.chat import check_vocabulary, load_tokenizer
from gspo_mega.data.chosen_rows import ChosenRows, load_source
from gspo_mega.data.prompts import PromptSource, encoder_of, load_prompts
from gspo_mega.data.stream import PromptStream
from gspo_mega.data.templates import SuffixRule, run_end_tokens
from gspo_mega.models.end_tokens import planned_end_tokens
from gspo_mega.models.low_rank import SERVED_NAME
from gspo_mega.models.spec import ModelSpec
from gspo_mega.rewards.pool import ScoringPool
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.sampler import SamplingServers
from gspo_mega.rollout.server.reward_server import RewardServers
from gspo_mega.rollout.teacher_server import TeacherServers
from gspo_mega.train.held_out import Evaluation, HeldOut, summarize


class Rollouts:
    """The parts that sample and score; a context manager.

    The constructor reads and checks the data and starts the processes of rewards and episodes. It does not wait for
    servers. Raises DataError, RewardError, EpisodeError before anything is sampled.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, attempt: Attempt, needs_answers: bool = True, *, teaches: bool = False
    ) -> None:
        """`needs_answers`: false if the training data are demonstrations, which nothing scores. `teaches`: what is
        sampled is trained on, so that teachers' servers score it.
        """
        self.tokenizer = load_tokenizer(config.model.path)
        check_vocabulary(self.tokenizer, spec)
        encoder = encoder_of(config.data, self.tokenizer)
        self._planned_ends = planned_end_tokens(Path(config.model.path), spec.eos_token_ids, spec.vocab_size)
        self.end_tokens = run_end_tokens(
            encoder, self.tokenizer, spec.eos_token_ids, spec.vocab_size, calls=not is_one_turn(config.rollout)
        )
        self.held_out = HeldOut(eval_sets(config.eval, config.data), config.reward, config.data, self.tokenizer)
        self._sources: list[PromptSource] = []
        weights = [1.0] * len(self.held_out.sets)
        if names_prompts(config.data):
            self._sources = load_prompts(
                config.data,
                self.tokenizer,
                lambda source: self.held_out.check_of(source, needs_answers),
                needs_answers,
                teachers(config.teacher) if teaches else (),
            )
            weights = [source.weight for source in sources_of(config.data)]
        self.prompts: PromptStream[Prompt]
        if self._sources and config.data.source is not None and needs_answers:
            self.prompts = ChosenRows(
                self._sources,
                load_source(config.data.source),
                seed=config.run.seed,
                accept_changed=config.data.accept_changed,
            )
        else:
            self.prompts = PromptStream(
                self._sources
                or [one.source for one in self.held_out.sets],  # an evaluation without training draws no prompts
                weights,
                seed=config.run.seed,
                shuffle=config.data.shuffle,
                accept_changed=config.data.accept_changed,
            )
        self.pool = ServerPool(config.rollout, spec, attempt, SERVED_NAME if publishes_adapters(config) else None)
        self._scoring = ScoringPool(
            config.reward,
            source_rewards(config.eval, config.data),
            lambda name: RewardServers(attempt, name, config.rollout.no_server_deadline_seconds),
        )
        self._driver = episode_driver(config, self.tokenizer, self.end_tokens.ids, self._decode)
        self.teachers: TeacherServers | None = None
        if teaches and has_served_teacher(config.teacher):
            self.teachers = TeacherServers(
                config.teacher, config.rollout, self.tokenizer, spec.vocab_size, encoder=encoder, pool=self.pool
            )
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
            teach=None if self.teachers is None else self._teach,
        )

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools that the policy may call, as the chat template gets them."""
        return self._driver.runner.tool_schemas

    async def _start(self) -> None:
        await self._scoring.start()
        await self._driver.start()
        if self.teachers is not None:
            await self.teachers.start()

    async def _end(self) -> None:
        if self.teachers is not None:
            await self.teachers.close()
        await self._driver.close()
        await self._scoring.close()

    async def _score(self, episode: Episode) -> None:
        await self._scoring.score(episode)
        progress.beat()  # an episode was scored, so a long rollout does not count as stuck

    async def _teach(self, episode: Episode) -> None:
        assert self.teachers is not None
        await self.teachers.score(episode)
        progress.beat()

    def _decode(self, token_ids: list[int]) -> str:
        """The text of sampled tokens, for rewards and people. It is never tokenised again."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def describe(self) -> list[str]:
        """Lines for the user: about the end tokens if their sources differ, one per prompt source with the rows found
        too long so far, and about the held-out prompts.
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
        """Lines about the tokens that end a response, for what the plan could not tell."""
        return [f"notice   {text}" for text in self.end_tokens.notices if text not in self._planned_ends.notices]

    def evaluate(
        self,
        on_wait: Callable[[], None],
        names: Collection[str] | None = None,
        keep: Callable[[HeldOutSet, list[Group]], None] = lambda settings, groups: None,
        servers: SamplingServers | None = None,
    ) -> dict[str, Evaluation]:
        """Sample every prompt of the named held-out sets (all by default) with the committed weights, set by set, and
        score the responses.

        Returns the results by the set's name. Calls `on_wait` while it waits, and `keep` with the responses of each
        set. `servers`: as for `Collector.sample`. Raises RewardError as `summarize`.
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


def episode_driver(
    config: Config, tokenizer: Any, end_token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> EpisodeDriver:
    """The driver of a run's episodes, not yet started. `end_token_ids`: the tokens of the run that end a turn. Raises
    DataError if the chat template does not allow episodes of several turns.
    """
    lengths = episode_lengths(config)
    limits = Limits(lengths.turns, lengths.tokens)
    if is_one_turn(config.rollout):
        return EpisodeDriver(Conversation(decode), limits, OneTurn(), config.run.seed)
    template = str(tokenizer.get_chat_template())
    rule = SuffixRule(encoder_of(config.data, tokenizer), end_token_ids)
    conversation = Conversation(decode, rule, tool_format=config.episodes.tool_format, template=template)
    runner: EpisodeRunner
    if config.rollout.episode.function == "foreign":
        openers = sorted({opener for one in FORMATS.values() for opener in one.format.openers})
        runner = ForeignAgents(config.episodes, config.rollout, decode, openers, end_token_ids)
    else:
        runner = EpisodePool(config.episodes, config.rollout.episode, config.rollout.tools)
    return EpisodeDriver(conversation, limits, runner, config.run.seed)


class BatchSource(Protocol):
    """A source of rollout batches by step, with its position in the prompts. Rank 0 only."""

    def take(self, step: int, weight_version: int, on_wait: Callable[[], None]) -> RolloutBatch:
        """Returns the complete, scored batch of `step`, for a policy of `weight_version`.

        Calls `on_wait` repeatedly while it waits. If `on_wait` raises, the batch ends, and its prompts come next again.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts after the last batch that was taken, as JSON types.

        If groups of later batches may have been sampled already, it is the position of the first such group. Its key
        `tickets` then has that group's number, `first`, and `done`, the later numbers that are consumed or dropped.
        Without this key, the groups of each batch are numbered from 0.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position that `state_dict` returned. Raises DataError if the prompts have changed."""
        ...

    def describe(self) -> list[str]:
        """Lines for the user about the data."""
        ...


class ContinuableSource(BatchSource, Protocol):
    """A source that can complete a batch of which some groups exist already."""

    def on_ready(self, call: Callable[[int, list[Group]], None]) -> None:
        """Set a function that is called, from any thread, with a step and its groups if these are complete before the
        step is taken. The batch may still consist of other groups; then `call` is called again, or not at all if that
        was not known in time.
        """
        ...

    def take(
        self,
        step: int,
        weight_version: int,
        on_wait: Callable[[], None],
        known: Mapping[int, Group] = ...,
        keep: Callable[[Episode], None] = ...,
        admit: Callable[[int, Prompt, int], None] = ...,
    ) -> RolloutBatch:
        """As `BatchSource.take`.

        `known`: groups that exist already, by their number, in the order in which they completed; they may lack
        episodes. `keep` is called for every other episode when it completes. `admit` is called with the number, prompt
        and weight version when the sampling of a group begins. A source that samples ahead calls both from its own
        thread, also between two batches, and what they raise ends the sampling.
        """
        ...

    def made_by(self, step: int) -> dict[str, str]:
        """Fingerprints, by kind, of everything that determines the groups of `step` except the weights."""
        ...

    def due(self, step: int, numbers: Iterable[int]) -> dict[int, Prompt]:
        """The prompts, by group number, that `step` would sample for these groups. Groups that are not due are left
        out. The position in the prompts does not change.
        """
        ...


def keep_nothing(episode: Episode) -> None:
    """A `keep` that does nothing, for callers that need no episode before its batch is complete."""


def admit_nothing(number: int, prompt: Prompt, weight_version: int) -> None:
    """An `admit` that does nothing, for callers that need not know when the sampling of a group begins."""


def open_numbers(position: Mapping[str, Any], numbers: Iterable[int]) -> set[int]:
    """The group numbers among `numbers` that later steps may still consume. `position`: of `BatchSource.state_dict`."""
    tickets = position.get("tickets", {"first": 0, "done": []})
    done = set(tickets["done"])
    return {number for number in numbers if number >= tickets["first"] and number not in done}
