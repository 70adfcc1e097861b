"""Servers that outlive a failed attempt (`train.keep_servers`): its automatic restart takes them over.

A server's start takes seconds to minutes, and what fails is mostly a rank. `KeptServers` holds the `gspo-mega serve` of
each server between two attempts of one command:

    with KeptServers(say) as kept:
        ...                                              # for each attempt:
        children = kept.begin(family, attempt, specs)    # starts what was not kept, and tells the others to go on
        children += kept.take_over(family, attempt)      # waits for their answers; starts those anew that do not go on
        ...                                              # the attempt fails:
        kept.keep(family, attempt, error)                # before the family is closed

A server goes on if it lives, is ready, has the arguments and the environment that it would be started with, and has
forgotten what it did (`rollout/server/next_attempt.py`) within `ANSWER_SECONDS`; the user is told why another does not.
None goes on if the failure was the servers'. They end with this process, however that ends: the kernel sends them
SIGTERM.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from gspo_mega.base import processes
from gspo_mega.base.errors import GspoMegaError, PlanError, PublishError, RankError, RolloutError
from gspo_mega.base.run_folder import Attempt, DamagedFileError, atomic_write_text, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.config import Config, LoadedConfig
from gspo_mega.launcher.children import Child, ChildSpec, ProcessFamily
from gspo_mega.rollout.server.next_attempt import FORGET_SECONDS, Order
from gspo_mega.rollout.server.reward_server import reward_folder

logger = logging.getLogger(__name__)
# What a server needs to forget, and to read and write some files.
ANSWER_SECONDS = FORGET_SECONDS + 5.0
_POLL_SECONDS = 0.01
_END_SECONDS = 3.0
_OF_SERVERS = (RolloutError.exit_code, PublishError.exit_code)


@dataclass
class _Kept:
    """The process `child` of a server of `attempt`."""

    child: Child
    attempt: Attempt

    @property
    def spec(self) -> ChildSpec:
        return self.child.spec

    def problem(self, spec: ChildSpec, attempt: Attempt) -> str | None:
        """Why it cannot be the server of `spec` in `attempt`, in words; None as far as is known."""
        if self.child.exit_code is not None:
            return f"it {self.child.end_described}"
        try:
            record = read_json(_folder(self.attempt, self.spec).server_file(_server_id(self.spec))) or {}
        except (OSError, DamagedFileError) as error:
            return f"its registration cannot be read: {error}"
        if (state := record.get("state")) != "ready":
            return f"it is {state or 'not registered'}"
        before = [word.replace(str(self.attempt.path), str(attempt.path)) for word in self.spec.command]
        if before != list(spec.command) or self.spec.environment != spec.environment:
            return "it would be started with other arguments now"
        return None

    def tell(self, spec: ChildSpec, attempt: Attempt) -> str | None:
        """Tell the server to go on in `attempt`. Returns why that is not possible, in words; None if it is."""
        order = Order(str(_folder(attempt, spec).path), str(attempt.run_folder.config_file))
        try:
            _take_key(self.attempt, attempt, spec)
            os.link(self.spec.log, spec.log)  # its output goes on in the same file, which gets a second name
            self.child.order(json.dumps(asdict(order)).encode() + b"\n")
        except OSError as error:
            return f"it cannot be told: {error.strerror}"
        return None

    def answer(self, spec: ChildSpec, attempt: Attempt, deadline: float) -> tuple[str | None, float]:
        """Wait for what it says by `deadline` (monotonic): why it does not go on, or None, and the seconds it took."""
        file = _folder(attempt, spec).kept_server_file(_server_id(spec))
        while True:
            try:
                record = read_json(file)
            except (OSError, DamagedFileError):
                record = None
            if record is not None:
                return record["why"], record["seconds"]
            if self.child.exit_code is not None:
                return f"it {self.child.end_described}", 0.0
            if time.monotonic() > deadline:
                return f"it did not answer within {ANSWER_SECONDS:g} s", 0.0
            time.sleep(_POLL_SECONDS)


class KeptServers:
    """The servers of one command between its attempts. A context manager, which ends them. `say` shows a line to the
    user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._kept: list[_Kept] = []
        self._told: list[tuple[_Kept, ChildSpec]] = []
        self._refused: dict[str, str] = {}
        self._num_servers, self._failed_itself = 0, False
        self._deadline = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end([one.child for one in self._kept])
        self._kept.clear()

    def keep(self, family: ProcessFamily, attempt: Attempt, error: GspoMegaError) -> None:
        """Let the servers of a failed attempt live, unless the failure is theirs. Call it before `family` is closed."""
        own = [child for child in family.children if child.spec.takes_orders and child.exit_code is None]
        if not own or not isinstance(error, RankError):  # after another error there is no restart
            return
        if error.exit_code in _OF_SERVERS:
            self._failed_itself = True
            return
        for child in own:
            family.leave_out(child)
            self._kept.append(_Kept(child, attempt))

    def begin(self, family: ProcessFamily, attempt: Attempt, specs: Sequence[ChildSpec]) -> list[Child]:
        """Tell the servers that were kept to go on in `attempt`, and start those of `specs` that were not. Call from
        the main thread, before anything else of the attempt is started. Raises OSError.
        """
        kept = {(one.spec.kind, one.spec.index, one.spec.of): one for one in self._kept}
        self._told, self._refused, self._deadline = [], {}, time.monotonic() + ANSWER_SECONDS
        self._num_servers = sum(spec.takes_orders for spec in specs)
        if self._failed_itself:
            self._failed_itself = False
            self._say("notice   servers are started anew: the run failed at them")
        anew = []
        for spec in specs:
            one = kept.get((spec.kind, spec.index, spec.of))
            if one is None:
                anew.append(spec)
            elif (why := one.problem(spec, attempt) or one.tell(spec, attempt)) is None:
                self._told.append((one, spec))
            else:
                self._refused[one.child.name] = why
                spec.log.unlink(missing_ok=True)
                anew.append(spec)
        told = [one for one, _ in self._told]
        _end([one.child for one in self._kept if one not in told])
        self._kept = told
        return [family.start(spec) for spec in anew]

    def take_over(self, family: ProcessFamily, attempt: Attempt) -> list[Child]:
        """Wait until those that were told to go on say that they do, and start the others anew. Returns all of them.
        Call from the main thread. Raises OSError.
        """
        children, longest = [], 0.0
        for one, spec in self._told:
            why, seconds = one.answer(spec, attempt, self._deadline)
            if why is None:
                one.child.spec = spec
                family.take_in(one.child)
                children.append(one.child)
                longest = max(longest, seconds)
                continue
            self._refused[one.child.name] = why
            _end([one.child])
            spec.log.unlink(missing_ok=True)
            children.append(family.start(spec))
        if self._told or self._refused:
            num_kept = sum(one.child in children for one, _ in self._told)
            text = f"{num_kept} of {self._num_servers} kept" + (f", ready after {longest:.1f} s" if num_kept else "")
            self._say(f"servers  {text}")
            logger.info("servers: %s", text)
        for name, why in self._refused.items():
            self._say(f"notice   {name} is started anew: {why.strip().splitlines()[0]}")
        self._told, self._kept, self._refused = [], [], {}
        return children


