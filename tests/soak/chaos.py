"""Every fault that is known, against the collector: nothing may be lost, doubled, swapped, cut shorter, or hang.

    python tests/soak/chaos.py [--trajectories 400] [--only NAME ...] [--kinds server registration process] [--seed 0] [--seconds 120]

Servers are fakes that speak as SGLang does, over real HTTP. What each sample has to be, its length, tokens and log-probs, follows from
its name, however many servers it has been on: whatever comes out otherwise is found. A fault is an entry of FAULTS; new ones go
there. Exit code 0 where all held, 1 where one did not.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "unit" / "rollout"))

from collector_support import SPEC, Stream, collector_of, make_config
from fake_server import EOS, PROMPT_TOKENS, VOCAB, FakeServer

from gspo_mega.rollout import load, pool as pool_module
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.run_folder import Attempt, RunFolder, atomic_write_text

NUM_SERVERS = 4
MAX_NEW_TOKENS = 24
GROUP_SIZE = 4
SETTINGS = dict(max_new_tokens=MAX_NEW_TOKENS, progress_deadline_seconds=0.5, no_server_deadline_seconds=30.0, max_attempts=60)


class Broken(Exception):
    """What does not hold, in words."""


# --- what every sample has to be ------------------------------------------------------------------------------


def sample_of(name: str) -> tuple[list[int], list[float]]:
    """The response of the sample `name`: token ids and log-probs, which no other sample has."""
    rng = random.Random(zlib.crc32(name.encode()))
    length = min(MAX_NEW_TOKENS, 1 + int(rng.expovariate(1 / 9)))
    token_ids = [rng.randint(3, VOCAB - 1) for _ in range(length)]
    if length < MAX_NEW_TOKENS:
        token_ids[-1] = EOS
    return token_ids, [-rng.random() * 3 for _ in range(length)]


class ChaosServer(FakeServer):
    """Answers every sample with what it has to be, from where the request goes on."""

    def answer(self, rid: str, ids: list[int], params: dict, experts: tuple | None) -> dict:
        token_ids, log_probs = sample_of(rid.rpartition(".")[0])
        start = len(ids) - PROMPT_TOKENS
        token_ids, log_probs = token_ids[start:], log_probs[start:]
        count = len(token_ids)
        finish = {"type": "stop", "matched": EOS} if token_ids[-1] == EOS else {"type": "length", "length": count}
        meta = {
            "id": rid, "finish_reason": finish, "prompt_tokens": len(ids), "completion_tokens": count, "weight_version": str(self.version),
            "weight_versions": [{"version": str(self.version), "start": 0, "end": count}],
            "output_token_logprobs": [[value, token, None] for value, token in zip(log_probs, token_ids, strict=True)],
        }  # fmt: skip
        return {"output_ids": token_ids, "meta_info": meta}


# --- faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One way in which something goes wrong.

    `answers`: what a server does with a share of its requests. `during`: called while the batch runs, with the scene. `check`: what
    holds beside what always has to. `command`: a scenario of its own, which ends with 0 where it held.
    """

    kind: Literal["server", "registration", "process"]
    answers: object = None
    share: float = 0.15
    before: Callable[[Scene], None] | None = None
    during: Callable[[Scene], None] | None = None
    check: Callable[[Scene, Counter], None] | None = None
    command: tuple[str, ...] = ()
    settings: dict = field(default_factory=dict)


@dataclass
class Scene:
    """What a fault can get at while a batch runs. `restore` undoes what was changed outside it."""

    attempt: Attempt
    servers: list[ChaosServer]
    pool: ServerPool | None = None
    started: float = 0.0
    done: set[str] = field(default_factory=set)
    restore: Callable[[], None] = lambda: None

    def once(self, name: str, after_seconds: float = 0.05) -> bool:
        """True once, when the batch has run for so long."""
        if name in self.done or time.monotonic() - self.started < after_seconds:
            return False
        self.done.add(name)
        return True


def changed(**meta: object) -> Callable[[dict], dict]:
    """An answer whose `meta_info` says something else."""

    def change(answer: dict) -> dict:
        answer = copy.deepcopy(answer)
        answer["meta_info"] |= {key: value(answer) if callable(value) else value for key, value in meta.items()}
        return answer

    return change


def tokens(change: Callable[[list[int]], list]) -> Callable[[dict], dict]:
    """An answer with other tokens, all counts as if they were right."""

    def apply(answer: dict) -> dict:
        ids = change(list(answer["output_ids"]))
        entries = [[-1.0, token, None] for token in ids]
        meta = answer["meta_info"] | {"completion_tokens": len(ids), "output_token_logprobs": entries}
        meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
        return {"output_ids": ids, "meta_info": meta}

    return apply


