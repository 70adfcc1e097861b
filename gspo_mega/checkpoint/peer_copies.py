"""Copies of every rank's training state in memory after each step: its own, and one at a neighbour
(`checkpoint.peer_copies`).

A checkpoint can be read in any layout. A copy holds a rank's tensors as they are, for the same rank of the same layout,
so only neighbours exchange anything. First come these tensors (`live_state`, `fill`) and the file that they make, then
`PeerCopies`: it copies while the next step samples, and finds the newest step of which every rank's copy is whole.
`memory_files.py` has the files. With several nodes the neighbour is on another one.

The own copy is what a rank that is started again goes on from while its machine lives, the neighbour's what replaces it
when its machine is gone. Of either there are two, so that a death while one is written leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gspo_mega.base import failpoints
from gspo_mega.base.run_folder import Attempt, RunFolder
from gspo_mega.base.untrusted import read_text
from gspo_mega.checkpoint import memory_files
from gspo_mega.checkpoint.collectives import all_gather_json, broadcast_json
from gspo_mega.checkpoint.load import (
    CRITIC_FOLDER,
    TrainedModel,
    TrainState,
    base_stamp,
    layout_of,
    model_of,
    random_state,
    restore_random_state,
)
from gspo_mega.checkpoint.memory_files import PLACES, HeldCopy, Place
from gspo_mega.checkpoint.tensor_sources import MEGATRON_FOLDER
from gspo_mega.config.deadlines import COLLECTIVE_SECONDS
from gspo_mega.config.schema import Config
from gspo_mega.config.schema.section import may_change
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_FORMAT = 1
_ALIGNED_BYTES, _SENT_BYTES = 64, 2**26
# Sections whose keys may change between a checkpoint's layout and another, and which decide what a rank holds.
_OF_THE_LAYOUT = ("parallel", "optimizer", "precision", "fp8", "engine", "lora", "critic")

# --- a rank's tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LiveState:
    """A rank's training state. `fixed`: tensors that a new process has too, by name: weights, persistent buffers and
    the optimizer's own parameters; they share the model's memory. `made`: those that training makes, moments and Adam's
    step counts, and the FP8 scales and random states, which are copies. `numbers`: the rest of the optimizers' state.
    """

    fixed: dict[str, torch.Tensor]
    made: dict[str, torch.Tensor]
    numbers: dict[str, float]


def live_state(models: dict[str, TrainedModel]) -> LiveState:
    """Return this rank's training state of the models, by the names of their folders in a checkpoint."""
    fixed: dict[str, torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}
    for folder, model in models.items():
        fixed |= {f"{folder}/{name}": tensor for name, tensor in _held_tensors(model)}
        weights = {_memory(tensor) for tensor in fixed.values()}
        for name, part, main in _optimized(model):
            if _memory(main) not in weights:  # an fp32 parameter is its own copy
                fixed[f"{folder}/main/{name}"] = main.detach()
            for key, value in part.optimizer.state.get(main, {}).items():
                if isinstance(value, torch.Tensor):
                    made[f"{folder}/state/{name}/{key}"] = value.detach()
                else:
                    numbers[f"{folder}/state/{name}/{key}"] = value
            for key, value in _moment_scales(part).get(main, {}).items():
                made[f"{folder}/moment_scale/{name}/{key}"] = value.detach()
        for name, group in _groups(model):
            if isinstance(step := group.get("step"), int | float):
                numbers[f"{folder}/group/{name}/step"] = step
        made |= {f"{folder}/scale/{name}": tensor for name, tensor in model.scales.state().items()}
    made |= {f"random/{name}": tensor for name, tensor in random_state().items()}
    return LiveState(fixed, made, numbers)


