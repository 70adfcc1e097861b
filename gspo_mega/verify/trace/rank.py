"""One rank's step on the fake device, by the engine's own code and in the order of `train/loop.py`: old pass, the
reference's pass, the critic's values and step, training, optimizer step, publish, a save's copies, turns.

Imported after `fake_device.load_device`. Packs are full of sequences of the longest length, as in the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.atomic_io import atomic_write_text
from gspo_mega.base.errors import GspoMegaError, ModelError
from gspo_mega.base.garbage import uncollected
from gspo_mega.base.records import MicroBatch
from gspo_mega.config import load_config
from gspo_mega.config.derived import critic_config, critic_of, needs_old_log_prob_pass, penalises_kl
from gspo_mega.config.precision import block_scale_variable
from gspo_mega.cpu import fake_device, fake_kernels
from gspo_mega.plan import Plan, plan_run
from gspo_mega.plan.gpus import DEFAULT_GPU, GPUS
from gspo_mega.verify.trace.ledger import Held, Ledger, Phase, fake_tensors, is_shown
from gspo_mega.verify.trace.packs import full_pack
from gspo_mega.verify.trace.request import TraceRequest

_DENOMINATOR = 1.0
_NUM_OPTIMIZER_STEPS = 100
_MOST_HELD = 20


def trace_rank(request: TraceRequest) -> None:
    """Trace the rank and write what it did. Raises ModelError, with the operation's name, for what cannot be traced."""
    loaded = load_config(request.config, request.overrides, "train")
    plan = plan_run(loaded, "gpu", request.model)
    config = plan.config
    name = config.cluster.gpu or DEFAULT_GPU
    gpu = GPUS[name]
    sys.path.insert(0, request.megatron)
    fake_device.pretend(gpu.capability, name, int(gpu.memory_gib * 2**30))
    ledger = Ledger()
    os.environ.update(block_scale_variable(config.fp8, os.environ, gpu.capability))
    with uncollected():
        fake_kernels.provide(ledger, Path(request.transformer_engine))
        engine_room = importlib.import_module("gspo_mega.engine.policy")
    fake_kernels.complete_megatron()
    fake_device.join_fake_world(request.rank, plan.layout.world_size)
    try:
        result = _Trace(request, plan, ledger, engine_room).run()
    except GspoMegaError:
        raise
    except Exception as error:
        raise cannot_be_traced(request.rank, error) from error
    atomic_write_text(Path(request.out), json.dumps(result))