def log_prob(value: object) -> Callable[[dict], dict]:
    """An answer whose first log-prob is `value`."""

    def change(answer: dict) -> dict:
        answer = copy.deepcopy(answer)
        answer["meta_info"]["output_token_logprobs"][0][0] = value
        return answer

    return change


def of_another_sample(answer: dict) -> dict:
    """Another sample's response under its own id: well formed in every other way."""
    rid = "step000000-g00000-s999.0123456789abcdef"
    token_ids, log_probs = sample_of("step000000-g00000-s999")
    other = tokens(lambda _: token_ids)(answer)
    other["meta_info"] |= {"id": rid, "finish_reason": {"type": "stop" if token_ids[-1] == EOS else "length"}}
    return other


def slow(scene: Scene) -> None:
    for server in scene.servers:
        server.token_seconds = 0.005
    scene.servers[0].token_seconds = 0.1


def little_of_the_slow_one(scene: Scene, counts: Counter) -> None:
    share = scene.servers[0].num_tokens / sum(server.num_tokens for server in scene.servers)
    if share >= 0.08:
        raise Broken(f"a server that is 20 times slower made {share:.1%} of the tokens")


def dies(scene: Scene) -> None:
    if scene.once("dies"):
        scene.servers[0].die()


def restarts(scene: Scene) -> None:
    if scene.once("dies"):
        scene.servers[0].die()
    if scene.once("starts", 0.4):
        scene.servers[0].start()


def all_restart(scene: Scene) -> None:
    for number, server in enumerate(scene.servers):
        if scene.once(f"dies {number}", 0.05 + 0.1 * number):
            server.die()
            server.start()


def paused(scene: Scene) -> None:
    if scene.once("pause", 0.03):
        for server in scene.servers:
            server.control("/abort_request", {"rid": ""})


def deaf(scene: Scene) -> None:
    for server in scene.servers:
        server.answers_aborts = False


def unreadable(number: int, share: float = 0.5) -> Callable[[Scene], None]:
    """A share of all readings of registrations fails with this errno, while the batch runs."""

    def start(scene: Scene) -> None:
        rng, read_text = random.Random(number), Path.read_text

        def read(self: Path, *args, **kwargs):
            if self.parent == scene.attempt.servers_dir and rng.random() < share:
                raise OSError(number, os.strerror(number), str(self))
            return read_text(self, *args, **kwargs)

        Path.read_text = read
        scene.restore = lambda: setattr(Path, "read_text", read_text)

    return start


def folder_unreadable(scene: Scene) -> None:
    listdir, rng = os.listdir, random.Random(5)

    def listing(path="."):
        if str(path) == str(scene.attempt.servers_dir) and rng.random() < 0.7:
            raise OSError(116, "Stale file handle", str(path))
        return listdir(path)

    os.listdir = listing
    scene.restore = lambda: setattr(os, "listdir", listdir)


def counted(scene: Scene, counts: Counter) -> None:
    assert scene.pool is not None
    if not scene.pool.num_registration_errors:
        raise Broken("no failed reading of a registration was counted")


def folder_for_a_file(scene: Scene) -> None:
    (scene.attempt.servers_dir / "server-77.json").mkdir()


def flaps(scene: Scene) -> None:
    for number in range(6):
        if scene.once(f"flap {number}", 0.05 * number):
            scene.servers[0].register("restarting" if number % 2 == 0 else "ready")


def falls_silent(scene: Scene) -> None:
    scene.servers[0].register("ready", heartbeat=time.time() - 3600)


def joins_late(scene: Scene) -> None:
    if scene.once("joins", 0.1):
        scene.servers.append(ChaosServer("server-late", scene.attempt.servers_dir))


def pytest_of(*selection: str) -> tuple[str, ...]:
    """A scenario that is a test of its own: run as such, of real processes."""
    return (sys.executable, "-m", "pytest", "-q", "-x", *selection)


