"""A small HTTP server that answers as SGLang does, until told to misbehave."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import time
from collections.abc import Callable

import numpy as np
from aiohttp import web

from gspo_mega.rollout.registration import Registration

EOS = 2
VOCAB = 64


def good_answer(input_ids, params, version="0", rng=random, experts=None) -> dict:
    """One answer of the real server's form (0.5.23, without a tokenizer)."""
    count = rng.randint(1, params["max_new_tokens"])
    ids = [rng.randint(3, VOCAB - 1) for _ in range(count)]
    if count < params["max_new_tokens"]:
        ids[-1] = EOS
    finish = {"type": "stop", "matched": EOS} if ids[-1] == EOS else {"type": "length", "length": count}
    meta = {
        "finish_reason": finish,
        "prompt_tokens": len(input_ids),
        "completion_tokens": count,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "output_token_logprobs": [[-rng.random() * 3, token, None] for token in ids],
    }
    if experts is not None:
        layers, top_k, num_experts = experts
        rows = np.array([rng.sample(range(num_experts), top_k) for _ in range((len(input_ids) + count - 1) * layers)])
        meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return {"output_ids": ids, "meta_info": meta}


class FakeServer:
    """Serves on its own thread. `fault(num_generate_calls_before, input_ids)` returns None for a good answer, or what
    to do: an answer dict, an int (HTTP status), "hang", "reset", "truncated", "not json", "abort"."""

    def __init__(self, server_id: str, servers_dir, *, version: int = 0, delay: float = 0.0, tensor_parallel: int = 1):
        self.server_id = server_id
        self.servers_dir = servers_dir
        self.version = version
        self.delay = delay
        self.tensor_parallel = tensor_parallel
        self.fault: Callable[[int, list[int]], object] = lambda call, ids: None
        self.calls: list[tuple[str, dict | None]] = []
        self.num_open = 0
        self.most_open = 0
        self.num_generated = 0
        self.generation = 0
        self._rng = random.Random(server_id)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.start()

    def start(self) -> None:
        """(Re)start on a new port, as the next generation."""
        self.generation += 1
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.register("ready")

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def register(self, state: str, error: str | None = None, **changes) -> None:
        fields = dict(
            server_id=self.server_id, address=f"http://127.0.0.1:{self.port}", pid=1, state=state, generation=self.generation,
            weight_version=self.version, heartbeat=time.time(), tensor_parallel=self.tensor_parallel, error=error,
        )  # fmt: skip
        Registration(**{**fields, **changes}).write(self.servers_dir)

    def die(self) -> None:
        """All connections break and nothing listens any more; the registration stays as it was."""
        asyncio.run_coroutine_threadsafe(self._die(), self._loop).result()

    async def _die(self) -> None:
        await self._runner.cleanup()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def close(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer the-key":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = json.loads(await request.text() or "null")
        self.calls.append((request.path, body))
        if request.path == "/generate":
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                return await self._generate(request, body)
            finally:
                self.num_open -= 1
        return self.control(request.path, body)

    def control(self, path: str, body: dict | None) -> web.Response:
        if path == "/model_info":
            return web.json_response({"weight_version": str(self.version)})
        if path == "/update_weights_from_disk":
            self.version = int(body["weight_version"])
            return web.json_response({"success": True, "message": "done"})
        if path == "/weights_checker" and body["action"] == "checksum":
            ranks = [{"checksums": {"a": f"{self.version:x}", "b": "0"}} for _ in range(self.tensor_parallel)]
            return web.json_response({"success": True, "message": "", "ranks": ranks})
        if path == "/end_weight_update":
            return web.json_response({"success": False, "message": "no session is open"}, status=400)
        return web.json_response({"success": True, "message": "ok"})

    async def _generate(self, request: web.Request, body: dict) -> web.StreamResponse:
        ids = body["input_ids"]
        call = self.num_generated
        self.num_generated += 1
        await asyncio.sleep(self.delay * self._rng.random())
        fault = self.fault(call, ids)
        if fault is None:
            experts = (2, 2, 4) if body["return_routed_experts"] else None
            return web.json_response(good_answer(ids, body["sampling_params"], str(self.version), self._rng, experts))
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "as asked"}}, status=fault)
        if isinstance(fault, dict):
            return web.json_response(fault)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault == "truncated":
            text = json.dumps(good_answer(ids, body["sampling_params"], str(self.version), self._rng))
            response = web.StreamResponse(headers={"Content-Length": str(len(text))})
            await response.prepare(request)
            await response.write(text[: len(text) // 2].encode())
            request.transport.close()
            return response
        if fault == "not json":
            return web.Response(text='{"output_ids": [3, 4')
        if fault == "abort":
            return web.json_response({"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "abort", "message": "x"}}})
        raise AssertionError(fault)