def _held_tensors(model: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights and persistent buffers of the model's chunks; with `lora` only what is trained."""
    for index, chunk in enumerate(model.chunks):
        chunk.await_parameters()
        for name, parameter in chunk.named_parameters():
            if model.config.lora is None or parameter.requires_grad:
                yield f"weight/{index}/{name}", parameter.detach()
        for name, module in chunk.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield f"buffer/{index}/{name}/{key}", buffer.detach()


def _optimized(model: TrainedModel) -> Iterator[tuple[str, MegatronOptimizer, torch.Tensor]]:
    """Yield (name, optimizer, parameter) of every parameter that an optimizer of this rank steps."""
    for index, part in enumerate(model.optimizer.chained_optimizers):
        mains = [main for group in _own_groups(part) for main in group["params"]]
        yield from ((f"{index}/{place}", part, main) for place, main in enumerate(mains))


def _groups(model: TrainedModel) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, part in enumerate(model.optimizer.chained_optimizers):
        yield from ((f"{index}/{place}", group) for place, group in enumerate(_own_groups(part)))


def _own_groups(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return the groups of the inner optimizer; none on a rank that steps nothing."""
    return [] if part.optimizer is None else part.optimizer.param_groups


def _moment_scales(part: MegatronOptimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """Return what Transformer Engine's Adam multiplies its moments below fp32 with, by parameter and moment."""
    return getattr(part.optimizer, "_scales", {})


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def fill(models: dict[str, TrainedModel], tensors: dict[str, torch.Tensor], numbers: dict[str, float]) -> None:
    """Give new models the training state of a copy, on the host, without their schedules' positions. The copy fits them
    (`misfit`). Optimizers may not have made a step.
    """
    for name, tensor in live_state(models).fixed.items():
        tensor.copy_(tensors[name])
    kept: dict[str, dict[str, Any]] = {}  # by what they belong to
    for name, value in {**tensors, **numbers}.items():
        owner, _, key = name.rpartition("/")
        kept.setdefault(owner, {})[sys.intern(key)] = value  # pickle writes a key again for each string object
    for folder, model in models.items():
        for name, part, main in _optimized(model):
            for key, value in kept.get(f"{folder}/state/{name}", {}).items():
                if isinstance(value, torch.Tensor):
                    # A count of steps may be on the host while the moments are on the GPU.
                    value = value.to(main.device if value.shape == main.shape else value.device, copy=True)
                part.optimizer.state[main][key] = value
            for key, value in kept.get(f"{folder}/moment_scale/{name}", {}).items():
                _moment_scales(part).setdefault(main, {})[key] = value.to(main.device, copy=True)
        for name, group in _groups(model):
            group.update(kept.get(f"{folder}/group/{name}", {}))
        model.scales.load(_below(f"{folder}/scale/", tensors))
    restore_random_state({name: value.clone() for name, value in _below("random/", tensors).items()})


def _below(begin: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}


def misfit(models: dict[str, TrainedModel], tensors: dict[str, torch.Tensor]) -> str | None:
    """Return why a copy is not one of these models on this rank, or None if it is."""
    wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in live_state(models).fixed.items()}
    kinds = tuple(f"{folder}/{kind}/" for folder in models for kind in ("weight", "buffer", "main"))
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items() if name.startswith(kinds)}
    different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return f"its {different[0]} is another" if different else None


# --- a copy as a file ----------------------------------------------------------------------------------------


