"""Teachers on SGLang servers: the user's (`teacher.url`), or the run's own, which hold the policy (`teacher.policy`).

A teacher scores the tokens of an episode once, when the episode's reward is known, and its answer is recorded with the
episode (`base/served_scores.py`). So a continued run, or one that trains on a recording, does not ask again.

A server that cannot be reached, is slow or is overloaded is asked again until `rollout.no_server_deadline_seconds`
have passed without an answer; one that refuses a request or answers nonsense, `rollout.max_attempts` times. Then the
run stops with an error, and the same command continues it. No episode is dropped because its teacher failed.

Before the first score each server's tokenizer is compared with the policy's (`tokenizer_problem`): what it makes of
each id of the vocabulary, and how it splits some texts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from gspo_mega.base.episodes import Episode, build_rows
from gspo_mega.base.errors import ModelError, RolloutError
from gspo_mega.base.served_scores import ServedScores
from gspo_mega.config.derived import OneTeacher, num_served_top, teachers
from gspo_mega.config.schema import Rollout, Teacher
from gspo_mega.config.validate_rewards import url_problem
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.prompts import taught_prompt
from gspo_mega.rollout.client.server_client import ServerClient, ServerError, score_with_top
from gspo_mega.rollout.pool import ServerPool

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.25, 8.0
_IDS_AT_ONCE = 4096
_LOOK_SECONDS = 5.0
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# Texts whose tokens differ between tokenizers of one vocabulary: words, numbers, code, spaces, scripts, an emoji.
_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "12345678 + 0.5 = 12345678.5",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n",
    "  two  spaces\tand a tab\n\n",
    "naïve façade — 中文字符, русский, العربية 🙂",
)


class Tokenizer(Protocol):
    """What is needed of the policy's tokenizer, which is one of `transformers`."""

    def get_vocab(self) -> Mapping[str, int]: ...
    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = ...
    ) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...


class TeacherServer:
    """One teacher's server: its client, and how its failures are named without what a variable holds. Use it in one
    event loop.
    """

    def __init__(self, teacher: OneTeacher, concurrency: int, vocab_size: int, environment: Mapping[str, str]) -> None:
        """Raises ModelError if a variable that the section names is not set or holds nothing usable."""
        settings, self.key = teacher.settings, f"{teacher.key}.url"
        assert settings.url is not None
        address, secrets, key = settings.url, [], ""
        if address.startswith("$"):
            address = _variable(self.key, address[1:], environment)
            if address.startswith("$") or url_problem(address) is not None:
                raise ModelError(
                    f"{self.key}: the environment variable {settings.url[1:]} holds no address; valid: http:// or"
                    " https://, a host, and no user or password"
                )
            secrets = [address.rstrip("/"), urlsplit(address).netloc, str(urlsplit(address).hostname)]
        if settings.api_key_variable is not None:
            key = _variable(f"{teacher.key}.api_key_variable", settings.api_key_variable, environment)
            secrets.append(key)
        self._secrets = [secret for secret in secrets if secret]
        self.client = ServerClient(self.key, address.rstrip("/"), key, vocab_size=vocab_size)
        self.slots = asyncio.Semaphore(concurrency)
        self.is_checked: asyncio.Future[None] | None = None

    async def score(
        self, token_ids: Sequence[int], start: int, vocab_size: int, num_top: int, deadline_seconds: float
    ) -> ServedScores:
        """As `score_with_top`. Raises ServerError."""
        return await score_with_top(self.client, token_ids, start, vocab_size, num_top, deadline_seconds)

    async def close(self) -> None:
        await self.client.close()

    def shown(self, error: Exception) -> str:
        """Return an error's text without the address and the key that variables hold."""
        text = str(error)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class PolicyServers:
    """The run's own servers as a teacher: whichever is free, with the weights that it has then."""

    def __init__(self, teacher: OneTeacher, concurrency: int, pool: ServerPool) -> None:
        self.key, self._pool = f"{teacher.key}.policy", pool
        self.slots = asyncio.Semaphore(concurrency)
        self.is_checked: asyncio.Future[None] | None = None

    async def score(
        self, token_ids: Sequence[int], start: int, vocab_size: int, num_top: int, deadline_seconds: float
    ) -> ServedScores:
        """As `score_with_top`. Raises ServerError, and RolloutError as `ServerPool.acquire`."""
        server, failure = await self._pool.acquire(num_tokens=len(token_ids)), None
        try:
            return await server.run(
                score_with_top(server.client, token_ids, start, vocab_size, num_top, deadline_seconds)
            )
        except ServerError as error:
            failure = error
            raise
        finally:
            await self._pool.release(server, failure, len(token_ids))

    async def close(self) -> None:
        """Do nothing: the pool closes the run's own servers."""

    def shown(self, error: Exception) -> str:
        return str(error)


