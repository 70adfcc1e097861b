"""Which nodes of a job are lost, and whether a failure is theirs.

Owns that knowledge, which outlives an attempt: what was lost does not come back to the same job. What follows from it
is `job_supervisor.py`'s and `server_steps.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gspo_mega.launcher.slurm.scontrol import Allocation, Node, lost_nodes, silent_nodes, slurmd_timeout_seconds

_POLL_SECONDS = 1.0
# Slurm looks for silent nodes every so often; a node that it has not given up so long after its own limit, it will not.
_MARGIN_SECONDS = 30.0


class LostNodes:
    """`known`: those whose loss has been dealt with, or is about to be. Questions raise NoAnswerError."""

    def __init__(self, allocation: Allocation, say: Callable[[str], None]) -> None:
        self._allocation, self._say = allocation, say
        self.known: set[Node] = set()

    def learn(self) -> None:
        self.known |= set(lost_nodes(self._allocation.job_id, self._allocation.nodes))

    def trainers(self) -> list[Node]:
        """Lost trainer nodes: those that are left may wait for them in a collective, for half an hour."""
        return lost_nodes(self._allocation.job_id, self._allocation.trainer_nodes)

    def behind_failure(self) -> list[Node]:
        """Nodes whose loss explains that ranks failed just now, which they do before Slurm knows of it. Takes as long
        as Slurm does.
        """
        nodes = self._allocation.nodes
        lost = lost_nodes(self._allocation.job_id, nodes)
        if not lost and (silent := self._silent(nodes)):
            self._say(f"warning  {', '.join(node.name for node in silent)} does not answer; waiting for Slurm's word")
            deadline = time.monotonic() + slurmd_timeout_seconds() + _MARGIN_SECONDS
            while not (lost := lost_nodes(self._allocation.job_id, silent)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            lost = lost or self._silent(silent)
        # Without those that were known as lost already the run did do, but for ranks' nodes.
        return lost if set(lost) - self.known or set(lost) & set(self._allocation.trainer_nodes) else []

    def _silent(self, nodes: Sequence[Node]) -> list[Node]:
        """Twice in a row: a step that could not be started may be a failure of Slurm's controller, or of the network's
        moment.
        """
        silent = silent_nodes([node for node in nodes if node not in self.known])
        return silent_nodes(silent) if silent else []