NAN = float("nan")
FAULTS: dict[str, Fault] = {
    # answers to another request, twice, or too late
    "swap": Fault("server", "swap"),
    "another sample's": Fault("server", of_another_sample),
    "late on a kept connection": Fault("server", "late"),
    "a report twice": Fault("server", "same twice"),
    "goes on behind its end": Fault("server", "after done"),
    "another prompt's length": Fault("server", changed(prompt_tokens=lambda a: a["meta_info"]["prompt_tokens"] + 1)),
    "no id": Fault("server", changed(id=None)),
    # answers that do not come, or not to their end
    "dropped": Fault("server", "reset"),
    "cut in the middle of a report": Fault("server", "truncated"),
    "dies midway": Fault("server", "die midway"),
    "never answers": Fault("server", "hang", share=0.03),
    "stalls after a token": Fault("server", "stall", share=0.03),
    "stalls, and is deaf to aborts": Fault("server", "stall", share=0.03, before=deaf),
    "trickles bytes, no tokens": Fault("server", "trickle", share=0.03),
    "aborted by the server": Fault("server", "abort"),
    "no end of the stream": Fault("server", "no done"),
    # answers that are none
    "garbage": Fault("server", "not json"),
    "one JSON object, not a stream": Fault("server", "plain json"),
    "giant": Fault("server", "giant", share=0.03),
    "endless comments": Fault("server", "endless", share=0.03),
    "compressed": Fault("server", "gzip"),
    "gzip bomb": Fault("server", "gzip bomb", share=0.03),
    "an empty object": Fault("server", lambda answer: {}),
    "a list": Fault("server", lambda answer: []),
    "null": Fault("server", lambda answer: None),
    "no meta_info": Fault("server", lambda answer: {"output_ids": answer["output_ids"]}),
    "HTTP 400": Fault("server", 400),
    "HTTP 401": Fault("server", 401),
    "HTTP 500": Fault("server", 500),
    "HTTP 503": Fault("server", 503),
    "refused in the stream": Fault("server", "refused"),
    "refused by the scheduler": Fault("server", changed(finish_reason={"type": "abort", "status_code": 503, "message": "queue full"})),
    # wrong records
    "NaN": Fault("server", log_prob(NAN)),
    "minus infinity": Fault("server", log_prob(-math.inf)),
    "null log-prob": Fault("server", log_prob(None)),
    "positive log-prob": Fault("server", log_prob(0.5)),
    "log-probs of other tokens": Fault("server", changed(output_token_logprobs=lambda a: [[-1.0, (t + 1) % VOCAB, None] for t in a["output_ids"]])),
    "a log-prob too few": Fault("server", changed(output_token_logprobs=lambda a: a["meta_info"]["output_token_logprobs"][:-1])),
    "token outside the vocabulary": Fault("server", tokens(lambda ids: [VOCAB, *ids[1:]])),
    "negative token": Fault("server", tokens(lambda ids: [-1, *ids[1:]])),
    "token that is no integer": Fault("server", tokens(lambda ids: [5.0, *ids[1:]])),
    "more tokens than asked for": Fault("server", tokens(lambda ids: [5] * (MAX_NEW_TOKENS + 1))),
    "no tokens": Fault("server", tokens(lambda ids: [])),
    "goes on after the stop token": Fault("server", tokens(lambda ids: [EOS, *ids])),
    "wrong count of tokens": Fault("server", changed(completion_tokens=lambda a: len(a["output_ids"]) + 1)),
    "ended for no known reason": Fault("server", changed(finish_reason={"type": "tired"})),
    "wrong version": Fault("server", changed(weight_version="7", weight_versions=lambda a: [{"version": "7", "start": 0, "end": len(a["output_ids"])}])),
    "versions with a gap": Fault("server", changed(weight_versions=lambda a: [{"version": "0", "start": 1, "end": len(a["output_ids"])}])),
    "a version that is no number": Fault("server", changed(weight_version="default")),
    # servers as a whole
    "slow": Fault("server", before=slow, check=little_of_the_slow_one, settings={"progress_deadline_seconds": 10.0, "max_concurrent_requests": 4}),
    "a server dies": Fault("server", during=dies),
    "a server dies and comes back": Fault("server", during=restarts),
    "all servers restart in turn": Fault("server", during=all_restart),
    "all requests aborted at once": Fault("server", during=paused),
    # registrations
    "EMFILE on registrations": Fault("registration", before=unreadable(24), check=counted),
    "EIO on registrations": Fault("registration", before=unreadable(5), check=counted),
    "ESTALE on registrations": Fault("registration", before=unreadable(116), check=counted),
    "EACCES on registrations": Fault("registration", before=unreadable(13), check=counted),
    "the folder of registrations is stale": Fault("registration", before=folder_unreadable, check=counted),
    "a folder among the registrations": Fault("registration", before=folder_for_a_file, check=counted),
    "a registration that comes and goes": Fault("registration", during=flaps),
    "a heartbeat an hour old": Fault("registration", before=falls_silent),
    "a server joins late": Fault("registration", during=joins_late),
    # processes: real ones, in tests of their own
    "lost standard output": Fault("process", command=pytest_of("tests/integration/test_launcher_output.py")),
    "stopped ranks": Fault("process", command=pytest_of("tests/integration/test_launcher_restarts.py")),
    "failing Slurm calls": Fault("process", command=pytest_of("tests/unit/launcher/test_slurm_calls_fail.py", "tests/unit/launcher/test_slurm_watch.py")),
}


