"""A plan for programs: one JSON object, or shell variables for a job script."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

from gspo_mega.plan.disk import disk_notices, disk_use
from gspo_mega.plan.estimate import Estimate
from gspo_mega.plan.gpus import ASSUMPTIONS
from gspo_mega.plan.hand_out import hand_out
from gspo_mega.plan.resolve import Plan
from gspo_mega.plan.stop_deadlines import signal_seconds


def plan_json(plan: Plan, figures: Estimate) -> str:
    """Everything the report says, in bytes, seconds and elements; estimates are under `memory` and `time`."""
    memory, time = figures.memory, figures.time
    disk = disk_use(plan.config, plan.spec, figures.counts.total, figures.checkpoint_bytes)
    handed_out = hand_out(plan.config, plan.spec, plan.layout)
    value: dict[str, Any] = {
        "run": {"name": plan.config.run.name, "dir": plan.config.run.dir},
        "model": {
            "path": str(plan.model),
            "family": plan.spec.family,
            "parameters": figures.counts.total,
            "active_parameters": figures.counts.active,
            "forward_flops_per_token": figures.flops_per_token,
        },
        "cluster": plan.config.cluster.model_dump(),
        "layout": asdict(plan.layout),
        "groups": [asdict(span) for span in figures.spans],
        "servers": {
            "num_servers": plan.config.server.num_servers,
            "tensor": plan.config.server.tensor,
            "nodes_per_server": plan.config.server.num_nodes,
            "expert": plan.config.server.expert,
            "attention_data": plan.config.server.attention_data,
            "num_gpus": figures.servers.num_gpus,
            "nodes": figures.servers.nodes,
            "weights": plan.verification,
            "memory_bytes": asdict(figures.servers.memory) if figures.servers.memory is not None else None,
        },
        "reward_models": [asdict(needs) | {"num_gpus": needs.num_gpus} for needs in figures.rewards],
        "state": [
            {"stage": stage, "elements": asdict(state), "bytes": asdict(size)}
            for stage, (state, size) in enumerate(figures.states)
        ],
        "critic_state": [
            {"stage": stage, "elements": asdict(state), "bytes": asdict(size)}
            for stage, (state, size) in enumerate(figures.critic_states)
        ],
        "memory": None,
        "time": None,
        "checkpoint": {
            "bytes": figures.checkpoint_bytes,
            "save_seconds": figures.save_seconds,
            "stop_seconds": figures.stop_seconds,
        },
        "hand_out": {
            "shards_bytes": handed_out.shards,
            "ahead_bytes": handed_out.ahead_bytes,
            "routes": None if handed_out.routes is None else asdict(handed_out.routes),
        },
        "disk": None
        if disk is None
        else {
            "journal_step_bytes": disk.journal_step,
            "routes_step_bytes": disk.routes_step,
            "run_bytes": disk.parts,
            "free_bytes": disk.free,
            "fits": disk.fits,
        },
        "fits": figures.fits,
        "notices": [*plan.notices, *figures.notices, *disk_notices(disk)],
    }
    if memory is not None:
        value["memory"] = {
            "limit_bytes": figures.limit,
            "peak_bytes": memory.peak,
            "peak_phase": memory.peak_phase,
            "stage": memory.stage,
            "parts_bytes": memory.parts,
            "phases_bytes": memory.phases,
            "offloaded_bytes": memory.offloaded,
            "verified_on_gpu": False,
        }
    if time is not None:
        value["time"] = {
            "phases_seconds": time.phases,
            "training_seconds": time.train.training,
            "total_seconds": time.total,
            "bottleneck": time.bottleneck,
            "samples_ahead": time.samples_ahead,
            "hidden_by_overlap_seconds": time.hidden_by_overlap,
            "assumptions": list(ASSUMPTIONS),
        }
    return json.dumps(value, indent=2)


def plan_shell(plan: Plan, figures: Estimate) -> str:
    """`GSPO_NAME=value` lines for `eval` in a job script; nothing in them needs further quoting."""
    cluster, server = plan.config.cluster, plan.config.server
    values = {
        "RUN_NAME": plan.config.run.name,
        "RUN_DIR": f"{plan.config.run.dir}/{plan.config.run.name}",
        "TRAINER_NODES": cluster.num_nodes,
        "RANKS_PER_NODE": cluster.ranks_per_node,
        "WORLD_SIZE": plan.layout.world_size,
        "GPUS_PER_NODE": cluster.gpus_per_node or cluster.ranks_per_node,
        "NUM_SERVERS": server.num_servers,
        "SERVER_TENSOR": server.tensor,
        "SERVER_GPUS": figures.servers.num_gpus,
        "REWARD_GPUS": sum(needs.num_gpus for needs in figures.rewards),
        "ROLLOUT_NODES": cluster.num_rollout_nodes,
        "CHECKPOINT_BYTES": figures.checkpoint_bytes,
        "SIGNAL_SECONDS": signal_seconds(figures.stop_seconds),
        "FITS": {None: "unknown", True: "yes", False: "no"}[figures.fits],
    }
    return "\n".join(f"GSPO_{name}={shlex.quote(str(value))}" for name, value in values.items())
