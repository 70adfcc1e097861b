"""One episode's turns: messages come in, the assistant's message goes out, and the tokens between are recorded.

Owns the order locate -> suffix -> sample -> parse -> record, the limits, the server that an episode prefers, and the
replay of turns that were recorded before an agent began again. The tree is `recorder.py`'s, texts and tokens are
`conversation.py`'s; HTTP and processes are others'.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from gspo_mega.agents.conversation import Conversation
from gspo_mega.agents.protocol import ContextFull, TooManyTurns
from gspo_mega.agents.recorder import Recorder
from gspo_mega.agents.turn import Limits, OnTokens, Params, TurnSampler
from gspo_mega.base import kill_points
from gspo_mega.base.episode_records import Node
from gspo_mega.base.errors import DataError, EpisodeError
from gspo_mega.base.records import Prompt
from gspo_mega.data.plain_json import copied
from gspo_mega.data.template_suffix import Rewritten
from gspo_mega.rewards.returned_values import BadResult, number_of


class NotReplayable(EpisodeError):
    """An agent that began again asks for other turns than it asked for at first."""


@dataclass(frozen=True)
class Answer:
    """One turn as an agent sees it.

    `number` counts the turns of the episode from 0. `message`: the assistant's, in OpenAI form. `num_context_tokens`:
    of all that the turn was sampled behind. `is_replayed`: it was sampled earlier and comes from the record.
    """

    number: int
    message: dict[str, Any]
    finish_reason: str
    num_context_tokens: int
    token_ids: Sequence[int] = field(default_factory=list)
    log_probs: Sequence[float] = field(default_factory=list)
    is_replayed: bool = False

    def copy(self, *, is_replayed: bool = False) -> Answer:
        """With a message of its own, which the agent may change."""
        return replace(self, message=copied(self.message), is_replayed=is_replayed)


@dataclass(eq=False)
class _Asked:
    """A turn that was asked for. `request`: what for, while it is the last one; `key` is its digest. `answer`, or the
    `error` that it was refused with; neither, if it was given up: then it is sampled when it is asked for again.
    `node`: of its answer. `is_taken`: since the agent began (again).
    """

    number: int
    request: Any
    _key: bytes = b""
    answer: Answer | None = None
    error: EpisodeError | DataError | None = None
    node: int = -1
    is_taken: bool = True

    def key(self) -> bytes:
        """Made when it is asked for first: an episode of one turn compares it with none."""
        if not self._key:
            self._key, self.request = _key_of(self.request), None
        return self._key

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or self.error is not None


class Session(Generic[Params]):
    """One episode, on the pool's loop. Turns of a session may be asked for at the same time.

    Attributes:
        episode_id: of the record that it makes.
        params: how its turns are sampled.
        num_restarts: how often the agent has begun again.
        counts: what the record's tree does not say, by metric name: here num_replayed_turns and num_broken_calls; what
            acts adds its own.
        limit: the kind of the last refusal by a limit, empty where there was none.
    """

    def __init__(
        self,
        conversation: Conversation,
        episode_id: str,
        prompt: Prompt,
        sampler: TurnSampler[Params],
        params: Params,
        limits: Limits,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`tools`: the schemas that the chat template is given with a turn that names none."""
        self.episode_id = episode_id
        self.num_restarts = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.limit = ""
        self._conversation, self._prompt = conversation, prompt
        self._sampler, self._limits = sampler, limits
        self.params = params
        self._tools = list(tools)
        self._recorder = Recorder()
        self._asked: list[_Asked] = []
        self._num_open = 0
        self._overlaps = False
        self._locating = asyncio.Lock()  # turns find their places in the order in which they are asked for

    @property
    def nodes(self) -> list[Node]:
        """The tree so far, as `Episode.nodes` has it."""
        return self._recorder.nodes

    @property
    def num_turns(self) -> int:
        """How many turns were asked for so far, refused ones included; the next one has this number."""
        return len(self._asked)

    async def turn(self, messages: list[dict[str, Any]], *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """The assistant's message behind `messages`, the whole history in OpenAI form. Raises as `answer`."""
        return (await self.answer(messages, max_new_tokens=max_new_tokens)).message

    async def answer(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        on_tokens: OnTokens | None = None,
        on_begin: Callable[[str], None] | None = None,
    ) -> Answer:
        """A turn with what the endpoint needs. `tools`: schemas of the agent's own, in place of the session's.
        `on_begin` is given the template's text that the turn is sampled behind, before any token.

        Raises ContextFull, TooManyTurns; NotReplayable; DataError: the template refuses the messages, or
        `max_new_tokens` is below 1. RolloutError ends the run, not the episode.
        """
        tools = self._tools if tools is None else tools
        messages = copied(messages)  # the agent may go on writing in its own
        request = _Asked(len(self._asked), (messages, tools, max_new_tokens))
        asked = self._asked_before(request)
        if asked is not None and asked.has_ended:
            return self._replay(asked, on_tokens, on_begin)
        if asked is None:
            if len(self._asked) >= self._limits.max_turns:
                self.limit = TooManyTurns.kind
                raise TooManyTurns(f"the episode has had its {self._limits.max_turns} turns (episodes.max_turns)")
            if self._asked:
                self._asked[-1].key()
            asked = request
            self._asked.append(asked)
        asked.is_taken = True
        self._overlaps |= self._num_open > 0
        self._num_open += 1
        try:
            asked.answer = await self._new(asked, messages, tools, max_new_tokens, on_tokens, on_begin)
        except (EpisodeError, DataError) as error:
            asked.error = error
            raise
        finally:
            self._num_open -= 1
        return asked.answer.copy()

    async def _new(
        self,
        asked: _Asked,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        max_new_tokens: int | None,
        on_tokens: OnTokens | None,
        on_begin: Callable[[str], None] | None,
    ) -> Answer:
        number = asked.number
        if max_new_tokens is not None and max_new_tokens < 1:
            raise DataError(f"max_new_tokens is {max_new_tokens}; at least 1 was expected")
        async with self._locating:
            context, cause = await self._context(messages, tools)
        token_ids = self._recorder.tokens(context)
        room = self._limits.max_tokens - len(token_ids)
        if room < 1:
            self.limit = ContextFull.kind
            raise ContextFull(
                f"turn {number} has a context of {len(token_ids)} tokens, and an episode at most"
                f" {self._limits.max_tokens} (episodes.max_tokens)"
            )
        if on_begin is not None:
            on_begin(self._recorder.text(context))
        params = self.params.at_most(room if max_new_tokens is None else min(room, max_new_tokens))
        name = self.episode_id if number == 0 else f"{self.episode_id}-t{number:03d}"
        turn = await self._sampler.sample(
            self._prompt.prompt_id, token_ids, params, name, self._server_before(context), on_tokens
        )
        text = self._conversation.text_of(turn)
        parts = await self._conversation.message_of(text, number, messages, self._recorder.text(context), tools)
        self.counts["num_broken_calls"] += parts.num_broken_calls
        asked.node = self._recorder.add_sampled(context, parts.message, turn, text, cause)
        kill_points.reached("rollout.turn")
        return Answer(number, parts.message, turn.finish_reason, len(token_ids), turn.token_ids, turn.log_probs)

    async def _context(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[int, str]:
        """The context node of a history, found or made, and why a branch begins behind it."""
        place = self._recorder.locate(messages, tools)
        if place.node >= 0 and not place.new and not self.nodes[place.node].is_sampled:
            return place.node, place.cause
        rendered = None
        if place.node >= 0:
            rendered = await self._conversation.after(self._recorder.history(place.node), place.new, tools)
            if isinstance(rendered, Rewritten):
                place, rendered = place.rewritten(), None
        if rendered is None:
            rendered = await self._conversation.first(self._prompt, place.new, tools)
        context = self._recorder.add_context(place, rendered, tools)
        return context, ""

    def _server_before(self, context: int) -> str | None:
        """Who sampled the turn before a context, and so holds its beginning."""
        parent = self.nodes[context].parent
        return self.nodes[parent].server_id or None if parent >= 0 else None

    def _asked_before(self, request: _Asked) -> _Asked | None:
        """The turn that an agent asks for again, after it began again."""
        left = [asked for asked in self._asked if not asked.is_taken]
        for asked in left:
            if asked.key() == request.key():
                return asked
        if not self._overlaps:
            self.check_replayed()
        return None

    def _replay(self, asked: _Asked, on_tokens: OnTokens | None, on_begin: Callable[[str], None] | None) -> Answer:
        asked.is_taken = True
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        self.counts["num_replayed_turns"] += 1
        if on_begin is not None:
            on_begin(self._recorder.text(self.nodes[asked.node].parent))
        if on_tokens is not None:
            on_tokens(0, asked.answer.token_ids)
        return asked.answer.copy(is_replayed=True)

    def set_reward(self, turn: int, value: float) -> None:
        """The reward of turn number `turn`; -1 is the last one. Raises IndexError: there was no such turn; ValueError,
        TypeError: the value is no finite number.
        """
        try:
            value = number_of(value, f"the reward of turn {turn}")
        except BadResult as error:
            if error.kind == "wrong_type":
                raise TypeError(str(error)) from None
            raise ValueError(f"{error}; a finite number was expected") from None
        taken = [asked for asked in self._asked if asked.is_taken]
        if turn == -1:
            answered = [asked for asked in taken if asked.node >= 0]
            if not answered:
                raise IndexError("there was no turn yet")
            self.nodes[answered[-1].node].reward = value
        elif not 0 <= turn < len(self._asked) or self._asked[turn].node < 0:
            raise IndexError(f"there was no turn {turn}; the episode has had {self.num_turns}")
        else:
            self.nodes[self._asked[turn].node].reward = value

    def place_of(self, turn: int) -> int:
        """Where turn number `turn` is among the turns of the record, which are in the order in which they ended; -1 of
        one that it does not have.
        """
        node = self._asked[turn].node if 0 <= turn < len(self._asked) else -1
        return sum(one.is_sampled for one in self.nodes[:node]) if node >= 0 else -1

    def restart(self) -> None:
        """The agent begins again, in another worker: what it asked for is answered from the record, and refused as it
        was, until it asks for more than was recorded. Not while a turn is open.
        """
        if self._num_open:
            raise RuntimeError(f"episode {self.episode_id} began again with {self._num_open} turns open")
        self.num_restarts += 1
        for asked in self._asked:
            asked.is_taken = False
        for node in self.nodes:
            node.reward = None

    def check_replayed(self) -> None:
        """Raise NotReplayable where an agent that began again has left out a turn of its record."""
        for asked in self._asked:
            if asked.has_ended and not asked.is_taken:
                raise NotReplayable(
                    f"the episode began again and did not ask for its turn {asked.number} as it had done before another"
                    " episode ended their process: the same messages, given the same answers, were expected. Draw"
                    " random numbers from random.Random(task.seed), and tell no time"
                )


def _key_of(request: Any) -> bytes:
    """A digest: the histories themselves, one in each turn, would grow with the square of the turns."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=repr).encode("utf-8", "replace")).digest()
