"""The tree of one episode while it is made: where a history continues it, and what is added there.

`Recorder` finds the node that an agent's messages reach, and says why a branch begins. It renders, samples and reads
nothing itself.

A branch is a second way on from the same place. Its cause is `resampled` if the same context is sampled again,
`not_ours` if an assistant's message stands where the policy was not asked, `template` if the chat template changed what
came before, and otherwise `edited`: the agent's messages, or its tools, differ from those of the other way.

Messages are compared by meaning, not by spelling: content may be null, missing or empty, a list of text parts or their
text, and the arguments of a call may be JSON text or an object. Of an assistant's message only thinking, content and
calls are compared; the ids of its calls only choose between several turns that said the same. Thinking that is missing
or null was dropped by a client that does not know it: the history then continues with the thinking in place. An agent
that wants the thinking removed hands back an empty text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo_mega.agents.turn import Turn
from gspo_mega.base.episodes import Node
from gspo_mega.base.errors import DataError
from gspo_mega.base.records import float_column, int_column
from gspo_mega.data.chat import arguments_of
from gspo_mega.data.rows import MOST_LEVELS, copied, nests_deeper
from gspo_mega.data.templates import HistoryMessage, Rendered

Message = dict[str, Any]


@dataclass(frozen=True)
class TreePosition:
    """Where a history continues the tree: the messages `new` come after `node` (-1: as a new root).

    If nothing is `new` and `node` is a context node, the next turn is sampled after it as it is. Otherwise `node` is a
    sampled node or -1, and a context node has to be added first. `cause` says why a branch begins here; it is empty if
    none does. `messages` is the whole history.
    """

    node: int
    new: list[Message]
    cause: str
    messages: list[Message]

    def rewritten(self) -> TreePosition:
        """Return the same history as a new root, because the template changed what came before."""
        return TreePosition(-1, self.messages, "template", self.messages)


class _Meaning(NamedTuple):
    """What a message says, as text that can be compared. `thinking` is None if the message has none; `ids` are the ids
    of its calls.
    """

    said: str
    thinking: str | None
    ids: tuple[str, ...]

    def continues(self, recorded: _Meaning) -> bool:
        """Whether this message, handed back by an agent, is the `recorded` one."""
        return self.said == recorded.said and (self.thinking is None or self.thinking == (recorded.thinking or ""))


class Recorder:
    """Makes one episode's tree. `nodes` are its nodes, in the form of `Episode.nodes`."""

    nodes: list[Node]

    def __init__(self) -> None:
        self.nodes = []
        self._meant: list[list[_Meaning] | None] = []  # of each node's messages, once they are compared
        self._texts: list[str] = []  # of each context node, as rendered
        self._tools: dict[int, str] = {}  # of each root
        self._children: dict[int, list[int]] = {-1: []}

    def locate(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> TreePosition:
        """Return the deepest node that `messages`, rendered with `tools`, continue. Raises DataError if one of them is
        not a message in OpenAI form.
        """
        for place, message in enumerate(messages):
            if problem := _problem_of(message):
                raise DataError(f"message {place} {problem}")
        if not self.nodes:  # an episode of one turn compares nothing
            return TreePosition(-1, list(messages), "", list(messages))
        given, asked = _meanings_of(messages), _tools_text(tools)
        best, best_rank, matched = -1, (0, 0, False, 0), 0
        reached = [(root, 0, 0) for root in self._children[-1] if self._tools[root] == asked]
        while reached:
            node, start, same_ids = reached.pop()
            recorded = self._meanings(node)
            end = start + len(recorded)
            handed_back = given[start:end]
            if end > len(given) or _num_common(handed_back, recorded) < len(recorded):
                continue
            same_ids += sum(here.ids == there.ids for here, there in zip(handed_back, recorded, strict=True))
            # Of turns that said the same, prefer the one with these ids, then one that nothing follows yet, then the
            # last.
            rank = (end, same_ids, not self._children[node], node)
            if (self.nodes[node].is_sampled or end == len(given)) and rank > best_rank:
                best, best_rank, matched = node, rank, end
            reached += [(child, end, same_ids) for child in self._children[node]]
        history = list(messages)
        if best >= 0 and not self.nodes[best].is_sampled:
            return TreePosition(best, [], "resampled" if self._children[best] else "", history)
        return TreePosition(best, history[matched:], self._cause(best, history[matched:], given[matched:]), history)

    def add_context(
        self, place: TreePosition, rendered: Rendered, tools: Sequence[dict[str, Any]] | None = None
    ) -> int:
        """Add a context node and return its id. If the same context is there already, return that one's id.

        `rendered` is the rendering of `place.new`.
        """
        siblings, asked = self._children[place.node], _tools_text(tools)
        meanings = _meanings_of(place.new) if siblings else []
        for sibling in siblings:
            node = self.nodes[sibling]
            if (
                node.token_ids == rendered.token_ids
                and self._meanings(sibling) == meanings
                and (place.node >= 0 or self._tools[sibling] == asked)
            ):
                return sibling
        cause = (place.cause or self._cause(place.node, place.new, meanings)) if siblings else ""
        made = self._add(Node(0, place.node, "context", [], int_column(rendered.token_ids), cause=cause), place.new)
        self._texts[made] = rendered.text
        if place.node < 0:
            self._tools[made] = asked
        return made

    def add_sampled(self, parent: int, message: Message, turn: Turn, text: str, cause: str = "") -> int:
        """Add a sampled node after the context node `parent`, and return its id.

        The routes of `turn` cover the whole context; only the node's own part is kept.
        """
        routes = turn.routed_experts
        above = self.nodes[parent].parent
        if routes is not None and above >= 0:
            routes = routes[len(self.tokens(above)) - 1 :].copy()  # a view would keep the whole context's in memory
        node = Node(
            0,
            parent,
            "sampled",
            [],
            int_column(turn.token_ids),
            float_column(turn.log_probs),
            int_column(turn.weight_versions),
            routes,
            turn.finish_reason,
            text,
            server_id=turn.server_id,
            cause=(cause or "resampled") if self._children[parent] else "",
            sampling_masks=turn.sampling_masks,
        )
        return self._add(node, [message])

    def text(self, context: int) -> str:
        """Return the template's text of a context node."""
        return self._texts[context]

    def tokens(self, node: int) -> list[int]:
        """Return all token ids from the root to the end of `node`."""
        return [token for one in self._path(node) for token in one.token_ids]

    def history(self, node: int) -> list[HistoryMessage]:
        """Return the messages from the root to `node`."""
        history: list[HistoryMessage] = []
        for one in self._path(node):
            if one.is_sampled:
                stop = one.token_ids[-1] if one.finish_reason == "stop" else None
                history.append(HistoryMessage(one.messages[0], True, self._texts[one.parent], stop))
            else:
                history += [HistoryMessage(message) for message in one.messages]
        return history

    def _add(self, node: Node, messages: Sequence[Message]) -> int:
        node.node_id = len(self.nodes)
        node.messages = copied(list(messages))  # the agent may change its own list later
        self.nodes.append(node)
        self._meant.append(None)
        self._texts.append("")
        self._children[node.parent].append(node.node_id)
        self._children[node.node_id] = []
        return node.node_id

    def _meanings(self, node: int) -> list[_Meaning]:
        meanings = self._meant[node]
        if meanings is None:
            meanings = self._meant[node] = _meanings_of(self.nodes[node].messages)
        return meanings

    def _path(self, node: int) -> list[Node]:
        path = []
        while node >= 0:
            path.append(self.nodes[node])
            node = self.nodes[node].parent
        return path[::-1]

    def _cause(self, parent: int, new: Sequence[Message], meanings: Sequence[_Meaning]) -> str:
        """Why `new` is another way on from `parent` than those that exist; empty if there are none."""
        siblings = self._children[parent]
        if not siblings:
            return ""
        common = {sibling: _num_common(meanings, self._meanings(sibling)) for sibling in siblings}
        nearest = max(siblings, key=lambda sibling: common[sibling])
        at = common[nearest]
        if at == len(new) or new[at].get("role") != "assistant":
            return "edited"
        # If the policy answered here, the agent changed its answer.
        is_answered = at == len(self._meanings(nearest)) and bool(self._children[nearest])
        return "edited" if is_answered else "not_ours"


def _num_common(given: Sequence[_Meaning], recorded: Sequence[_Meaning]) -> int:
    pairs = zip(given, recorded, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if not a.continues(b)), min(len(given), len(recorded)))


