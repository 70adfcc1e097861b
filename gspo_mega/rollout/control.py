"""Blocking, thread-safe control of one server's weights: what the publisher is handed.

Owns the bridge from the publisher's threads to the pool's event loop, and the rule that a server whose weights are
being changed is given no work until the pool is told (`ServerPool.commit`) that it holds a version in full.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from gspo_mega.errors import PublishError
from gspo_mega.rollout.client import ServerError

if TYPE_CHECKING:
    from gspo_mega.rollout.pool import Entry, ServerPool


class HttpServerControl:
    """One generation of one server. Every method blocks up to `deadline_seconds` and raises PublishError naming server
    and call. Once the server is restarted its old control only raises."""

    def __init__(self, pool: ServerPool, entry: Entry) -> None:
        self._pool = pool
        self._entry = entry

    def __repr__(self) -> str:
        return f"HttpServerControl({self.server_id}, generation {self.generation})"

    @property
    def server_id(self) -> str:
        return self._entry.server_id

    @property
    def generation(self) -> int:
        return self._entry.registration.generation

    @property
    def tensor_parallel(self) -> int:
        return self._entry.registration.tensor_parallel

    def pause(self, *, deadline_seconds: float) -> None:
        """End running requests (their tokens so far are of the old weights and are sampled again) and hold new ones."""
        self._run(self._entry.client.pause("abort", deadline_seconds=deadline_seconds))

    def resume(self, *, deadline_seconds: float) -> None:
        self._run(self._entry.client.resume(deadline_seconds=deadline_seconds))

    def abort_all(self, *, deadline_seconds: float) -> None:
        self._run(self._entry.client.abort_all(deadline_seconds=deadline_seconds))

    def flush_cache(self, *, deadline_seconds: float) -> None:
        self._run(self._entry.client.flush_cache(deadline_seconds=deadline_seconds))

    def update_from_disk(self, path: str, weight_version: int, *, deadline_seconds: float) -> None:
        self._change(self._entry.client.update_from_disk(str(path), weight_version, deadline_seconds=deadline_seconds))

    def begin_update(self, *, deadline_seconds: float) -> None:
        self._change(self._entry.client.begin_update(deadline_seconds=deadline_seconds))

    def end_update(self, *, deadline_seconds: float) -> None:
        self._change(self._entry.client.end_update(deadline_seconds=deadline_seconds))

    def init_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        *,
        deadline_seconds: float,
    ) -> None:
        self._run(
            self._entry.client.init_group(
                master_address=master_address,
                master_port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=group_name,
                backend=backend,
                deadline_seconds=deadline_seconds,
            )
        )

    def destroy_group(self, group_name: str, *, deadline_seconds: float) -> None:
        self._run(self._entry.client.destroy_group(group_name, deadline_seconds=deadline_seconds))

    def update_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        *,
        deadline_seconds: float,
    ) -> None:
        """Blocks while the server receives the broadcasts that the caller sends meanwhile from another thread."""
        self._change(
            self._entry.client.update_from_distributed(
                names, dtypes, shapes, group_name, deadline_seconds=deadline_seconds
            )
        )

    def set_weight_version(self, weight_version: int, *, deadline_seconds: float) -> None:
        self._change(self._entry.client.set_weight_version(weight_version, deadline_seconds=deadline_seconds))

    def weight_version(self, *, deadline_seconds: float) -> int:
        return self._run(self._entry.client.weight_version(deadline_seconds=deadline_seconds))

    def checksums(self, *, deadline_seconds: float) -> list[dict[str, str]]:
        """Tensor name -> hash as the server holds it, one mapping for each of its ranks."""
        return self._run(self._entry.client.checksums(deadline_seconds=deadline_seconds))

    def snapshot(self, *, deadline_seconds: float) -> None:
        self._run(self._entry.client.snapshot(deadline_seconds=deadline_seconds))

    def reset_tensors(self, *, deadline_seconds: float) -> None:
        """Overwrite every weight of the server with random numbers."""
        self._change(self._entry.client.reset_tensors(deadline_seconds=deadline_seconds))

    def compare(self, *, deadline_seconds: float) -> None:
        """Raises PublishError naming the tensors that differ from the snapshot."""
        self._run(self._entry.client.compare(deadline_seconds=deadline_seconds))

    def _change(self, call: Coroutine[Any, Any, Any]) -> Any:
        self._entry.verified_version = None
        return self._run(call)

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._entry.gone.is_set():
            call.close()
            raise PublishError(f"{self.server_id}: generation {self.generation} of it is gone")
        try:
            return self._pool.loop.run(self._pool.run_on(self._entry, call))
        except ServerError as error:
            raise PublishError(str(error)) from error
