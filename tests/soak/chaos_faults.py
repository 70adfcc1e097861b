"""The faults of `chaos.py`: one entry of FAULTS each."""

from __future__ import annotations

import copy
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chaos_server import EOS, MAX_NEW_TOKENS, VOCAB, ChaosServer, sample_of

from gspo_mega.base import untrusted
from gspo_mega.base.run_folder import Attempt
from gspo_mega.rollout.pool import ServerPool

NUM_SERVERS = 4
GROUP_SIZE = 4
SETTINGS = dict(
    max_new_tokens=MAX_NEW_TOKENS, progress_deadline_seconds=0.5, no_server_deadline_seconds=30.0, max_attempts=60
)


class Broken(Exception):
    """The text says which property did not hold."""


# --- faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One way in which something goes wrong.

    `answers`: what a server does with a `share` of its requests. `before`: called before the pool starts. `during`:
    called repeatedly while the batch runs. `check`: further properties that must hold afterwards. `command`: a scenario
    of its own instead, whose exit code is 0 if everything held.
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
    """What a fault can change while a batch runs. `restore` undoes its changes outside the scene."""

    attempt: Attempt
    servers: list[ChaosServer]
    pool: ServerPool | None = None
    started: float = 0.0
    done: set[str] = field(default_factory=set)
    restore: Callable[[], None] = lambda: None

    def once(self, name: str, after_seconds: float = 0.05) -> bool:
        """True once, when the batch has run for `after_seconds`."""
        if name in self.done or time.monotonic() - self.started < after_seconds:
            return False
        self.done.add(name)
        return True


def changed(**meta: object) -> Callable[[dict], dict]:
    """An answer with other entries in `meta_info`."""

    def change(answer: dict) -> dict:
        answer = copy.deepcopy(answer)
        answer["meta_info"] |= {key: value(answer) if callable(value) else value for key, value in meta.items()}
        return answer

    return change


def tokens(change: Callable[[list[int]], list]) -> Callable[[dict], dict]:
    """An answer with other tokens, and all counts consistent with them."""

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
    token_ids, _log_probs = sample_of("step000000-g00000-s999")
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
    """While the batch runs, this share of all reads of registrations fails with this errno."""

    def start(scene: Scene) -> None:
        rng, real = random.Random(number), untrusted.open_regular

        def opened(path, most_bytes=None):
            if Path(path).parent == scene.attempt.servers_dir and rng.random() < share:
                raise OSError(number, os.strerror(number), str(path))
            return real(path, most_bytes)

        untrusted.open_regular = opened
        scene.restore = lambda: setattr(untrusted, "open_regular", real)

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
    """A scenario that is a test of its own, with real processes."""
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
    "refused by the scheduler": Fault(
        "server", changed(finish_reason={"type": "abort", "status_code": 503, "message": "queue full"})
    ),
    # wrong records
    "NaN": Fault("server", log_prob(NAN)),
    "minus infinity": Fault("server", log_prob(-math.inf)),
    "null log-prob": Fault("server", log_prob(None)),
    "positive log-prob": Fault("server", log_prob(0.5)),
    "log-probs of other tokens": Fault(
        "server", changed(output_token_logprobs=lambda a: [[-1.0, (t + 1) % VOCAB, None] for t in a["output_ids"]])
    ),
    "a log-prob too few": Fault(
        "server", changed(output_token_logprobs=lambda a: a["meta_info"]["output_token_logprobs"][:-1])
    ),
    "token outside the vocabulary": Fault("server", tokens(lambda ids: [VOCAB, *ids[1:]])),
    "negative token": Fault("server", tokens(lambda ids: [-1, *ids[1:]])),
    "token that is no integer": Fault("server", tokens(lambda ids: [5.0, *ids[1:]])),
    "more tokens than asked for": Fault("server", tokens(lambda ids: [5] * (MAX_NEW_TOKENS + 1))),
    "no tokens": Fault("server", tokens(lambda ids: [])),
    "goes on after the stop token": Fault("server", tokens(lambda ids: [EOS, *ids])),
    "wrong count of tokens": Fault("server", changed(completion_tokens=lambda a: len(a["output_ids"]) + 1)),
    "ended for no known reason": Fault("server", changed(finish_reason={"type": "tired"})),
    "wrong version": Fault(
        "server",
        changed(
            weight_version="7", weight_versions=lambda a: [{"version": "7", "start": 0, "end": len(a["output_ids"])}]
        ),
    ),
    "versions with a gap": Fault(
        "server", changed(weight_versions=lambda a: [{"version": "0", "start": 1, "end": len(a["output_ids"])}])
    ),
    "a version that is no number": Fault("server", changed(weight_version="default")),
    # servers as a whole
    "slow": Fault(
        "server",
        before=slow,
        check=little_of_the_slow_one,
        settings={"progress_deadline_seconds": 10.0, "max_concurrent_requests": 4},
    ),
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
    "failing Slurm calls": Fault(
        "process",
        command=pytest_of(
            "tests/unit/launcher/test_slurm_calls_fail.py", "tests/unit/launcher/test_batch_node_watch.py"
        ),
    ),
}