def cannot_be_traced(rank: int, error: Exception) -> ModelError:
    """Return the error that says what ended a rank's trace: an operation's or a kernel's name, and the line that asked
    for it.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    asked = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames if is_shown(frame.f_code.co_filename)]
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    return ModelError(f"trace: rank {rank} cannot be traced: {what} ({asked[-1] if asked else ''})")


class _Trace:
    def __init__(self, request: TraceRequest, plan: Plan, ledger: Ledger, engine_room: Any) -> None:
        self.request, self.plan, self.ledger = request, plan, ledger
        self.config, self.spec, self.layout = plan.config, plan.spec, plan.layout
        self.engine_room = engine_room

    def run(self) -> dict[str, Any]:
        config, ledger = self.config, self.ledger
        parallel = config.parallel
        room = importlib.import_module("gspo_mega.engine.process_groups")
        groups = room.create_groups(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
        )
        ledger.name_groups(
            {
                field.name: getattr(groups, field.name).group
                for field in dataclasses.fields(groups)
                if field.name != "world"
            }
        )
        packs = [full_pack(config, self.layout, self.spec) for _ in range(self.request.packs)]
        self._expect(packs[0])
        with fake_tensors(), ledger:
            self._step(groups, packs)
        return self._result(packs[0])

    def _expect(self, pack: MicroBatch) -> None:
        layout, moe = self.layout, self.spec.moe
        local = pack.num_computed // layout.context
        split = layout.tensor if layout.sequence_parallel else 1
        copies = local // split * moe.experts_per_token if moe is not None else 0
        fake_kernels.expect(
            fake_kernels.Expected(
                stage_shape=(local // split, 1, self.spec.hidden_size),
                copies=copies,
                received=round(copies * self.request.imbalance) if layout.expert > 1 else copies,
                lengths=tuple(int(length) for length in np.diff(pack.cu_seqlens)),
            )
        )

    def _step(self, groups: Any, packs: list[MicroBatch]) -> None:
        config, ledger = self.config, self.ledger
        load = _loads()
        with ledger.phase("build"):
            engine = self.engine_room.PolicyEngine(config, self.spec, groups, _NUM_OPTIMIZER_STEPS)
            ledger.name_modules(engine.chunks)
            reference = self._reference(engine, groups)
            teacher = self._teacher(groups)
            critic = self._critic(groups)
            load(engine.chunks)
            engine.after_weights_loaded()
            if reference is not None:
                load(reference.chunks)
            for model in () if teacher is None else teacher.models.values():
                load(model.chunks)
            if critic is not None:
                load(critic.chunks)
                critic.after_weights_loaded()
        memory_room = importlib.import_module("gspo_mega.engine.memory")
        frozen_models = [] if reference is None or not reference.chunks else [reference]
        frozen_models += [] if teacher is None else list(teacher.models.values())
        memory = memory_room.DeviceMemory(engine, *frozen_models)
        of_critic = None if critic is None else memory_room.DeviceMemory(critic)
        self._mark(memory, of_critic)
        settings = importlib.import_module("gspo_mega.algorithm.terms").objective_settings(
            config.algorithm, config.objective
        )
        for step in ("first", "second"):
            # The optimizer has its moments only after its first step.
            old = frozen = None
            if needs_old_log_prob_pass(config):
                with ledger.phase(f"{step} old pass"):
                    old = engine.old_pass(packs)
                    engine.correct([old])
            if reference is not None:
                with ledger.phase(f"{step} reference pass"):
                    frozen = reference.log_probs(packs)
            scores = None
            if teacher is not None:
                with ledger.phase(f"{step} teacher pass"):
                    scores = teacher.score(packs)
            if critic is not None:
                self._critic_step(step, critic, packs, old, frozen)
            with ledger.phase(f"{step} training"):
                compared = frozen if config.kl.coefficient > 0 else None
                report = engine.policy_gradients(packs, settings, _DENOMINATOR, old, compared, teacher=scores)
            with ledger.phase(f"{step} optimizer"):
                engine._apply(report)
            del old, frozen, compared, scores, report
            self._mark(memory, of_critic)
        if config.lora is None:
            with ledger.phase("publish"):
                self._publish(groups, engine)
        with ledger.phase("save"):
            self._save({"policy": engine} | ({} if critic is None else {"critic": critic}))
        if config.cluster.colocated:
            with ledger.phase("rollout"):
                memory.keep(())
            memory.restore(memory_room.PARTS)

    # --- the second models -----------------------------------------------------------------------------------------

    def _reference(self, engine: Any, groups: Any) -> Any:
        """The frozen model of a KL term or penalty; None without one. Adapters need no model for it."""
        config = self.config
        if config.kl.coefficient == 0 and not penalises_kl(config.algorithm, config.critic):
            return None
        room = importlib.import_module("gspo_mega.engine.reference")
        if config.lora is not None and config.kl.reference_path is None:
            return room.FrozenBase(engine)
        reference = room.ReferencePolicy(config, self.spec, groups)
        self.ledger.name_modules(reference.chunks, "reference: ")
        return reference

    def _teacher(self, groups: Any) -> Any:
        """What scores the policy's tokens; None without any."""
        if self.config.teacher is None:
            return None
        found = importlib.import_module("gspo_mega.engine.reference").Teachers(self.config, groups)
        for model in found.models.values():
            self.ledger.name_modules(model.chunks, "teacher: ")
        return found

    def _critic(self, groups: Any) -> Any:
        """The value model; None if the algorithm has none."""
        if critic_of(self.config.algorithm, self.config.critic) is None:
            return None
        room = importlib.import_module("gspo_mega.engine.critic")
        critic = room.CriticEngine(critic_config(self.config), self.spec, groups, _NUM_OPTIMIZER_STEPS)
        self.ledger.name_modules(critic.chunks, "critic: ")
        return critic

    def _critic_step(self, step: str, critic: Any, packs: list[MicroBatch], old: Any, frozen: Any) -> None:
        """The critic's part of a step: values and advantages, then its own passes, then its own optimizer step."""
        config, ledger = self.config, self.ledger
        room = importlib.import_module("gspo_mega.train.critic_step")
        batches = importlib.import_module("gspo_mega.train.batches")
        mini_batch = batches.MiniBatch(_DENOMINATOR, packs, _DENOMINATOR)
        own = room.CriticStep(critic, critic_of(config.algorithm, config.critic), config.advantage.std_ddof)
        with ledger.phase(f"{step} values"):
            own.estimate([mini_batch], [old], [frozen])
        with contextlib.ExitStack() as now:
            now.enter_context(ledger.phase(f"{step} critic training"))
            apply = critic._apply

            def apply_in_its_phase() -> Any:
                now.close()
                now.enter_context(ledger.phase(f"{step} critic optimizer"))
                return apply()

            critic._apply = apply_in_its_phase
            try:
                own.train(0, mini_batch)
            finally:
                critic._apply = apply

    # --- what leaves the device ------------------------------------------------------------------------------------

    def _publish(self, groups: Any, engine: Any) -> None:
        """What a publish does on a rank: put whole tensors together, one at a time, and send them in buckets."""
        config = self.config
        gather: Any = importlib.import_module("gspo_mega.checkpoint.gather")
        tables = importlib.import_module("gspo_mega.models.parameter_names")
        form = importlib.import_module("gspo_mega.checkpoint.quantized").published_form(config)
        everything = tables.table_by_parameter(self.spec)
        # What other ranks own is what this one does not.
        gather.all_gather_json = lambda mine, group: [mine, [name for name in everything if name not in mine]]
        tensors = form.owned(gather.PolicyTensors(self.spec, groups, engine.chunks))
        if config.publish.method != "distributed":
            for _name, tensor in tensors:
                del tensor
            return
        room = importlib.import_module("gspo_mega.sync.broadcast_group")
        sender = room.OwnTensors(groups.world.rank)
        sender._changed = _SlowReceivers(sender.release)
        sender.open()
        sender.offer(tensors, config.publish.bucket_bytes, lambda listing: None)
        sender.end()

    def _save(self, models: dict[str, Any]) -> None:
        """What a save copies to the host before it writes."""
        load = importlib.import_module("gspo_mega.checkpoint.load")
        save = importlib.import_module("gspo_mega.checkpoint.save")
        with tempfile.TemporaryDirectory(prefix="gspo_mega_trace_") as name:
            states = {part: load.sharded_state(model, loading=False) for part, model in models.items()}
            copies = []
            for part, model in models.items():
                folder = Path(name) / part
                folder.mkdir()
                copies.append(save.copied(model, states[part], folder, self.config.checkpoint))

    def _mark(self, memory: Any, of_critic: Any) -> None:
        for part in ("parameters", "gradients", "optimizer", "reference"):
            self.ledger.mark(part, memory._tensors(part))
        # Transformer Engine keeps the weights that it has rounded to FP8.
        self.ledger.mark("FP8 copies", _fp8_copies(memory._engine.chunks))
        for model in memory._frozen:
            self.ledger.mark("reference", _fp8_copies(model.chunks))
        if of_critic is not None:
            for part in ("parameters", "gradients", "optimizer"):
                self.ledger.mark("critic", of_critic._tensors(part))
            self.ledger.mark("critic", _fp8_copies(of_critic._engine.chunks))

    # --- the result ------------------------------------------------------------------------------------------------

    def _result(self, pack: MicroBatch) -> dict[str, Any]:
        return {
            "rank": self.request.rank,
            "coordinates": dataclasses.asdict(self.layout.coordinates(self.request.rank)),
            "versions": fake_kernels.versions(),
            "pack_tokens": pack.num_computed,
            "trained_tokens": int(np.count_nonzero(pack.loss_mask)),
            "attended_length": 2 * float(pack.position_ids[pack.first_rows()].mean()) + 1,
            "packs": self.request.packs,
            "imbalance": self.request.imbalance if self.layout.expert > 1 else 1.0,
            "phases": [_phase(phase) for phase in self.ledger.phases],
        }