def _problem_of(message: Any) -> str | None:
    """Say what in a message can be neither compared nor rendered; None if nothing."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'is not of the form {"role": "user", "content": "text"}'
    if nests_deeper(message):
        return f"nests deeper than {MOST_LEVELS} levels"
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return f"has tool_calls that are no list: {calls!r:.80}"
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            return f'has a tool call that is not of the form {{"function": {{"name": ..., ...}}}}: {call!r:.80}'
        if not isinstance(call["function"].get("name"), str):
            return f"has a tool call without the name of its function: {call!r:.80}"
    return None


def _meanings_of(messages: Sequence[Message]) -> list[_Meaning]:
    return [_meaning_of(message) for message in messages]


def _meaning_of(message: Message) -> _Meaning:
    content = _content_of(message.get("content"))
    if message["role"] != "assistant":
        rest = {key: value for key, value in message.items() if value is not None and key != "content"}
        return _Meaning(_canonical([content, rest]), None, ())
    calls = message.get("tool_calls") or []
    said = [[call["function"]["name"], arguments_of(call)] for call in calls]
    thinking = message.get("reasoning_content")
    return _Meaning(
        _canonical(["assistant", content, said]),
        thinking if thinking is None or isinstance(thinking, str) else _canonical(thinking),
        tuple(str(call.get("id")) for call in calls),
    )


def _content_of(content: Any) -> Any:
    """Return a message's content, with text parts joined into one text."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _tools_text(tools: Sequence[dict[str, Any]] | None) -> str:
    return _canonical(list(tools)) if tools else "[]"


def _canonical(value: Any) -> str:
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(sort_keys=True, default=repr)