class Layout:
    """Where the tensors of a copy are in its file: eight bytes with the length of a JSON object, the object, and the
    tensors. `num_bytes`: of the whole file; `tensor_bytes`: of the tensors.
    """

    def __init__(self, state: LiveState, record: dict[str, Any]) -> None:
        self._tensors = state.fixed | state.made
        offset, entries = 0, {}
        for name, tensor in self._tensors.items():
            entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]
            offset += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        head = json.dumps({"format": _FORMAT, **record, "numbers": state.numbers, "tensors": entries}).encode()
        start = -(-(8 + len(head)) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._head = (len(head).to_bytes(8, "little") + head).ljust(start)
        self._places = {name: start + entry[2] for name, entry in entries.items()}
        self.num_bytes, self.tensor_bytes = start + offset, offset

    @torch.no_grad()
    def write(self, content: mmap.mmap) -> None:
        """Copy the tensors, which may be on any device, into the memory of a file of `num_bytes`."""
        content[: len(self._head)] = self._head
        memory = torch.frombuffer(content, dtype=torch.uint8)
        for name, tensor in self._tensors.items():
            place = memory[self._places[name] : self._places[name] + tensor.nbytes]
            place.view(tensor.dtype).copy_(tensor.reshape(-1))


def read_file(content: mmap.mmap) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return (record, tensors by name, which share the file's memory) of a copy. Raises ValueError for another
    format.
    """
    length = int.from_bytes(content[:8], "little")
    record = json.loads(content[8 : 8 + length])
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError("another release wrote it")
    start = -(-(8 + length) // _ALIGNED_BYTES) * _ALIGNED_BYTES
    memory, tensors = torch.frombuffer(content, dtype=torch.uint8), {}
    for name, (kind, shape, offset) in record.pop("tensors").items():
        dtype = getattr(torch, kind)
        num_bytes = prod(shape) * dtype.itemsize
        tensors[name] = memory[start + offset : start + offset + num_bytes].view(dtype).view(shape)
    return record, tensors


# --- all ranks' copies ---------------------------------------------------------------------------------------


@dataclass
class _Copying:
    """A copy on its way. `num_bytes`: of its tensors; `problem`: what went wrong in the thread; `done_at`: by
    `time.monotonic`.
    """

    step: int
    num_bytes: int
    began_at: float
    pause_seconds: float = 0.0
    done_at: float | None = None
    problem: str | None = None
    thread: threading.Thread | None = None


class PeerCopies:
    """The copies of one run; every rank has one.

    Attributes:
        restored_step: the step whose copies this start of the run goes on from; None if it does not.
    """

    def __init__(
        self, run_folder: RunFolder, engine: PolicyEngine, critic: CriticEngine | None = None, apart: int = 1
    ) -> None:
        """`apart`: a neighbour is so many ranks further: the ranks of a machine if there are several. Collective."""
        groups = engine.groups
        self._engine, self._host, self._rank = engine, groups.host, groups.world.rank
        self._models: dict[str, TrainedModel] = {MEGATRON_FOLDER: engine}
        if critic is not None:
            self._models[CRITIC_FOLDER] = critic
        self._run, self._folder = run_folder.path, memory_files.copies_folder(run_folder.path)
        self._to, self._from = (self._rank + apart) % self._host.size, (self._rank - apart) % self._host.size
        # A group of its own: a thread uses it while other groups are in use. (torch's annotation of it allows
        # None and a number, too.)
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
        starts = map(_token, run_folder.attempts()) if groups.is_lead else ()
        self._starts: list[str] = broadcast_json([one for one in starts if one], self._host)
        self._stamp = {"layout": layout_of(groups), "settings": settings_digest(engine.config)}
        self._stamp |= {name: model_of(one) for name, one in self._models.items()} | {"base": base_stamp(engine)}
        self._copying: _Copying | None = None
        self._whole: int | None = None
        self._told: set[str] = set()
        self.restored_step: int | None = None
        self._metrics: dict[str, float] = {}

    # --- copying ---

    def keep(self, state: TrainState) -> list[str]:
        """Copy this rank's state after a step into its own memory, and begin to send it to the neighbour. Collective.

        Returns lines for the user about copies that could not be made; the run goes on without them. Training may go on
        when this returns.
        """
        began = time.monotonic()
        problems = self.finish()
        record = {"rank": self._rank, "state": asdict(state), "start": self._starts[-1:], "stamp": self._stamp}
        layout = Layout(live_state(self._models), record)
        sizes = all_gather_json(layout.num_bytes, self._host)
        parts: dict[Place, tuple[Path, mmap.mmap]] = {}
        refused = None
        try:
            memory_files.make_folder(self._folder)
            for place, rank in zip(PLACES, (self._rank, self._from), strict=True):
                part = memory_files.begin_part(self._folder, rank, place, sizes[rank], self._whole)
                parts[place] = part, memory_files.mapped(part)
        except OSError as error:
            refused = f"rank {self._rank}: {error.strerror or error}"
        refusals = [one for one in all_gather_json(refused, self._host) if one]
        if refusals:
            return [*problems, *self._say_once(state.step, refusals)]
        layout.write(parts["own"][1])
        failpoints.reached("copy.captured")
        copying = self._copying = _Copying(state.step, layout.tensor_bytes, began)
        copying.pause_seconds = time.monotonic() - began
        copying.thread = threading.Thread(target=self._exchange, args=(copying, parts), name="peer copy", daemon=True)
        copying.thread.start()
        return problems

    def _exchange(self, copying: _Copying, parts: dict[Place, tuple[Path, mmap.mmap]]) -> None:
        """Send the own copy, receive the neighbour's, and give both their names. In the thread."""
        (own_part, own), (peer_part, peer) = parts["own"], parts["peer"]
        try:
            digest = memory_files.digest_of(own)
            mine = HeldCopy(self._rank, "own", copying.step, digest)
            try:
                memory_files.commit_part(self._folder, own_part, mine)
            except OSError as error:  # the neighbour waits for what this rank sends
                copying.problem = f"rank {self._rank}: {error.strerror or error}"
            checksum = torch.empty(32, dtype=torch.uint8)
            sent = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
            self._send_and_receive(sent, checksum, self._to, self._from)
            self._send_and_receive(_memory_of(own), _memory_of(peer), self._to, self._from)
            failpoints.reached("copy.arrived")
            expected = bytes(checksum.numpy()).hex()
            if memory_files.digest_of(peer) != expected:
                copying.problem = f"rank {self._rank}: the copy of rank {self._from} arrived with another checksum"
                return
            memory_files.commit_part(self._folder, peer_part, HeldCopy(self._from, "peer", copying.step, expected))
            copying.done_at = time.monotonic()
        except (OSError, RuntimeError) as error:
            copying.problem = f"rank {self._rank}: {str(error).splitlines()[0]}"

    def _send_and_receive(
        self, outgoing: torch.Tensor | None, incoming: torch.Tensor | None, to: int, source: int
    ) -> None:
        """Send and receive bytes piece by piece, at the same time."""
        sent, received = (0 if one is None else one.numel() for one in (outgoing, incoming))
        for start in range(0, max(sent, received), _SENT_BYTES):
            works = []
            if outgoing is not None and start < sent:
                works.append(dist.isend(outgoing[start : start + _SENT_BYTES], to, group=self._group))
            if incoming is not None and start < received:
                works.append(dist.irecv(incoming[start : start + _SENT_BYTES], source, group=self._group))
            for work in works:
                if work is not None:
                    work.wait()

    def finish(self) -> list[str]:
        """Wait for the copy that is on its way, if there is one. Collective. Returns lines as `keep` does."""
        copying, self._copying = self._copying, None
        if copying is None:
            return []
        assert copying.thread is not None
        copying.thread.join()
        seconds = None if copying.done_at is None else copying.done_at - copying.began_at
        told = all_gather_json([copying.problem, copying.num_bytes, copying.pause_seconds, seconds or 0.0], self._host)
        problems, sizes, pauses, times = zip(*told, strict=True)
        if any(problems):
            return self._say_once(copying.step, [one for one in problems if one])
        self._whole = copying.step
        self._metrics = {
            "checkpoint/peer_bytes": float(max(sizes)),
            "time/checkpoint/peer_pause_seconds": max(pauses),
            "time/checkpoint/peer_seconds": max(times),
        }
        return []

    def take_metrics(self) -> dict[str, float]:
        """Return the figures of the last copy that every rank has, by name, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _say_once(self, step: int, problems: list[str]) -> list[str]:
        """Return a line about a copy that failed, or none if such a line was returned before."""
        new = [one for one in problems if one not in self._told]
        self._told.update(new)
        after = f"those of step {self._whole} stay" if self._whole is not None else "a failure costs what it did before"
        return [f"warning  no copy in memory of step {step}: {'; '.join(new[:3])}; {after}"] if new else []

    def end(self) -> None:
        """Remove all copies: the run ended in order, with a checkpoint. Collective."""
        self.finish()
        memory_files.remove_copies(self._run)

    # --- going on from copies ---

    def restore(self, saved_step: int) -> tuple[TrainState | None, str]:
        """Fill the models from the newest step of which every rank has a whole copy, its own or its neighbour's.
        Collective. `saved_step`: the step of the last checkpoint, 0 without one; older copies are not used.

        Returns (the run's state, which step and whose copies were used), or (None, why there is none to go on from).
        With `lora` the weights that are not trained must be there. What is not used is removed.
        """
        held = memory_files.held_copies(self._folder)
        inventory = [
            [HeldCopy(*entry) for entry in part]
            for part in all_gather_json([[c.rank, c.place, c.step, c.digest] for c in held], self._host)
        ]
        reasons: list[str] = []
        unusable: set[tuple[int, HeldCopy]] = set()
        while True:
            chosen = self._choose(inventory, unusable, saved_step)
            if isinstance(chosen, str):
                reasons.append(chosen)
                self._drop(held, None)
                return None, "; ".join(dict.fromkeys(reasons))
            failpoints.reached("copy.chosen")
            _, copy = chosen[self._rank]
            problem, record, tensors = self._fetch(chosen)
            problems = all_gather_json(problem, self._host)
            if not any(problems):
                break
            for rank, found in enumerate(problems):
                if found:
                    unusable.add(chosen[rank])
                    reasons.append(f"rank {rank}: {found}")
        fill(self._models, tensors, record["numbers"])
        state = TrainState(**broadcast_json(record["state"], self._host))
        for name, model in self._models.items():
            num_steps = state.num_critic_steps if name == CRITIC_FOLDER else state.num_optimizer_steps
            if num_steps:
                model.scheduler.step(increment=num_steps)
        self._drop(held, copy.step)
        self._whole = self.restored_step = copy.step
        others = [rank for rank, (_, one) in enumerate(chosen) if one.place == "peer"]
        whose = f", of rank {', '.join(map(str, others))} from the neighbour's" if others else ""
        return state, f"step {copy.step}{whose}" + (f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else "")

    def _choose(
        self, inventory: list[list[HeldCopy]], unusable: set[tuple[int, HeldCopy]], saved_step: int
    ) -> list[tuple[int, HeldCopy]] | str:
        """Return, for each rank, (the rank that has a copy of it on its machine, the copy), all of the newest step that
        every rank has; or why there is no such step. All ranks come to the same result.
        """
        ranks = range(self._host.size)
        found: dict[tuple[int, int], list[tuple[int, HeldCopy]]] = {}
        for holder, copies in enumerate(inventory):
            for copy in copies:
                if (holder, copy) not in unusable and copy.rank in ranks:
                    found.setdefault((copy.step, copy.rank), []).append((holder, copy))
        steps = [step for step in {step for step, _ in found} if all((step, rank) in found for rank in ranks)]
        if not steps:
            without = [rank for rank in ranks if not any(one == rank for _, one in found)]
            if without:
                return f"rank {', '.join(map(str, without))}: neither its own copy nor its neighbour's is there"
            return "no step has a whole copy of every rank"
        if max(steps) < saved_step:
            return f"the newest copies are of step {max(steps)}, and the checkpoint is newer"

        def order(rank: int, one: tuple[int, HeldCopy]) -> tuple[bool, bool, int]:
            return one[0] != rank, one[1].place != "own", one[0]

        return [min(found[max(steps), rank], key=lambda one: order(rank, one)) for rank in ranks]

    def _fetch(self, chosen: list[tuple[int, HeldCopy]]) -> tuple[str | None, dict[str, Any], dict[str, torch.Tensor]]:
        """Bring this rank's copy here and check it. Returns (why it cannot be used, its record, its tensors)."""
        content: mmap.mmap | None = None
        problem: str | None = None
        for rank, (holder, copy) in enumerate(chosen):
            try:
                if holder == rank == self._rank:
                    content = memory_files.mapped(self._folder / copy.name)
                elif self._rank in (holder, rank):
                    content = self._pass_on(holder, rank, copy) or content
            except OSError as error:
                problem = error.strerror or str(error)
        _, own = chosen[self._rank]
        if problem is None and (content is None or memory_files.digest_of(content) != own.digest):
            problem = f"its {own.place} copy of step {own.step} has another checksum"
        if problem is not None or content is None:
            return problem, {}, {}
        try:
            record, tensors = read_file(content)
        except (ValueError, KeyError, AttributeError, RuntimeError) as error:
            return f"its copy of step {own.step} cannot be read: {error}", {}, {}
        if not set(record["start"]) & set(self._starts):
            problem = f"its copy of step {own.step} is of another run in a folder of this name"
        elif record["stamp"] != json.loads(json.dumps(self._stamp)):
            problem = f"its copy of step {own.step} is of another layout, model or configuration"
        else:
            problem = misfit(self._models, tensors)
        return problem, record, tensors

    def _pass_on(self, holder: int, rank: int, copy: HeldCopy) -> mmap.mmap | None:
        """Send a copy from one machine to another: `holder` calls this, and `rank`, which gets the content."""
        size = torch.zeros(1, dtype=torch.int64)
        if self._rank == holder:
            content: mmap.mmap | None = None
            with suppress(OSError):  # it is gone: nothing is sent
                content = memory_files.mapped(self._folder / copy.name)
                size[0] = len(content)
            self._send_and_receive(size.view(torch.uint8), None, rank, holder)
            if content is not None:
                self._send_and_receive(_memory_of(content), None, rank, holder)
            return None
        self._send_and_receive(None, size.view(torch.uint8), rank, holder)
        if not int(size):
            return None
        content = mmap.mmap(-1, int(size))
        self._send_and_receive(None, _memory_of(content), rank, holder)
        return content

    def _drop(self, held: list[HeldCopy], step: int | None) -> None:
        """Remove this rank's files of other steps from `held`, and those of ranks that are not there. Collective."""
        all_gather_json(None, self._host)  # nobody reads them any more
        own = (self._rank, "own"), (self._from, "peer")
        for copy in held:
            if copy.step != step and ((copy.rank, copy.place) in own or copy.rank >= self._host.size):
                with suppress(OSError):  # the next copies take over its memory
                    memory_files.drop_copy(self._folder, copy)
        all_gather_json(None, self._host)


def _memory_of(content: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)


def _token(attempt: Attempt) -> str | None:
    """Return what distinguishes a start of this run from those of every other run: no other has its key."""
    try:
        return hashlib.sha256(read_text(attempt.api_key_file).encode()).hexdigest()
    except OSError:
        return None


def settings_digest(config: Config) -> str:
    """Return a digest of the settings that may not differ between a copy and the run that goes on from it: those that
    may not differ from a checkpoint's, and those of the layout.
    """

    def kept(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and value:
                found |= kept(value, f"{key}.")
            elif key.partition(".")[0] in _OF_THE_LAYOUT or not may_change(Config, key):
                found[key] = value
        return found

    return hashlib.sha256(json.dumps(kept(config.model_dump(mode="json")), sort_keys=True).encode()).hexdigest()
