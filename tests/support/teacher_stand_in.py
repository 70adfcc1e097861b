"""A teacher's server that answers as SGLang does, from a formula: what a real one cannot be made to get wrong.

The log-prob of a token is -(1 + token id mod 7) / 4, whatever precedes it; its most likely tokens are 1, 2, 3, ... with
-0.5, -1.5, -2.5, ... nats.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web


def log_prob(token: int) -> float:
    return -(1 + token % 7) / 4


class LetterTokenizer:
    """Id i is the i-th letter of the alphabet; text is split into its letters, other signs are dropped."""

    def __init__(self, size: int = 26) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {chr(97 + number): number for number in range(self.size)}

    def decode(self, token_ids, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + one) for one in token_ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(one) - 97 for one in text.lower() if "a" <= one < chr(97 + self.size)]


class StandInTeacher:
    """An HTTP server in a thread; a context manager. `requests` are the bodies of scoring requests. `spoil` changes an
    answer to one; `status` answers each with that status.
    """

    def __init__(self, tokenizer: Any = None, port: int = 0) -> None:
        self.tokenizer = tokenizer or LetterTokenizer()
        self.requests: list[dict[str, Any]] = []
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.status = 200
        self.key: str | None = None
        self.most_open = self._open = 0
        self._port, self._loop = port, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> StandInTeacher:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _start(self) -> None:
        application = web.Application(client_max_size=2**26)
        application.router.add_get("/model_info", self._describe)
        application.router.add_post("/generate", self._score)
        application.router.add_post("/detokenize", self._detokenize)
        application.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # pyright: ignore

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "models/teacher", "tokenizer_path": "models/teacher"})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"text": [self.tokenizer.decode(one, skip_special_tokens=False) for one in tokens]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        texts = (await request.json())["prompt"]
        return web.json_response(
            {"tokens": [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]}
        )

    async def _score(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        if self.status != 200:
            return web.json_response({"error": {"message": "not now"}}, status=self.status)
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        await asyncio.sleep(0.05)
        self._open -= 1
        ids, start, top = body["input_ids"], body["logprob_start_len"], body.get("top_logprobs_num", 0)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "input_token_logprobs": [[None, ids[start], None]]
            + [[log_prob(one), one, None] for one in ids[start + 1 :]],
        }
        if top:
            place = [[-0.5 - rank, 1 + rank, None] for rank in range(top)]
            meta["input_top_logprobs"] = [None] + [list(place) for _ in ids[start + 1 :]]
        return web.json_response(self.spoil({"text": "", "meta_info": meta}))
