"""How one run's messages become tokens, and sampled tokens a message.

Owns the threads that render templates: a template is a program of the checkpoint's, which may be slow, and the event
loop serves all episodes. What is rendered is `data.template_suffix`'s, what a text says `message_parts.py`'s.
"""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gspo_mega.agents.message_parts import Parts, ToolFormat, format_of, parts_of
from gspo_mega.agents.turn import Turn
from gspo_mega.base.records import Prompt
from gspo_mega.data.template_suffix import HistoryMessage, Rendered, Rewritten, SuffixRule

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

    async def message_of(self, text: str, number: int, before: Sequence[Message], gap: str, tools: Tools) -> Parts:
        """The message that the agent is given for the text of turn `number`, sampled behind `before`, whose last text
        is `gap`.
        """
        if self.rule is None:
            return Parts({"role": "assistant", "content": text}, 0)
        rule, tool_format = self._for(tools)
        parts = parts_of(text, tool_format, turn=number, tools=tools, gap=gap)
        if parts.message.keys() == {"role", "content"}:
            return parts
        given = await self._in_thread(lambda: rule.given(before, parts.message, text))
        return Parts(given, parts.num_broken_calls)

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
