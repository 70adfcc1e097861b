"""Injects faults into a run that samples ahead: nothing may be lost, doubled or biased.

    python tests/soak/ahead_faults.py [--faults 1000] [--seed 0] [--order admission] [--control NAME]

Eight kinds in equal parts: drop, stall, truncate, garbage, duplicate, wrong version, 500, and 20 times slower. The
servers are the fakes of `chaos_server.py`, over real HTTP; what a sample must be follows from its name. The trainer is
real from admission to batch, publishes between steps with requests open, and trains nothing. Exit code 0 if all
promises of `Ahead.broken` held, 1 otherwise.

A control breaks one promise on purpose, so that the check is seen to find it: `lost` throws open groups away when
enough others are complete, `doubled` puts a group into two batches, `biased` takes a response that broke off for a
whole one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("unit/rollout", "support")]

from ahead_support import Ahead, Discarding
from chaos import hurry
from chaos_server import ChaosServer

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.run_folder import RunFolder, atomic_write_text
from gspo_mega.rollout import scheduler
from gspo_mega.rollout.client.completion import Completion, PartialResponse

BOUND, PROMPTS, SHARE = 2, 6, 0.25


def lose() -> None:
    scheduler.admission_of = lambda config: Discarding(
        PROMPTS, PROMPTS, scheduler.Freshness(BOUND), "completion", num_steps=config.train.num_steps
    )


def double() -> None:
    make, first = scheduler.GroupScheduler._make_batch, []

    def once_more(self, formed):
        batch = make(self, formed)
        first[:] = first or batch.groups[:1]
        return replace(batch, groups=[*batch.groups, *first] if batch.step == 2 else batch.groups)

    scheduler.GroupScheduler._make_batch = once_more


def bias() -> None:
    add = PartialResponse.add

    def as_if_whole(self, part: Completion) -> bool:
        return add(self, replace(part, finish_reason="length") if part.token_ids else part)

    PartialResponse.add = as_if_whole


CONTROLS = {"lost": lose, "doubled": double, "biased": bias}


def beat(servers: list[ChaosServer]) -> None:
    """The servers' heartbeats, called all the time."""
    if time.time() - servers[0].registered > 5.0:
        for server in servers:
            server.register("ready")


def drive(num_faults: int, seed: int, order: str) -> tuple[Ahead, Counter, str | None]:
    """The run, the faults that were injected by kind, and the error that ended it."""
    with tempfile.TemporaryDirectory(prefix="ahead-") as folder:
        attempt = RunFolder(Path(folder) / "run").new_attempt()
        atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
        run = Ahead(
            attempt,
            max_staleness=BOUND,
            order=order,
            num_steps=10 + num_faults // 4,
            servers=3,
            prompts_per_step=PROMPTS,
            progress_deadline_seconds=0.3,
            max_attempts=60,
        )
        try:
            faults = run.inject(num_faults, seed, SHARE)
            for step in range(run.num_steps):
                run.step(step, lambda: beat(run.servers))
            return run, faults, None
        except GspoMegaError as error:
            return run, faults, str(error)
        finally:
            run.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", choices=("admission", "completion"), default="admission")
    parser.add_argument("--control", choices=CONTROLS, help="break this promise on purpose")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the fakes' clients hang up
    hurry()
    if args.control:
        CONTROLS[args.control]()
    started = time.monotonic()
    run, faults, error = drive(args.faults, args.seed, args.order)
    broken = run.broken() | ({"run": error} if error else {})
    if faults.total() < args.faults:
        broken["faults"] = f"{faults.total()} of {args.faults} were injected"
    counts = Counter()
    for batch in run.batches:
        counts.update({name: int(value) for name, value in batch.counts.items() if name.startswith("num_")})
    shown = ("num_request_failures", "num_continued_requests", "num_paused_responses", "num_discarded_tokens")
    print(f"faults: {json.dumps(faults)}")
    print(json.dumps({name: counts[name] for name in (*shown, "num_moved_responses", "num_partial_episodes")}))
    print(f"{faults.total()} faults, {len(run.batches)} steps, {len(run.episodes)} trained samples,", end=" ")
    print(f"{time.monotonic() - started:.0f} s:", end=" ")
    print("; ".join(f"{name}: {what}" for name, what in broken.items()) or "nothing lost, doubled or biased")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
