"""Runs the collector under every known fault: no sample may be lost, doubled, swapped or cut short, none may hang.

    python tests/soak/chaos.py [--trajectories 400] [--only NAME ...] [--kinds server registration process] [--seed 0]
    [--seconds 120]

The servers are fakes that speak SGLang's protocol over real HTTP. The length, tokens and log-probs of each sample
follow from its name, however many servers it has been on, so that every deviation is found. A fault is an entry of
FAULTS in `chaos_faults.py`; add new ones there. Exit code 0 if all properties held under all faults, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from chaos_faults import (
    FAULTS,
    GROUP_SIZE,
    NUM_SERVERS,
    SETTINGS,
    Broken,
    Fault,
    Scene,
    falls_silent,
)
from chaos_server import REPOSITORY, ChaosServer, sample_of
from collector_support import SPEC, Stream, collector_config, collector_of
from fake_answers import EOS

from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.rollout import pool as pool_module
from gspo_mega.rollout import pooled_server
from gspo_mega.rollout.pool import ServerPool


def drive(name: str, fault: Fault, num_trajectories: int, seed: int, limit_seconds: float) -> Counter:
    """Run one batch under the fault, with new servers. Returns its counts; raises Broken."""
    if fault.command:
        done = subprocess.run(fault.command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_seconds * 10)
        if done.returncode != 0:
            raise Broken(
                f"{' '.join(fault.command[1:])} ended with"
                f" {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}"
            )
        return Counter(scenarios=1)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        attempt = RunFolder(Path(folder) / "run").new_attempt()
        atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
        servers = [ChaosServer(f"server-{i}", attempt.servers_dir, delay=0.02) for i in range(NUM_SERVERS)]
        rng = random.Random(f"{seed} {name}")
        for server in servers:
            if fault.answers is None:  # the batch must last until something happens
                server.token_seconds = 0.02
            if fault.answers is not None:
                server.fault = lambda call, ids: fault.answers if rng.random() < fault.share else None
        scene = Scene(attempt, servers)
        num_prompts = max(2, num_trajectories // GROUP_SIZE)
        settings = {**SETTINGS, "prompts_per_step": num_prompts, "group_size": GROUP_SIZE, **fault.settings}
        try:
            if fault.before is not None:
                fault.before(scene)
            with ServerPool(collector_config(**settings).rollout, SPEC, attempt) as pool:
                scene.pool = pool
                pool.wait_ready(NUM_SERVERS - (fault.before is falls_silent), 10)
                counts = take(scene, fault, pool, settings, num_prompts, limit_seconds)
                if fault.check is not None:
                    fault.check(scene, counts)
        finally:
            scene.restore()
            for server in servers:
                server.close()
    return counts


def take(
    scene: Scene, fault: Fault, pool: ServerPool, settings: dict, num_prompts: int, limit_seconds: float
) -> Counter:
    stream = Stream()
    collector = collector_of(pool, stream=stream, **settings)
    scene.started = time.monotonic()

    def on_wait() -> None:
        if time.monotonic() - scene.started > limit_seconds:
            raise Broken(f"hung: not done after {limit_seconds:g} s")
        if fault.during is not None:
            fault.during(scene)
        for behind in pool.servers_behind():  # stands in for the runtime, which publishes to them again
            pool.commit(0, [(behind.server_id, behind.generation)])

    try:
        batch = collector.take(0, on_wait)
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"the batch ended with {type(error).__name__}: {error}") from error
    check(batch, stream, num_prompts)
    return Counter({key: int(value) for key, value in batch.counts.items()})


def check(batch, stream: Stream, num_prompts: int) -> None:
    """Raise Broken unless every prompt and each of its samples came back once, each sample with exactly its tokens."""
    if [g.prompt.prompt_id for g in batch.groups] != [p.prompt_id for p in stream.drawn[:num_prompts]] or len(
        batch.groups
    ) != num_prompts:
        raise Broken(f"{len(batch.groups)} groups of {num_prompts} prompts: lost, doubled or out of order")
    names = Counter(t.trajectory_id for t in batch.trajectories)
    if len(names) != num_prompts * GROUP_SIZE or max(names.values()) != 1:
        raise Broken(f"{len(names)} of {num_prompts * GROUP_SIZE} samples: lost or doubled")
    for t in batch.trajectories:
        token_ids, log_probs = sample_of(t.trajectory_id)
        if t.response_token_ids != token_ids:
            raise Broken(
                f"{t.trajectory_id} has other tokens than it was sampled with: {t.response_token_ids[:8]},"
                f" {token_ids[:8]}"
            )
        if t.rollout_log_probs != log_probs or set(t.weight_versions) != {0} or t.response_mask != [1] * len(token_ids):
            raise Broken(f"{t.trajectory_id} has other records than it was sampled with")
        if t.finish_reason != ("stop" if token_ids[-1] == EOS else "length") or t.reward is None:
            raise Broken(f"{t.trajectory_id} ended for {t.finish_reason}, reward {t.reward}")


def hurry() -> None:
    """Shorten waiting times that are meant for a cluster: the fakes answer at once."""
    pooled_server.DWELL_SECONDS = 0.05
    pool_module._POLL_SECONDS = 0.05


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=400, help="of each fault's batch")
    parser.add_argument("--only", nargs="*", choices=FAULTS, metavar="NAME", help="these faults")
    parser.add_argument("--kinds", nargs="*", default=["server", "registration", "process"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a batch counts as hung")
    args = parser.parse_args(arguments)
    hurry()
    logging.disable(logging.WARNING)  # hundreds of warnings; the findings are printed
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the fakes' clients hang up
    total, broken, started = Counter(), {}, time.monotonic()
    chosen = {
        name: fault
        for name, fault in FAULTS.items()
        if fault.kind in args.kinds and (not args.only or name in args.only)
    }
    for name, fault in chosen.items():
        began = time.monotonic()
        try:
            counts = drive(name, fault, args.trajectories, args.seed, args.seconds)
            shown = ", ".join(
                f"{key.removeprefix('num_')} {value}"
                for key, value in counts.items()
                if value and key != "num_prompts_sampled"
            )
            total += counts
        except Broken as error:
            broken[name] = str(error)
            shown = f"BROKEN: {error}"
        print(f"{name:<40} {time.monotonic() - began:6.1f} s  {shown}", flush=True)
    figures = {
        key: total[key]
        for key in (
            "num_trajectories",
            "num_request_failures",
            "num_retries",
            "num_continued_requests",
            "num_moved_responses",
            "num_registration_errors",
        )
    }
    print(
        f"\n{len(chosen)} faults, {total['num_trajectories']} trajectories, {time.monotonic() - started:.0f} s:"
        f" {json.dumps(figures)}"
    )
    if broken:
        print(f"{len(broken)} did not hold: {', '.join(broken)}")
        return 1
    print("nothing lost, doubled, swapped or hung")
    return 0


if __name__ == "__main__":
    sys.exit(main())
