"""The server steps of one attempt: start them, drop those that are lost or gave up, end them in order.

Owns the set of servers that a run still has: the policy's, or those of one reward model. The run continues while there
is one of each set. `gspo-mega serve` restarts its
server; nothing restarts `serve`. A server that was asked to end registers `stopped` and exits with 0: it has left, and
nothing failed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.launcher.children import Child, ChildSpec
from gspo_mega.launcher.slurm.lost_nodes import LostNodes
from gspo_mega.launcher.slurm.scontrol import Node
from gspo_mega.launcher.slurm.step_starts import Starts
from gspo_mega.rollout.registration import Registration, State

_POLL_SECONDS = 0.2
# A server ends its process group within 2 s of the signal.
_GRACE_SECONDS = 5.0


class ServerSteps(Protocol):
    """The step of each server, and the nodes that it is on."""

    def server(self, index: int) -> ChildSpec: ...

    def server_nodes(self, index: int) -> list[Node]: ...


class Servers:
    """`attempt`: the folder in which they register, of a reward model its own. `indices`: servers to start. `of`:
    whose they are, in words; empty for the policy's. `gave_up`: the step of the last server that ended without the
    loss of its node. `has_left`: whether the last one left as it was asked to. Others may have joined, and those who
    ask them decide then, by `rollout.no_server_deadline_seconds`.
    """

    def __init__(
        self,
        attempt: Attempt,
        steps: ServerSteps,
        nodes: LostNodes,
        starts: Starts,
        say: Callable[[str], None],
        indices: Iterable[int],
        of: str = "",
    ) -> None:
        self._attempt, self._steps, self._nodes, self._starts, self._say = attempt, steps, nodes, starts, say
        self.of = of
        self._children = {index: starts.start(steps.server(index)) for index in indices}
        self.gave_up: Child | None = None
        self.has_left = False

    def __len__(self) -> int:
        return len(self._children)

    @property
    def children(self) -> list[Child]:
        return list(self._children.values())

    @property
    def ended(self) -> list[Child]:
        return [child for child in self._children.values() if child.exit_code is not None]

    def drop_ended(self) -> None:
        """Drop the servers that ended; start those again that srun could not start. Raises NoAnswerError."""
        ended = self.ended
        self._nodes.learn()
        for child in ended:
            index = child.spec.index
            lost = [node.name for node in self._steps.server_nodes(index) if node in self._nodes.known]
            self.has_left = child.exit_code == 0 and self._record(index).get("state") == "stopped"
            if self.has_left:
                del self._children[index]
                asked = f"has left, as it was asked to (its log: {child.spec.log})"
                self._say(f"server-{index}{self.of} {asked}; {self._left()}")
            elif lost:
                del self._children[index]
                # Ranks do not wait at their start for a failed server. The last one is only `stopped`: the ranks
                # shall save a checkpoint and stop instead of failing.
                self._withdraw(index, "failed" if self._children else "stopped", f"node {lost[0]} is lost")
                self._say(f"warning  node {lost[0]} is lost, and server-{index}{self.of} with it; {self._left()}")
                self.gave_up = None
            elif (again := self._starts.again(child)) is not None:
                self._children[index] = again
            else:
                del self._children[index]
                self.gave_up = child
                why = self._withdraw(index, "failed", f"its step {child.end_described}")
                if self._children:
                    self._say(
                        f"warning  server-{index}{self.of} gave up: {why.splitlines()[0]} (its log: {child.spec.log});"
                        f" {self._left()}"
                    )

    def _left(self) -> str:
        return f"{len(self._children)} servers{self.of} are left"

    def _withdraw(self, index: int, state: State, error: str) -> str:
        """Write the registration of a server whose process is gone, unless it registered its failure itself. Returns
        the reason for its end.
        """
        name = f"server-{index}"
        record = self._record(index)
        known = Registration(**record) if record else Registration(name, "", 0, "starting", 0, 0, time.time())
        if known.state == "failed":
            return known.error or error
        replace(known, state=state, error=error).write(self._attempt.servers_dir)
        return error

    def _record(self, index: int) -> dict:
        return read_json(self._attempt.server_file(f"server-{index}")) or {}


def end_all(fleets: Iterable[Servers]) -> None:
    """Ask the servers of all sets to end, and wait a little for all of them at once."""
    children = [child for fleet in fleets for child in fleet.children]
    for child in children:
        if child.exit_code is None:
            child.send_signal(signal.SIGUSR1)  # srun forwards this signal
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(child.exit_code is None for child in children):
        time.sleep(_POLL_SECONDS)