# --- driving -------------------------------------------------------------------------------------------------------


def drive(name: str, fault: Fault, num_trajectories: int, seed: int, limit_seconds: float) -> Counter:
    """One batch under the fault, from servers that are new. Returns its figures; raises Broken."""
    if fault.command:
        done = subprocess.run(fault.command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_seconds * 10)
        if done.returncode != 0:
            raise Broken(f"{' '.join(fault.command[1:])} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
        return Counter(scenarios=1)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        attempt = RunFolder(Path(folder) / "run").new_attempt()
        atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
        servers = [ChaosServer(f"server-{i}", attempt.servers_dir, delay=0.02) for i in range(NUM_SERVERS)]
        rng = random.Random(f"{seed} {name}")
        for server in servers:
            if fault.answers is None:  # a batch that lasts until something happens
                server.token_seconds = 0.02
            if fault.answers is not None:
                server.fault = lambda call, ids: fault.answers if rng.random() < fault.share else None
        scene = Scene(attempt, servers)
        num_prompts = max(2, num_trajectories // GROUP_SIZE)
        settings = {**SETTINGS, "prompts_per_step": num_prompts, "group_size": GROUP_SIZE, **fault.settings}
        try:
            if fault.before is not None:
                fault.before(scene)
            with ServerPool(make_config(**settings), SPEC, attempt) as pool:
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


def take(scene: Scene, fault: Fault, pool: ServerPool, settings: dict, num_prompts: int, limit_seconds: float) -> Counter:
    stream = Stream()
    collector = collector_of(pool, stream=stream, **settings)
    scene.started = time.monotonic()

    def on_wait() -> None:
        if time.monotonic() - scene.started > limit_seconds:
            raise Broken(f"hung: not done after {limit_seconds:g} s")
        if fault.during is not None:
            fault.during(scene)
        for behind in pool.servers_behind():  # as the runtime does: published to anew
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
    """Every prompt once, each of its samples once, and each sample what it has to be, to the token."""
    if [g.prompt.prompt_id for g in batch.groups] != [p.prompt_id for p in stream.drawn[:num_prompts]] or len(batch.groups) != num_prompts:
        raise Broken(f"{len(batch.groups)} groups of {num_prompts} prompts: lost, doubled or out of order")
    names = Counter(t.trajectory_id for t in batch.trajectories)
    if len(names) != num_prompts * GROUP_SIZE or max(names.values()) != 1:
        raise Broken(f"{len(names)} of {num_prompts * GROUP_SIZE} samples: lost or doubled")
    for t in batch.trajectories:
        token_ids, log_probs = sample_of(t.trajectory_id)
        if t.response_token_ids != token_ids:
            raise Broken(f"{t.trajectory_id} has other tokens than it was sampled with: {t.response_token_ids[:8]}, {token_ids[:8]}")
        if t.rollout_log_probs != log_probs or set(t.weight_versions) != {0} or t.response_mask != [1] * len(token_ids):
            raise Broken(f"{t.trajectory_id} has other records than it was sampled with")
        if t.finish_reason != ("stop" if token_ids[-1] == EOS else "length") or t.reward is None:
            raise Broken(f"{t.trajectory_id} ended for {t.finish_reason}, reward {t.reward}")


def hurry() -> None:
    """Times that are right for a cluster are long for fakes that answer at once."""
    load.DWELL_SECONDS = 0.05
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
    logging.disable(logging.WARNING)  # of hundreds of faults; what was found is shown
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the fakes', whose clients hang up on them
    total, broken, started = Counter(), {}, time.monotonic()
    chosen = {name: fault for name, fault in FAULTS.items() if fault.kind in args.kinds and (not args.only or name in args.only)}
    for name, fault in chosen.items():
        began = time.monotonic()
        try:
            counts = drive(name, fault, args.trajectories, args.seed, args.seconds)
            shown = ", ".join(f"{key.removeprefix('num_')} {value}" for key, value in counts.items() if value and key != "num_prompts_sampled")
            total += counts
        except Broken as error:
            broken[name] = str(error)
            shown = f"BROKEN: {error}"
        print(f"{name:<40} {time.monotonic() - began:6.1f} s  {shown}", flush=True)
    figures = {key: total[key] for key in ("num_trajectories", "num_request_failures", "num_retries", "num_continued_requests", "num_moved_responses", "num_registration_errors")}
    print(f"\n{len(chosen)} faults, {total['num_trajectories']} trajectories, {time.monotonic() - started:.0f} s: {json.dumps(figures)}")
    if broken:
        print(f"{len(broken)} did not hold: {', '.join(broken)}")
        return 1
    print("nothing lost, doubled, swapped or hung")
    return 0


if __name__ == "__main__":
    sys.exit(main())
