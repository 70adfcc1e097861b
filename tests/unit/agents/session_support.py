"""A session without servers: a sampler that says what a test wants, as tokens of a real tokenizer."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field, replace

from chat_templates import TOOLS, tokenizer_with

from gspo_mega.agents.messages import StopWatch
from gspo_mega.agents.session import Conversation, EpisodeSession
from gspo_mega.agents.turn import Limits, Turn
from gspo_mega.base.episodes import Episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.templates import SuffixRule

USER = {"role": "user", "content": "2+2?"}


def in_loop(test):
    """An async test, in an event loop of its own."""

    @functools.wraps(test)
    def run(*given, **named):
        asyncio.run(test(*given, **named))

    return run


@dataclass(frozen=True)
class Params:
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    watch: StopWatch | None = None

    def at_most(self, num_tokens, watch=None):
        return replace(self, max_new_tokens=min(self.max_new_tokens, num_tokens), watch=watch)


@dataclass
class Said:
    """What the policy says next. `gate`: it ends when that is set."""

    text: str
    finish_reason: str = "stop"
    server_id: str = "server-0"
    version: int = 0
    gate: asyncio.Event | None = None
    error: Exception | None = None
    num_cached_tokens: int | None = None


@dataclass
class Sampling:
    name: str
    token_ids: list[int]
    max_new_tokens: int
    request_id: str
    prefer: str | None


class Scripted:
    """A TurnSampler. `calls`: what it was asked for, in order."""

    def __init__(self, tokenizer, said):
        self.tokenizer, self.said, self.calls = tokenizer, list(said), []

    async def sample(self, name, token_ids, params, request_id, prefer=None, on_tokens=None):
        self.calls.append(Sampling(name, list(token_ids), params.max_new_tokens, request_id, prefer))
        said = self.said.pop(0)
        said = said if isinstance(said, Said) else Said(said)
        if said.gate is not None:
            await said.gate.wait()
        if said.error is not None:
            raise said.error
        ids = self.tokenizer.encode(said.text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if said.finish_reason == "stop" else ids[: params.max_new_tokens]
        if on_tokens is not None:
            on_tokens(0, ids)
        finish_reason = said.finish_reason
        if params.watch is not None and (end := params.watch.end_of(ids[:-1])) is not None:
            ids, finish_reason = ids[:end], "stop_string"
        log_probs = [-0.01 * (len(self.calls) + place) for place in range(len(ids))]
        versions, cached = [said.version] * len(ids), said.num_cached_tokens
        return Turn(ids, log_probs, versions, finish_reason, None, said.server_id, num_cached_tokens=cached)


@dataclass
class Side:
    """A session, its sampler and its tokenizer."""

    session: EpisodeSession
    sampler: Scripted
    tokenizer: object
    rule: SuffixRule
    prompt: Prompt
    conversation: Conversation = field(repr=False)

    def episode(self):
        return Episode("e", 0, self.prompt, self.session.nodes)


def side_of(folder, template, *said, tools=TOOLS, tool_format="hermes", max_turns=8, max_tokens=4096, params=None):
    """A session over `template` whose policy says the texts `said`."""
    tokenizer = tokenizer_with(folder, template)
    encoder = PromptEncoder(tokenizer, chat_template=True)
    rule = SuffixRule(encoder, [tokenizer.eos_token_id])
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    conversation = Conversation(decode, rule, tool_format=tool_format, template=template)
    text, ids = encoder.encode_prompt([USER])
    prompt = Prompt("p:0", "p", tuple(ids), text, "4", {}, (USER,))
    sampler = Scripted(tokenizer, said)
    limits = Limits(max_turns, max_tokens)
    session = EpisodeSession(conversation, "e", prompt, sampler, params or Params(), limits, tools)
    return Side(session, sampler, tokenizer, rule, prompt, conversation)
