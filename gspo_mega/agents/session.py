"""One episode's turns: messages come in, the assistant's message goes out, and the tokens between are recorded.

`EpisodeSession` takes each turn through the same steps: locate the history in the tree, render what is new, sample,
parse, record. It enforces the limits, asks for the server that holds the episode's prefix, and answers turns from the
record after an agent began again. The tree itself is in `recorder.py`.

`Conversation` turns messages into tokens and sampled tokens into messages, for all episodes of a run. It renders
templates in threads of its own: a template is a program that comes with the checkpoint and may be slow, and the event
loop serves all episodes.

`counts_of` gives what an episode adds to the counts of its batch, by metric name.
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

from gspo_mega.agents.messages import MessageParts, StopWatch, ToolFormat, before_stop, format_of, parts_of
from gspo_mega.agents.protocol import ContextFull, TooManyTurns
from gspo_mega.agents.recorder import Recorder, TreePosition
from gspo_mega.agents.turn import Limits, OnTokens, Params, Turn, TurnSampler
from gspo_mega.base import failpoints
from gspo_mega.base.episodes import Episode, Node
from gspo_mega.base.errors import DataError, EpisodeError
from gspo_mega.base.records import Prompt
from gspo_mega.data.rows import copied
from gspo_mega.data.templates import HistoryMessage, Rendered, Rewritten, SuffixRule
from gspo_mega.rewards.user_code import BadResult, number_of

Message = dict[str, Any]

Tools = Sequence[dict[str, Any]]

OnBegin = Callable[[str, int], None]

_T = TypeVar("_T")

# The template's process renders one text at a time; the second thread encodes at the same time.
_NUM_THREADS = 2

# How many first contexts are remembered: one serves a whole group, and many groups are sampled at the same time.
_MAX_FIRST_CONTEXTS = 1024

# For how many lists of tools the rules are remembered.
_MAX_TOOL_LISTS = 256


class NotReplayable(EpisodeError):
    """An agent that began again asks for other turns than it asked for the first time."""


@dataclass(frozen=True)
class AgentTurn:
    """One turn as an agent sees it.

    `number` counts the turns of the episode from 0. `message` is the assistant's message in OpenAI form.
    `stop_string` is the text that ended the turn, which `message` lacks; empty if none did.
    `num_context_tokens` is the length of the whole context that the turn was sampled after. `is_replayed` says that it
    was sampled earlier and comes from the record.
    """

    number: int
    message: dict[str, Any]
    finish_reason: str
    num_context_tokens: int
    token_ids: Sequence[int] = field(default_factory=list)
    log_probs: Sequence[float] = field(default_factory=list)
    is_replayed: bool = False
    stop_string: str = ""

    def copy(self, *, is_replayed: bool = False) -> AgentTurn:
        """Return the turn with a message of its own, which the agent may change."""
        return replace(self, message=copied(self.message), is_replayed=is_replayed)


class EpisodeSession(Generic[Params]):
    """One episode, on the pool's loop. Several turns of a session may be asked for at the same time.

    Attributes:
        episode_id: the id of the record that the session makes.
        params: how its turns are sampled.
        num_restarts: how often the agent has begun again.
        counts: by metric name, what the record's tree does not say. The session counts num_replayed_turns and
            num_broken_calls and num_stop_strings, and what servers' caches had of the contexts of turns; the runner of
            the episode adds its own.
        limit: the kind of the last refusal by a limit; empty if there was none.
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
        """`tools` are the schemas that the chat template is given for a turn that names none."""
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
        """How many turns have been asked for, refused ones included. The next turn gets this number."""
        return len(self._asked)

    @property
    def num_turns_left(self) -> int:
        """How many more turns may be asked for."""
        return max(0, self._limits.max_turns - len(self._asked))

    def history(self, turn: int) -> list[Message]:
        """Return the messages up to turn number `turn`, which has been answered, and its own."""
        return [copied(one.message) for one in self._recorder.history(self._asked[turn].node)]

    async def num_context_tokens(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> int:
        """Return how many tokens the turn after `messages` would be sampled after. The record does not change. Raises
        DataError if the template refuses the messages.
        """
        async with self._locating:
            place, rendered = await self._rendered(copied(messages), self._tools if tools is None else tools)
        return len(self._recorder.tokens(place.node)) + (len(rendered.token_ids) if rendered is not None else 0)

    async def turn(self, messages: list[dict[str, Any]], *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Return the assistant's message after `messages`, the whole history in OpenAI form. Raises as `answer`."""
        return (await self.answer(messages, max_new_tokens=max_new_tokens)).message

    async def answer(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
        on_begin: OnBegin | None = None,
    ) -> AgentTurn:
        """Return the turn after `messages`, with all that the endpoint needs.

        `tools` are schemas of the agent's own, used in place of the session's. The turn ends with the first token with
        which its text has one of the texts `stop`; the message ends before that text. `on_begin` is given the
        template's text that the turn is sampled after, and the number of tokens of the whole context, before any token.

        Raises ContextFull and TooManyTurns at a limit; NotReplayable; DataError if the template refuses the messages or
        `max_new_tokens` is below 1; and RolloutError, which ends the run and not only the episode.
        """
        tools = self._tools if tools is None else tools
        messages = copied(messages)  # the agent may change its own list later
        request = _TurnRequest(len(self._asked), (messages, tools, max_new_tokens, list(stop)))
        asked = self._earlier(request)
        if asked is not None and asked.has_ended:
            return self._replay(asked, on_tokens, on_begin)
        if asked is None:
            if len(self._asked) >= self._limits.max_turns:
                self.limit = TooManyTurns.kind
                raise TooManyTurns(f"the episode has taken its {self._limits.max_turns} turns (episodes.max_turns)")
            if self._asked:
                self._asked[-1].key()
            asked = request
            self._asked.append(asked)
        asked.is_taken = True
        self._overlaps |= self._num_open > 0
        self._num_open += 1
        try:
            asked.answer = await self._sample(asked, messages, tools, max_new_tokens, stop, on_tokens, on_begin)
        except (EpisodeError, DataError) as error:
            asked.error = error
            raise
        finally:
            self._num_open -= 1
        return asked.answer.copy()

    async def _sample(
        self,
        asked: _TurnRequest,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        max_new_tokens: int | None,
        stop: Sequence[str],
        on_tokens: OnTokens | None,
        on_begin: OnBegin | None,
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
                f"turn {number} has a context of {len(token_ids)} tokens; an episode may have at most"
                f" {self._limits.max_tokens} (episodes.max_tokens)"
            )
        if on_begin is not None:
            on_begin(self._recorder.text(context), len(token_ids))
        most = room if max_new_tokens is None else min(room, max_new_tokens)
        watch = self._conversation.watch(stop) if stop else None
        params = self.params.at_most(most) if watch is None else self.params.at_most(most, watch)
        name = self.episode_id if number == 0 else f"{self.episode_id}-t{number:03d}"
        turn = await self._sampler.sample(
            self._prompt.prompt_id, token_ids, params, name, self._server_with_prefix(context), on_tokens
        )
        text = self._conversation.text_of(turn)
        said, stop_string = before_stop(text, stop) if turn.finish_reason == "stop_string" else (text, "")
        parts = await self._conversation.message_of(said, number, messages, self._recorder.text(context), tools)
        self.counts["num_broken_calls"] += parts.num_broken_calls
        self.counts["num_stop_strings"] += turn.finish_reason == "stop_string"
        if turn.num_cached_tokens is not None:
            context_kind = "history" if self.nodes[context].parent >= 0 else "prompt"
            self.counts[f"num_{context_kind}_tokens_read"] += len(token_ids)
            self.counts[f"num_{context_kind}_tokens_cached"] += turn.num_cached_tokens
        asked.node = self._recorder.add_sampled(context, parts.message, turn, text, cause)
        failpoints.reached("rollout.turn")
        return AgentTurn(
            number,
            parts.message,
            turn.finish_reason,
            len(token_ids),
            turn.token_ids,
            turn.log_probs,
            stop_string=stop_string,
        )

    async def _context(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> tuple[int, str]:
        """Find or make the context node of a history. Return it, and why a branch begins after it ("" if none does)."""
        place, rendered = await self._rendered(messages, tools)
        if rendered is None:
            return place.node, place.cause
        return self._recorder.add_context(place, rendered, tools), ""

    async def _rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[TreePosition, Rendered | None]:
        """Return where a history continues the tree, and what is rendered there; None if its context node is there."""
        place = self._recorder.locate(messages, tools)
        if place.node >= 0 and not place.new and not self.nodes[place.node].is_sampled:
            return place, None
        rendered = None
        if place.node >= 0:
            rendered = await self._conversation.after(self._recorder.history(place.node), place.new, tools)
            if isinstance(rendered, Rewritten):
                place, rendered = place.rewritten(), None
        if rendered is None:
            rendered = await self._conversation.first(self._prompt, place.new, tools)
        return place, rendered

    def _server_with_prefix(self, context: int) -> str | None:
        """The server that sampled the turn before a context, and so holds the context's beginning in its cache."""
        parent = self.nodes[context].parent
        return self.nodes[parent].server_id or None if parent >= 0 else None

    def _earlier(self, request: _TurnRequest) -> _TurnRequest | None:
        """The earlier request that this one repeats, if the agent began again and has not asked for it since."""
        left = [asked for asked in self._asked if not asked.is_taken]
        for asked in left:
            if asked.key() == request.key():
                return asked
        if not self._overlaps:
            self.check_replayed()
        return None

    def _replay(self, asked: _TurnRequest, on_tokens: OnTokens | None, on_begin: OnBegin | None) -> AgentTurn:
        asked.is_taken = True
        if asked.error is not None:
            raise asked.error
        assert asked.answer is not None
        self.counts["num_replayed_turns"] += 1
        if on_begin is not None:
            on_begin(self._recorder.text(self.nodes[asked.node].parent), asked.answer.num_context_tokens)
        if on_tokens is not None:
            on_tokens(0, asked.answer.token_ids)
        return asked.answer.copy(is_replayed=True)

    def set_reward(self, turn: int, value: float) -> None:
        """Set the reward of turn number `turn`; -1 is the last turn. Raises IndexError if there was no such turn,
        ValueError or TypeError if the value is not a finite number.
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

    def record_index(self, turn: int) -> int:
        """Return the index of turn number `turn` among the turns of the record, which are in the order in which they
        ended; -1 if the record has no such turn.
        """
        node = self._asked[turn].node if 0 <= turn < len(self._asked) else -1
        return sum(one.is_sampled for one in self.nodes[:node]) if node >= 0 else -1

    def restart(self) -> None:
        """Note that the agent begins again in another worker. What it asked for before is answered from the record, or
        refused as before, until it asks for more than was recorded. Raises RuntimeError while a turn is open.
        """
        if self._num_open:
            raise RuntimeError(f"episode {self.episode_id} began again with {self._num_open} turns open")
        self.num_restarts += 1
        for asked in self._asked:
            asked.is_taken = False
        for node in self.nodes:
            node.reward = None

    def check_replayed(self) -> None:
        """Raise NotReplayable if an agent that began again has left out a turn of its record."""
        for asked in self._asked:
            if asked.has_ended and not asked.is_taken:
                raise NotReplayable(
                    "the episode began again, because another episode ended their shared process, and did not ask for"
                    f" its turn {asked.number} as before: given the same answers, it must send the same messages. Draw"
                    " random numbers from random.Random(task.seed), and do not read the clock"
                )


@dataclass(eq=False)
class _TurnRequest:
    """A turn that was asked for.

    `request` holds what was asked, as long as this is the last request; `key` is its digest. It ended with an `answer`
    or with the `error` that refused it. A request that was given up has neither, and is sampled when it is asked for
    again. `node` is the node of the answer. `is_taken`: it was asked for since the agent last began.
    """

    number: int
    request: Any
    _key: bytes = b""
    answer: AgentTurn | None = None
    error: EpisodeError | DataError | None = None
    node: int = -1
    is_taken: bool = True

    def key(self) -> bytes:
        """Return the digest. It is made on the first call, because an episode of one turn never needs it."""
        if not self._key:
            self._key, self.request = _key_of(self.request), None
        return self._key

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or self.error is not None


def _key_of(request: Any) -> bytes:
    """A digest of a request. Keeping the histories, one per turn, would take memory by the square of the turns."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, default=repr).encode("utf-8", "replace")).digest()


class Conversation:
    """Turns messages into tokens and back. Its coroutines run on the pool's loop; `close` ends its threads."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        rule: SuffixRule | None = None,
        *,
        tool_format: str = "none",
        template: str = "",
    ) -> None:
        """`decode` turns sampled tokens into text. `rule` is None if an episode is one turn after its prompt's tokens.
        `tool_format` is the configuration's; `template` is the chat template, from which the format `auto` is found.
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
        """Render all of `messages`, as the context of a root. Raises DataError if the template refuses them."""
        if self.rule is None:
            return Rendered(list(prompt.token_ids), prompt.text)
        rule = self._rule_and_format(tools)[0]
        if tuple(messages) != prompt.messages:
            return await self._in_thread(lambda: rule.first(messages))
        key = json.dumps([prompt.prompt_id, list(tools)], sort_keys=True, default=repr)
        made = self._first.get(key)
        if made is None:
            # A task of its own: the caller that asked first may be cancelled while others wait for the same text.
            made = self._first[key] = asyncio.ensure_future(self._in_thread(lambda: rule.first(messages)))
            made.add_done_callback(_retrieve_exception)
            while len(self._first) > _MAX_FIRST_CONTEXTS:
                self._first.popitem(last=False)
        self._first.move_to_end(key)
        return await asyncio.shield(made)

    async def after(
        self, history: Sequence[HistoryMessage], new: Sequence[Message], tools: Tools
    ) -> Rendered | Rewritten:
        """Render what `new` adds after `history`. Raises DataError if the template refuses the messages."""
        rule = self._rule_and_format(tools)[0]
        return await self._in_thread(lambda: rule.after(history, new))

    def text_of(self, turn: Turn) -> str:
        """Return the text of a turn, without its end token, which is sampled and trained on but is not text."""
        return self._decode(list(turn.token_ids[:-1] if turn.finish_reason == "stop" else turn.token_ids))

    def watch(self, stops: Sequence[str]) -> StopWatch:
        """Return what finds the end of a turn that the texts `stops` end."""
        return StopWatch(self._decode, stops)

    async def message_of(
        self, text: str, number: int, before: Sequence[Message], gap: str, tools: Tools
    ) -> MessageParts:
        """Return the message that the agent is given for `text`, the text of turn `number`.

        `before` is the history that the turn was sampled after, and `gap` the end of that history's text.
        """
        if self.rule is None:
            return MessageParts({"role": "assistant", "content": text}, 0)
        rule, tool_format = self._rule_and_format(tools)
        parts = parts_of(text, tool_format, turn=number, tools=tools, gap=gap)
        if parts.message.keys() == {"role", "content"}:
            return parts
        given = await self._in_thread(lambda: rule.given(before, parts.message, text))
        return MessageParts(given, parts.num_broken_calls)

    def check_tools(self, tools: Tools) -> None:
        """Raise DataError if these tools cannot be called in the configured format."""
        if self.rule is not None:
            self._rule_and_format(tools)

    def _rule_and_format(self, tools: Tools) -> tuple[SuffixRule, ToolFormat]:
        assert self.rule is not None
        key = json.dumps(list(tools), sort_keys=True, default=repr)
        if key not in self._by_tools:
            if len(self._by_tools) >= _MAX_TOOL_LISTS:
                self._by_tools.clear()  # an agent may name other tools in every request
            tool_format = format_of(self._tool_format, self._template, tools)
            self._by_tools[key] = (self.rule.with_tools(tools), tool_format)
        return self._by_tools[key]

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _retrieve_exception(made: asyncio.Future[Any]) -> None:
    """Keep the loop from reporting a refusal that nobody waits for any more."""
    if not made.cancelled():
        made.exception()


# The counts that are shown even if they are 0. Counts by cause and by kind are shown only if they are not 0.
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
    """Return the counts that follow from an episode's record, whether it ended now or in an earlier attempt."""
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