def keeps_servers(config: Config, command: str) -> bool:
    """Whether the servers of `command` may outlive an attempt: only `gspo-mega train` restarts by itself."""
    return command == "train" and config.train is not None and config.train.keep_servers


def refuse_in_job(loaded: LoadedConfig) -> None:
    """Raise PlanError if servers are to outlive an attempt of a Slurm job."""
    if loaded.config.train is not None and loaded.config.train.keep_servers:
        raise PlanError(
            f"{loaded.where('train.keep_servers')}: train.keep_servers: true: the servers of a Slurm job are steps that"
            " end with each start of the run; valid: false, or a run without --slurm"
        )


def _folder(attempt: Attempt, spec: ChildSpec) -> Attempt:
    """Where the server registers: in the attempt, or in the reward model's folder in it."""
    return reward_folder(attempt, spec.of) if spec.of else attempt


def _server_id(spec: ChildSpec) -> str:
    return f"server-{spec.index}"


def _take_key(before: Attempt, attempt: Attempt, spec: ChildSpec) -> None:
    """Give the new attempt the key that its kept servers have. Nothing of the attempt has read another one yet."""
    old, new = (_folder(one, spec).api_key_file for one in (before, attempt))
    key = read_text(old)
    try:
        is_new = read_text(new) != key
    except FileNotFoundError:
        is_new = True
    if is_new:
        atomic_write_text(new, key, mode=0o600)


def _end(children: Sequence[Child]) -> None:
    """End servers: SIGTERM, for an orderly end, and after a while SIGKILL to all that they have started."""
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    for child in children:
        if not child.wait(max(0.0, deadline - time.monotonic())):
            below = processes.living_below(child.pid)
            child.send_signal(signal.SIGKILL)
            for pid in below:
                processes.send_signal(pid, signal.SIGKILL)
            child.wait(_END_SECONDS)
        child.close_input()
