"""One episode's turns: messages come in, the assistant's message goes out, and the tokens between are recorded.

Owns the order locate -> suffix -> sample -> parse -> record, the limits, the server that an episode prefers, and the
replay of turns that were recorded before an agent began again. The tree is `recorder.py`'s, texts and tokens are
`session.py`'s; HTTP and processes are others'.

How one run's messages become tokens, and sampled tokens a message.

Owns the threads that render templates: a template is a program of the checkpoint's, which may be slow, and the event
loop serves all episodes. What is rendered is `data.template_suffix`'s, what a text says `messages.py`'s.

What the record of an episode adds to the counts of its batch, by metric name.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from gspo_mega.agents.messages import MessageParts, ToolFormat, format_of, parts_of
from gspo_mega.agents.protocol import ContextFull, Limits, OnTokens, Params, TooManyTurns, Turn, TurnSampler
from gspo_mega.agents.recorder import Recorder
from gspo_mega.base import failpoints
from gspo_mega.base.episodes import Episode, Node
from gspo_mega.base.errors import DataError, EpisodeError
from gspo_mega.base.records import Prompt
from gspo_mega.data.rows import copied
from gspo_mega.data.templates import HistoryMessage, Rendered, Rewritten, SuffixRule
from gspo_mega.rewards.functions import BadResult, number_of

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]]
_T = TypeVar("_T")

# The template's process renders one text at a time; a second thread encodes meanwhile.
_NUM_THREADS = 2
# The first contexts of the groups that are sampled at a time are remembered: each serves a whole group.
_MOST_FIRST = 1024
# Lists of tools whose rules are remembered.
_MOST_TOOLS = 256


class Conversation:
    """What turns messages into tokens and back. On the pool's loop; `close` ends its threads."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        rule: SuffixRule | None = None,
        *,
        tool_format: str = "none",
        template: str = "",
    ) -> None:
        """`decode` makes the text of sampled tokens. `rule`: None where an episode is one turn behind its prompt's own
        tokens. `tool_format`: of the configuration; `template`: the chat template, which `auto` reads.
        """
        self.rule = rule
        self._decode = decode
        self._tool_format, self._template = tool_format, template
        self._by_tools: dict[str, tuple[SuffixRule, ToolFormat]] = {}
        self._first: collections.OrderedDict[str, asyncio.Future[Rendered]] = collections.OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chat-template") if rule else None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def first(self, prompt: Prompt, messages: Sequence[Message], tools: Tools) -> Rendered:
        """All of `messages` as the context of a root. Raises DataError: the template refuses them."""
        if self.rule is None:
            return Rendered(list(prompt.token_ids), prompt.text)
        rule = self._for(tools)[0]
        if tuple(messages) != prompt.messages:
            return await self._in_thread(lambda: rule.first(messages))
        key = json.dumps([prompt.prompt_id, list(tools)], sort_keys=True, default=repr)
        made = self._first.get(key)
        if made is None:
            # A task of its own: whoever asked first may be cancelled, and the others wait for it, too.
            made = self._first[key] = asyncio.ensure_future(self._in_thread(lambda: rule.first(messages)))
            made.add_done_callback(_look_at)
            while len(self._first) > _MOST_FIRST:
                self._first.popitem(last=False)
        self._first.move_to_end(key)
        return await asyncio.shield(made)

    async def after(
        self, history: Sequence[HistoryMessage], new: Sequence[Message], tools: Tools
    ) -> Rendered | Rewritten:
        """What `new` adds behind `history`. Raises DataError: the template refuses the messages."""
        rule = self._for(tools)[0]
        return await self._in_thread(lambda: rule.after(history, new))

    def text_of(self, turn: Turn) -> str:
        """The text of a turn. Its end token is sampled and trained on, and is no part of the text."""
        return self._decode(list(turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids))

    async def message_of(
        self, text: str, number: int, before: Sequence[Message], gap: str, tools: Tools
    ) -> MessageParts:
        """The message that the agent is given for the text of turn `number`, sampled behind `before`, whose last text
        is `gap`.
        """
        if self.rule is None:
            return MessageParts({"role": "assistant", "content": text}, 0)
        rule, tool_format = self._for(tools)
        parts = parts_of(text, tool_format, turn=number, tools=tools, gap=gap)
        if parts.message.keys() == {"role", "content"}:
            return parts
        given = await self._in_thread(lambda: rule.given(before, parts.message, text))
        return MessageParts(given, parts.num_broken_calls)

    def check_tools(self, tools: Tools) -> None:
        """Raise DataError where the configured format can't call these tools."""
        if self.rule is not None:
            self._for(tools)

    def _for(self, tools: Tools) -> tuple[SuffixRule, ToolFormat]:
        assert self.rule is not None
        key = json.dumps(list(tools), sort_keys=True, default=repr)
        if key not in self._by_tools:
            if len(self._by_tools) >= _MOST_TOOLS:
                self._by_tools.clear()  # an agent that names others in every request
            tool_format = format_of(self._tool_format, self._template, tools)
            self._by_tools[key] = (self.rule.with_tools(tools), tool_format)
        return self._by_tools[key]

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _look_at(made: asyncio.Future[Any]) -> None:
    """A refusal that nobody waited for any more is no error of the loop."""
    if not made.cancelled():
        made.exception()