class _SlowReceivers(threading.Condition):
    """Makes servers have a bucket only when the next one is ready, the most that a sender ever holds: it releases the
    bucket when the sender begins to wait for that.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        super().__init__()
        self._release_bucket = release

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self._release_bucket()
        return super().wait_for(predicate, timeout)


def _loads() -> Callable[[Any], None]:
    """What fills parameters as an import of weights does, which FP8 parameters need before a step."""
    filled = importlib.import_module("gspo_mega.checkpoint.quantized").filled

    def load(chunks: Any) -> None:
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            with filled(parameter):
                pass

    return load


def _fp8_copies(chunks: Any) -> Iterator[Any]:
    for module in (module for chunk in chunks for module in chunk.modules()):
        yield from (getattr(module, "_fp8_workspaces", None) or {}).values()


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "before": phase.before,
        "peak": phase.peak,
        "after": phase.after,
        "host_before": phase.host_before,
        "host_peak": phase.host_peak,
        "host_after": phase.host_after,
        "seconds": round(phase.seconds, 1),
        "flops": dict(phase.flops),
        "flops_by_module": dict(sorted(phase.flops_by_module.items(), key=lambda one: -one[1])),
        "collectives": [
            {"operation": name, "group": group, "size": size, "calls": calls, "bytes": total}
            for (name, group, size), (calls, total) in phase.collectives.items()
        ],
        "waits": dict(phase.waits.most_common()),
        "at_peak": _by_holder(phase.at_peak),
        "host_at_peak": _by_holder(phase.host_at_peak),
        "left": _by_holder(phase.left),
        "largest": [dataclasses.asdict(held) for held in _largest(phase.at_peak)],
    }


def _largest(held: list[Held]) -> Iterator[Held]:
    return iter(sorted(held, key=lambda one: -one.num_bytes)[:_MOST_HELD])


def _by_holder(held: list[Held]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str], list[int]] = {}
    for one in held:
        entry = sums.setdefault((one.holder, "" if one.holder.startswith("state: ") else one.where), [0, 0])
        entry[0] += one.num_bytes
        entry[1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return [
        {"holder": holder, "where": where, "bytes": total, "tensors": count}
        for (holder, where), (total, count) in ordered
    ]
