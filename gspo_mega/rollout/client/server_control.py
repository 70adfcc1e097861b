"""Blocking, thread-safe control of one SGLang server: each operation that publishing needs, as an HTTP call.

SGLang's endpoints for weights, and their bodies, are listed only here. `HttpServerControl` implements the protocol
`ServerControl` of `sync/servers.py`, which says what each operation means to a publish. `pooled_server.py` runs the
calls and notes that the server's weights change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gspo_mega.base.errors import PublishError
from gspo_mega.models.low_rank import SERVED_NAME
from gspo_mega.rollout.client.completion import NonsenseAnswer, log_prob_of, shown, version_of
from gspo_mega.rollout.client.server_client import ServerClient, ServerError
from gspo_mega.rollout.registration import Registration

RunCall = Callable[[Coroutine[Any, Any, Any]], Any]
SETTLE_SECONDS = 10.0


class HttpServerControl:
    """Controls one generation of one server. Every method blocks for at most `deadline_seconds`, and raises
    PublishError, which names server and call. After a restart of the server, every call of its old control raises
    PublishError.
    """

    def __init__(
        self, registration: Registration, client: ServerClient, run: RunCall, before_change: Callable[[], None]
    ) -> None:
        """`run` awaits a call of `client` and returns its result; any thread may use it. `before_change` is called
        before every call that changes the server's weights or their version.
        """
        self._registration = registration
        self._client = client
        self._run = run
        self._before_change = before_change

    def __repr__(self) -> str:
        return f"HttpServerControl({self.server_id}, generation {self.generation})"

    @property
    def server_id(self) -> str:
        return self._registration.server_id

    @property
    def generation(self) -> int:
        return self._registration.generation

    @property
    def tensor_parallel(self) -> int:
        return self._registration.tensor_parallel

    def pause(self, *, deadline_seconds: float) -> None:
        """End running requests with finish_reason `abort`, and let new ones wait for `resume`."""
        self._call("/pause_generation", {"mode": "abort"}, deadline_seconds)

    def pause_in_place(self, *, deadline_seconds: float) -> None:
        """Stop running requests where they are, with the cache that they have, and let new ones wait for `resume`."""
        self._call("/pause_generation", {"mode": "in_place"}, deadline_seconds)

    def resume(self, *, deadline_seconds: float) -> None:
        """Let requests run again after a pause."""
        self._call("/continue_generation", {}, deadline_seconds)

    def abort_all(self, *, deadline_seconds: float) -> None:
        """End all running requests. New ones are served."""
        self._call("/abort_request", {"abort_all": True}, deadline_seconds)

    def flush_cache(self, *, deadline_seconds: float) -> None:
        """Empty the prefix cache.

        SGLang refuses while requests run, and it may answer a request before it has put the request away. So it is
        asked again, for at most `SETTLE_SECONDS`.
        """
        self._run(self._flush_cache(deadline_seconds))

    def release_memory(self, parts: Sequence[str], *, deadline_seconds: float) -> None:
        """Free the GPU memory of some of SGLang's parts: `weights`, `kv_cache`.

        Requests may neither run nor come until the cache is back. SGLang refuses to flush its cache while requests run,
        and then fails to release memory.
        """
        self.pause(deadline_seconds=deadline_seconds)
        self.flush_cache(deadline_seconds=deadline_seconds)
        self._call("/release_memory_occupation", {"tags": list(parts)}, deadline_seconds)

    def resume_memory(self, parts: Sequence[str], *, deadline_seconds: float) -> None:
        """Allocate the GPU memory of these parts again. Weights are those that were released. Once the cache is back,
        requests are served again.
        """
        self._call("/resume_memory_occupation", {"tags": list(parts)}, deadline_seconds)
        if "kv_cache" in parts:
            self.resume(deadline_seconds=deadline_seconds)

    def update_from_disk(
        self, path: str, weight_version: int, *, deadline_seconds: float, keeps_cache: bool = False
    ) -> None:
        """Load the folder `path` as `weight_version`, then empty the cache unless `keeps_cache`.

        SGLang can do both in one call. But if a request is still being put away, an aborted one or that of its own
        health check, it fails the call although the weights are loaded. So the cache is emptied with `flush_cache`,
        which waits.
        """
        until = time.monotonic() + deadline_seconds
        body = {"model_path": str(path), "weight_version": str(weight_version), "flush_cache": False}
        self._change("/update_weights_from_disk", body, deadline_seconds)
        if not keeps_cache:
            self.flush_cache(deadline_seconds=until - time.monotonic())

    def begin_update(self, *, deadline_seconds: float) -> None:
        self._change("/begin_weight_update", {"selector": "target"}, deadline_seconds)

    def end_update(self, *, deadline_seconds: float) -> None:
        self._change("/end_weight_update", {}, deadline_seconds)

    def init_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        deadline_seconds: float,
    ) -> None:
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._update("/init_weights_update_group", body, deadline_seconds)

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        self._update("/destroy_weights_update_group", {"group_name": group_name}, deadline_seconds)

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        deadline_seconds: float,
    ) -> None:
        """Receive these tensors over the process group. SGLang also reports success for names that it does not know,
        and then changes nothing, so verify afterwards.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": "target",
        }
        self._change("/update_weights_from_distributed", body, deadline_seconds)

    def load_adapter(self, path: str, *, deadline_seconds: float) -> None:
        """Load the PEFT folder `path` in place of the adapters that the server has. Pause the server before: SGLang
        does not unload adapters before the requests that use them have ended.
        """
        until = time.monotonic() + deadline_seconds
        try:
            self._change("/unload_lora_adapter", {"lora_name": SERVED_NAME}, deadline_seconds)
        except PublishError as error:
            if "does not exist" not in str(error):  # the server has none yet
                raise
        body = {"lora_name": SERVED_NAME, "lora_path": path}
        answer = self._update("/load_lora_adapter", body, until - time.monotonic())
        loaded = answer.get("loaded_adapters")
        if not isinstance(loaded, dict) or loaded.get(SERVED_NAME) != path:
            raise self._nonsense("/load_lora_adapter", f"success, and it names {shown(loaded)}")

    def log_probs(self, token_ids: Sequence[int], adapter: str | None, *, deadline_seconds: float) -> list[float]:
        """Return the log-prob of each of these tokens except the first, given those before it, in nats at temperature
        1, with or without adapters. Do not call it while the server is paused.
        """
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = self._run(self._client.call_object("/generate", body, deadline_seconds, what="adapter scores"))
        try:
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            return [log_prob_of(entry[0], f"at place {place}") for place, entry in enumerate(entries, 1)]
        except (KeyError, TypeError, IndexError, NonsenseAnswer) as error:
            raise self._nonsense("/generate", f"no log-probs ({error}): {shown(answer)}") from error

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        body = {"new_version": str(weight_version), "abort_all_requests": False}
        self._change("/update_weight_version", body, deadline_seconds)

    def weight_version(self, *, deadline_seconds: float) -> int:
        answer = self._run(self._client.call_object("/model_info", None, deadline_seconds, method="GET"))
        try:
            return version_of(answer.get("weight_version"))
        except NonsenseAnswer as error:
            raise self._nonsense("/model_info", str(error)) from error

    def checksums(self, *, deadline_seconds: float, skip: Sequence[str] = ()) -> list[dict[str, str]]:
        """Return SGLang's hash of each tensor, except of those whose name contains one of `skip`. On a GPU, SGLang
        0.5.23 hashes and reports weights in FP8 blocks all the same.
        """
        answer = self._check_weights("checksum", deadline_seconds, skip)
        try:  # with adapters, a server names some layers' own weights `base_layer`
            found = [
                {name.replace(".base_layer.", "."): value for name, value in rank["checksums"].items()}
                for rank in answer["ranks"]
            ]
        except (AttributeError, KeyError, TypeError) as error:
            raise self._nonsense("checksum", f"no ranks with checksums: {shown(answer)}") from error
        if any(not isinstance(value, str) for rank in found for value in rank.values()):
            raise self._nonsense("checksum", f"checksums that are not texts: {shown(answer)}")
        return found

    def snapshot(self, *, deadline_seconds: float) -> None:
        self._check_weights("snapshot", deadline_seconds)

    def reset_tensors(self, *, deadline_seconds: float) -> None:
        self._before_change()
        self._check_weights("reset_tensors", deadline_seconds)

    def compare(self, *, deadline_seconds: float) -> None:
        """Compare the weights with the snapshot. SGLang forgets the snapshot if no tensor differs from it."""
        self._check_weights("compare", deadline_seconds)

    async def _flush_cache(self, deadline_seconds: float) -> None:
        begun = time.monotonic()
        while True:
            passed = time.monotonic() - begun
            try:
                await self._client.call("/flush_cache", {}, deadline_seconds - passed)
                return
            except ServerError as error:
                if error.kind != "status" or passed > min(SETTLE_SECONDS, deadline_seconds / 2):
                    raise
            await asyncio.sleep(0.02)

    def _call(self, path: str, body: dict[str, Any], deadline_seconds: float) -> None:
        self._run(self._client.call(path, body, deadline_seconds))

    def _update(
        self, path: str, body: dict[str, Any], deadline_seconds: float, what: str | None = None
    ) -> dict[str, Any]:
        return self._run(self._client.update(path, body, deadline_seconds, what))

    def _change(self, path: str, body: dict[str, Any], deadline_seconds: float) -> None:
        self._before_change()
        self._update(path, body, deadline_seconds)

    def _check_weights(self, action: str, deadline_seconds: float, skip: Sequence[str] = ()) -> dict[str, Any]:
        body: dict[str, Any] = {"action": action, "selector": "target"}
        if skip:
            body["skip_tensor_list"] = list(skip)
        return self._update("/weights_checker", body, deadline_seconds, what=f"/weights_checker {action}")

    def _nonsense(self, what: str, why: str) -> PublishError:
        return PublishError(str(ServerError(self.server_id, what, "nonsense", why)))