class TeacherServers:
    """The servers of a run's teachers. Use it in one event loop.

    Attributes:
        tell: shows a line to the user, once for each time that a server stops answering, and once if it does again.
    """

    def __init__(
        self,
        teacher: Teacher | None,
        rollout: Rollout,
        tokenizer: Tokenizer,
        vocab_size: int,
        environment: Mapping[str, str] = os.environ,
        *,
        encoder: PromptEncoder | None = None,
        pool: ServerPool | None = None,
    ) -> None:
        """`encoder`: of the run's prompts, which a teacher with a prompt of its own needs; `pool`: of the run's
        servers, which the policy as a teacher needs. Raises ModelError as `TeacherServer`.
        """
        self.tell: Callable[[str], None] = lambda line: None
        self._tokenizer, self._vocab_size, self._num_top = tokenizer, vocab_size, num_served_top(teacher)
        concurrency = teacher.concurrency if teacher is not None else 1
        self._deadline, self._patience = rollout.progress_deadline_seconds, rollout.no_server_deadline_seconds
        self._max_attempts = rollout.max_attempts
        self._encoder = encoder
        self._servers: dict[str | None, TeacherServer | PolicyServers] = {}
        self._contexts: dict[str | None, str | None] = {}
        for one in teachers(teacher):
            if one.settings.url is not None:
                self._servers[one.source] = TeacherServer(one, concurrency, vocab_size, environment)
            elif one.settings.policy:
                assert pool is not None
                self._servers[one.source] = PolicyServers(one, concurrency, pool)
            self._contexts[one.source] = one.settings.context
        self._silent: set[str] = set()

    async def start(self) -> None:
        """Begin to compare the tokenizers. Returns at once: a server may not be up yet."""
        for server in self._servers.values():
            if isinstance(server, TeacherServer):
                server.is_checked = asyncio.ensure_future(self._check(server))

    async def close(self) -> None:
        for server in self._servers.values():
            if server.is_checked is not None:
                server.is_checked.cancel()
                await asyncio.gather(server.is_checked, return_exceptions=True)
            await server.close()

    async def score(self, episode: Episode) -> None:
        """Ask the teacher of a scored episode's rows what it says of their tokens, and record it in the episode. Does
        nothing if its source has no teacher on a server, or the episode has no reward to learn from.

        Raises ModelError if the server has another tokenizer, and RolloutError if it does not answer, refuses or
        answers nonsense for too long.
        """
        source = None if None in self._servers else episode.prompt.source
        server = self._servers.get(source)
        if server is None or not episode.is_scored:
            return
        if server.is_checked is not None:
            await asyncio.shield(server.is_checked)
        found: dict[int, ServedScores] = {}
        for row in build_rows(episode):
            if not row.turns:
                continue
            prompt: Sequence[int] = row.prompt.token_ids
            if (context := self._contexts[source]) is not None:
                assert self._encoder is not None
                prompt = taught_prompt(self._encoder, context, episode.prompt)
            token_ids, start = [*prompt, *row.response_token_ids], len(prompt)

            async def ask(token_ids: Sequence[int] = token_ids, start: int = start) -> ServedScores:
                return await server.score(token_ids, start, self._vocab_size, self._num_top, self._deadline)

            async with server.slots:
                scores = await self._until_answered(server, f"score of {row.trajectory_id}", ask, episode.counts)
            for (begin, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
                found[node_id] = scores.between(begin, end)
        episode.take_scores(found)

    async def _check(self, server: TeacherServer) -> None:
        async def ask() -> str | None:
            return await tokenizer_problem(server.client, self._tokenizer, self._deadline)

        problem = await self._until_answered(server, "its tokenizer", ask, {})
        if problem is not None:
            raise ModelError(f"{server.key}: {problem}")

    async def _until_answered(
        self, server: TeacherServer | PolicyServers, what: str, ask: Callable[[], Any], counts: dict[str, int]
    ) -> Any:
        """Return what `ask` returns, once it raises no ServerError. `counts` gets the number of failures."""
        tries, since = 0, None
        while True:
            try:
                answer = await ask()
            except ServerError as error:
                counts["num_teacher_retries"] = counts.get("num_teacher_retries", 0) + 1
                if error.kind == "nonsense" or (error.kind == "status" and error.status not in _RETRIED_STATUS):
                    tries += 1
                    if tries >= self._max_attempts:
                        raise RolloutError(
                            f"{server.shown(error)} ({what}; so did {tries} answers in a row: rollout.max_attempts)"
                        ) from None
                else:
                    tries, since = 0, time.monotonic() if since is None else since
                    if time.monotonic() - since > self._patience:
                        raise RolloutError(
                            f"{server.shown(error)} ({what}; no answer for {self._patience:g} s:"
                            " rollout.no_server_deadline_seconds). Start the teacher's server again; the same command"
                            " then continues the run"
                        ) from None
                    if server.key not in self._silent:
                        self._silent.add(server.key)
                        self.tell(f"notice   {server.shown(error)}; it is asked again for up to {self._patience:g} s")
            else:
                if server.key in self._silent:
                    self._silent.discard(server.key)
                    self.tell(f"notice   {server.key}: the teacher's server answers again")
                return answer
            wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(counts["num_teacher_retries"], 8))
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))


