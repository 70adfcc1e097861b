"""Know which nodes of a job are lost, and whether a lost node explains a failure.

Owns that knowledge, which outlives an attempt: a lost node does not return to its job. The reactions are in
`job_supervisor.py` and `server_steps.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gspo_mega.launcher.slurm.scontrol import Allocation, Node, lost_nodes, silent_nodes, slurmd_timeout_seconds

_POLL_SECONDS = 1.0
# Slurm checks for silent nodes at intervals. A node still in the job this long after Slurm's own limit stays in it.
_MARGIN_SECONDS = 30.0


class LostNodes:
    """`known`: lost nodes whose loss is handled, or about to be. Questions to Slurm raise NoAnswerError."""

    def __init__(self, allocation: Allocation, say: Callable[[str], None]) -> None:
        self._allocation, self._say = allocation, say
        self.known: set[Node] = set()

    def learn(self) -> None:
        self.known |= set(lost_nodes(self._allocation.job_id, self._allocation.nodes))

    def trainers(self) -> list[Node]:
        """Lost trainer nodes. The remaining ones may wait for them in a collective for half an hour."""
        return lost_nodes(self._allocation.job_id, self._allocation.trainer_nodes)

    def behind_failure(self) -> list[Node]:
        """Nodes whose loss explains that ranks failed just now. Ranks fail before Slurm notices the loss, so this waits
        for Slurm.
        """
        nodes = self._allocation.nodes
        lost = lost_nodes(self._allocation.job_id, nodes)
        if not lost and (silent := self._silent(nodes)):
            names = ", ".join(node.name for node in silent)
            self._say(f"warning  {names} does not answer; waiting for Slurm to confirm the loss")
            deadline = time.monotonic() + slurmd_timeout_seconds() + _MARGIN_SECONDS
            while not (lost := lost_nodes(self._allocation.job_id, silent)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            lost = lost or self._silent(silent)
        # Known lost nodes do not explain a new failure, except those of ranks.
        return lost if set(lost) - self.known or set(lost) & set(self._allocation.trainer_nodes) else []

    def _silent(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes that are silent twice in a row: one failed step may be due to Slurm's controller or the network."""
        silent = silent_nodes([node for node in nodes if node not in self.known])
        return silent_nodes(silent) if silent else []
