"""One rank's step on the fake device, by the engine's own code: old pass, training, optimizer step, publish, turns.

Imported after `fake_device.load_device`. Packs are full of sequences of the longest length, as in the plan.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gspo_mega.base.atomic_io import atomic_write_text
from gspo_mega.base.errors import GspoMegaError, ModelError
from gspo_mega.base.records import MicroBatch
from gspo_mega.config import load_config
from gspo_mega.config.derived import block_scale_variable, needs_old_log_prob_pass
from gspo_mega.cpu import fake_device, fake_kernels
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.plan import Plan, plan_run
from gspo_mega.plan.gpus import DEFAULT_GPU, GPUS
from gspo_mega.verify.trace.ledger import Held, Ledger, Phase, fake_tensors
from gspo_mega.verify.trace.request import TraceRequest

_PROMPT_TOKENS = 8
_DENOMINATOR = 1.0
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
    os.environ.update(block_scale_variable(config, os.environ, gpu.capability))
    fake_kernels.provide(ledger, Path(request.transformer_engine))
    engine_room = importlib.import_module("gspo_mega.engine.policy")
    fake_kernels.complete_megatron()
    fake_device.join_fake_world(request.rank, plan.layout.world_size)
    try:
        result = _Trace(request, plan, ledger, engine_room).run()
    except GspoMegaError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)
        where = next(
            (f"{f.filename}:{f.lineno}" for f in reversed(last) if "/site-packages/torch/" not in f.filename), ""
        )
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"trace: rank {request.rank} cannot be traced: {what} ({where})") from error
    atomic_write_text(Path(request.out), json.dumps(result))


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
        packs = [self._pack() for _ in range(self.request.packs)]
        self._expect(packs[0])
        with fake_tensors(), ledger:
            self._step(groups, packs)
        return self._result(packs[0])

    def _pack(self) -> MicroBatch:
        """A full pack: as many sequences of the longest length as it takes, and a shorter one for the rest."""
        config, layout = self.config, self.layout
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        tokens = config.batch.micro_batch_tokens
        longest = min(longest, tokens)
        lengths = [longest] * (tokens // longest)
        if tokens % longest > 2 * _PROMPT_TOKENS * layout.sequence_multiple_tokens:
            lengths.append(tokens % longest)
        moe = self.spec.moe
        rng = np.random.default_rng(0)
        rows = []
        for length in lengths:
            active = length - _PROMPT_TOKENS
            row: dict[str, Any] = dict(
                prompt_token_ids=rng.integers(0, self.spec.vocab_size, _PROMPT_TOKENS),
                response_token_ids=rng.integers(0, self.spec.vocab_size, active),
                response_mask=np.ones(active),
                rollout_log_probs=np.full(active, -1.0),
                advantage=1.0,
                group_size=float(config.batch.group_size),
            )
            rows.append(row)
        pack = build_micro_batch(
            rows,
            list(range(len(rows))),
            layout.sequence_multiple_tokens,
            ("advantage", "group_size"),
            layout.pack_multiple_tokens,
        )
        if moe is not None and config.moe.routing_replay == "R3":
            layers = sum(self.spec.has_experts(index) for index in range(self.spec.num_layers))
            pack.routed_experts = np.zeros((pack.num_tokens, layers, moe.experts_per_token), np.int16)
            held = [index for index in range(self.spec.num_layers) if self.spec.has_experts(index)]
            pack.routed_layers = np.asarray(held)
        return pack

    def _expect(self, pack: MicroBatch) -> None:
        layout, moe = self.layout, self.spec.moe
        local = pack.num_tokens // layout.context
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
        with ledger.phase("build"):
            engine = self.engine_room.PolicyEngine(config, self.spec, groups, num_optimizer_steps=100)
            ledger.name_modules(engine.chunks)
            engine.after_weights_loaded()
        memory_room = importlib.import_module("gspo_mega.engine.memory")
        memory = memory_room.DeviceMemory(engine)
        self._mark(memory)
        settings = importlib.import_module("gspo_mega.algorithm.terms").objective_settings(
            config.algorithm, config.objective
        )
        for step in ("first", "second"):
            # The optimizer has its moments only after its first step.
            old = None
            if needs_old_log_prob_pass(config):
                with ledger.phase(f"{step} old pass"):
                    old = engine.old_pass(packs)
                    engine.correct([old])
            with ledger.phase(f"{step} training"):
                report = engine.policy_gradients(packs, settings, _DENOMINATOR, old)
            with ledger.phase(f"{step} optimizer"):
                engine._apply(report)
            del old, report
            self._mark(memory)
        if config.lora is None:
            with ledger.phase("publish"):
                self._gather(groups, engine)
        if config.cluster.colocated:
            with ledger.phase("rollout"):
                memory.keep(())
            memory.restore(memory_room.PARTS)

    def _gather(self, groups: Any, engine: Any) -> None:
        """What every publish does on a rank: put whole tensors together, one at a time."""
        gather: Any = importlib.import_module("gspo_mega.checkpoint.gather")
        tables = importlib.import_module("gspo_mega.models.parameter_names")
        everything = tables.table_by_parameter(self.spec)
        # What other ranks own is what this one does not.
        gather.all_gather_json = lambda mine, group: [mine, [name for name in everything if name not in mine]]
        dtype = engine.parameter_dtype()
        for _name, tensor in gather.PolicyTensors(self.spec, groups, engine.chunks).owned(dtype):
            del tensor

    def _mark(self, memory: Any) -> None:
        for part in ("parameters", "gradients", "optimizer"):
            self.ledger.mark(part, memory._tensors(part))
        # Transformer Engine keeps the weights that it has rounded to FP8.
        modules = (module for chunk in memory._engine.chunks for module in chunk.modules())
        copies = (getattr(module, "_fp8_workspaces", None) or {} for module in modules)
        self.ledger.mark("FP8 copies", (copy for held in copies for copy in held.values()))

    # --- the result ------------------------------------------------------------------------------------------------

    def _result(self, pack: MicroBatch) -> dict[str, Any]:
        return {
            "rank": self.request.rank,
            "coordinates": dataclasses.asdict(self.layout.coordinates(self.request.rank)),
            "versions": fake_kernels.versions(),
            "pack_tokens": pack.num_tokens,
            "packs": self.request.packs,
            "imbalance": self.request.imbalance if self.layout.expert > 1 else 1.0,
            "phases": [_phase(phase) for phase in self.ledger.phases],
        }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "before": phase.before,
        "peak": phase.peak,
        "after": phase.after,
        "host_peak": phase.host_peak,
        "seconds": round(phase.seconds, 1),
        "flops": dict(phase.flops),
        "flops_by_module": dict(sorted(phase.flops_by_module.items(), key=lambda one: -one[1])),
        "collectives": [
            {"operation": name, "group": group, "size": size, "calls": calls, "bytes": total}
            for (name, group, size), (calls, total) in phase.collectives.items()
        ],
        "waits": dict(phase.waits.most_common()),
        "at_peak": _by_holder(phase.at_peak),
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