async def first_look(
    teacher: OneTeacher, tokenizer: Tokenizer, vocab_size: int, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Compare the tokenizer of a teacher's server before a run, if it is up. Returns a notice if it is not. Raises
    ModelError as `TeacherServer`, and for another tokenizer.
    """
    server = TeacherServer(teacher, 1, vocab_size, environment)
    try:
        problem = await tokenizer_problem(server.client, tokenizer, _LOOK_SECONDS)
    except ServerError as error:
        return f"{server.shown(error)}; the run asks for its tokenizer when it samples"
    finally:
        await server.client.close()
    if problem is not None:
        raise ModelError(f"{server.key}: {problem}")
    return None


async def tokenizer_problem(client: ServerClient, tokenizer: Tokenizer, deadline_seconds: float) -> str | None:
    """Compare a server's tokenizer with the policy's. Returns what is wrong, as the rest of a sentence; None if each
    text of the vocabulary and the `_TEXTS` are alike. Raises ServerError if the server cannot be asked.
    """
    described = await client.call_object("/model_info", None, deadline_seconds, method="GET")
    name = described.get("tokenizer_path") or described.get("model_path")
    ids = sorted(set(tokenizer.get_vocab().values()))
    try:
        for start in range(0, len(ids), _IDS_AT_ONCE):
            part = ids[start : start + _IDS_AT_ONCE]
            body = {"tokens": [[one] for one in part], "skip_special_tokens": False}
            theirs = (await client.call_object("/detokenize", body, deadline_seconds)).get("text")
            if not isinstance(theirs, list) or len(theirs) != len(part):
                return f"{name}: its /detokenize does not answer with a text for each token"
            for one, their_text in zip(part, theirs, strict=True):
                our_text = tokenizer.decode([one], skip_special_tokens=False)
                if their_text != our_text and their_text not in _cleaned(tokenizer, one):
                    return _another(name, f"id {one} is {our_text!r} here and {their_text!r} there")
        body = {"prompt": list(_TEXTS), "add_special_tokens": False}
        theirs = (await client.call_object("/tokenize", body, deadline_seconds)).get("tokens")
    except ServerError as error:
        if error.kind != "status" or error.status in _RETRIED_STATUS - {500}:
            raise
        return (
            f"the server of {name} cannot say what its tokens are ({error}); valid: an SGLang server with the policy's"
            " tokenizer, which answers /tokenize and /detokenize, without --skip-tokenizer-init"
        )
    ours = [list(tokenizer.encode(text, add_special_tokens=False)) for text in _TEXTS]
    for place, text in enumerate(_TEXTS):
        if not isinstance(theirs, list) or place >= len(theirs) or theirs[place] != ours[place]:
            return _another(name, f"it splits {json.dumps(text, ensure_ascii=False)} otherwise")
    return None


def _cleaned(tokenizer: Tokenizer, one: int) -> list[str]:
    """Return a token's text without and with the removal of spaces before punctuation, on which releases of
    transformers differ.
    """
    return [
        tokenizer.decode([one], skip_special_tokens=False, clean_up_tokenization_spaces=cleans)
        for cleans in (False, True)
    ]


def _another(name: Any, how: str) -> str:
    return f"{name} has another tokenizer than the policy: {how}; valid: a model of its family"


def _variable(key: str, name: str, environment: Mapping[str, str]) -> str:
    value = environment.get(name, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise ModelError(f"{key}: the environment variable {name} is not set, or holds more than a line")
    return value