# Every name of a count that is shown although it is 0; those by cause and by kind are shown where they are not.
EPISODE_COUNTS = (
    "num_turns",
    "num_branches",
    "num_tool_calls",
    "num_tool_errors",
    "num_broken_calls",
    "num_replayed_turns",
    "num_workers_recycled",
    "num_processes_ended",
    "num_episode_failures",
    "num_episodes_redrawn",
    "num_response_faults",
)


def counts_of(episode: Episode) -> collections.Counter[str]:
    """The counts that follow from the record, whether the episode ended now or earlier."""
    counts = collections.Counter(f"num_branches_{cause}" for cause in episode.branch_causes)
    counts.update(episode.counts)
    counts["num_turns"] = episode.num_turns
    counts["num_branches"] = episode.num_branches
    counts["num_tool_calls"] = len(episode.tool_calls)
    counts["num_tool_errors"] = sum(call.error is not None for call in episode.tool_calls)
    if episode.failure is not None:
        counts["num_episode_failures"] += 1
        counts[f"num_episode_failures_{episode.failure.partition(':')[0]}"] += 1
    return counts


class NotReplayable(EpisodeError):
    """An agent that began again asks for other turns than it asked for at first."""


@dataclass(frozen=True)
class AgentTurn:
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

    def copy(self, *, is_replayed: bool = False) -> AgentTurn:
        """With a message of its own, which the agent may change."""
        return replace(self, message=copied(self.message), is_replayed=is_replayed)


@dataclass(eq=False)
class _TurnRequest:
    """A turn that was asked for. `request`: what for, while it is the last one; `key` is its digest. `answer`, or the
    `error` that it was refused with; neither, if it was given up: then it is sampled when it is asked for again.
    `node`: of its answer. `is_taken`: since the agent began (again).
    """

    number: int
    request: Any
    _key: bytes = b""
    answer: AgentTurn | None = None
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


class EpisodeSession(Generic[Params]):
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
        self._asked: list[_TurnRequest] = []
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
    ) -> AgentTurn:
        """A turn with what the endpoint needs. `tools`: schemas of the agent's own, in place of the session's.
        `on_begin` is given the template's text that the turn is sampled behind, before any token.

        Raises ContextFull, TooManyTurns; NotReplayable; DataError: the template refuses the messages, or
        `max_new_tokens` is below 1. RolloutError ends the run, not the episode.
        """
        tools = self._tools if tools is None else tools
        messages = copied(messages)  # the agent may go on writing in its own
        request = _TurnRequest(len(self._asked), (messages, tools, max_new_tokens))
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
        asked: _TurnRequest,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        max_new_tokens: int | None,
        on_tokens: OnTokens | None,
        on_begin: Callable[[str], None] | None,
    ) -> AgentTurn:
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
        failpoints.reached("rollout.turn")
        return AgentTurn(number, parts.message, turn.finish_reason, len(token_ids), turn.token_ids, turn.log_probs)

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

    def _asked_before(self, request: _TurnRequest) -> _TurnRequest | None:
        """The turn that an agent asks for again, after it began again."""
        left = [asked for asked in self._asked if not asked.is_taken]
        for asked in left:
            if asked.key() == request.key():
                return asked
        if not self._overlaps:
            self.check_replayed()
        return None

    def _replay(
        self, asked: _TurnRequest, on_tokens: OnTokens | None, on_begin: Callable[[str], None] | None
    ) -> AgentTurn:
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
