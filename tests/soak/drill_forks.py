"""`gspo-mega drill` with the same arguments, of runs whose ranks, servers and trials of inputs are forked from processes
that have imported what they need (`forked_workers.py`): most of a small run's work is importing.

    PYTHONPATH=.:tests/support:tests/integration:tests/soak unshare --mount --propagation private \\
        python tests/soak/drill_forks.py CONFIG [key=value ...] --faults N ...

Signals and bounds strike the forks, which have the titles of what they are. The kinds that begin with strace are left
out, because forks are not below the command. For the same reason the command cannot end what a killed fork leaves
behind; of this, a process that the drill has stopped for good does not end by itself and is ended here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from forked_workers import ForkedWorkers

from gspo_mega.base import processes
from gspo_mega.base.errors import GspoMegaError
from gspo_mega.cli import drill
from gspo_mega.verify.drill import program
from gspo_mega.verify.drill.kinds import KINDS
from gspo_mega.verify.drill.scene import Scene

_OF_SERVERS = ("forked_serve", "sglang.srt.server_args", "sglang.launch_server", "sglang.srt.entrypoints.http_server")
_OF_RANKS = ("gspo_mega.engine", "forked_rank", "forked_trial", "transformers.models.auto.tokenization_auto")
_NOT_IN_FORKS = {"strace"}


def main() -> int:
    parser = argparse.ArgumentParser()
    drill.add_arguments(parser)
    args = parser.parse_args()
    args.has_own_mounts = True
    args.kinds = args.kinds or ",".join(name for name, kind in KINDS.items() if not _NOT_IN_FORKS & {*kind.needs})
    ranks, servers = ForkedWorkers(_OF_RANKS), ForkedWorkers(_OF_SERVERS, TORCHDYNAMO_DISABLE="1")
    commands = {
        "trial": ranks.command("forked_trial"),
        "rank": ranks.command("forked_rank"),
        "server": servers.command("forked_serve"),
    }
    forking = {one._server.pid for one in (ranks, servers) if one._server is not None}
    _spare(forking)
    _end_what_was_stopped()
    _count_forks(forking)
    train = [sys.executable, str(Path(__file__).parents[1] / "integration/forked_command.py"), json.dumps(commands)]
    version = program.code_version()
    program.code_version = lambda: f"{version}, forked"
    try:
        return drill.run(args, [*train, "train"])
    finally:
        ranks.close()
        servers.close()


def _spare(forking: set[int]) -> None:
    """The forking processes are no part of a run, but what they fork is."""
    below = processes.living_below
    processes.living_below = lambda pid, without=(): below(pid, without) - forking


def _end_what_was_stopped() -> None:
    left_running = Scene.left_running

    def ended(scene: Scene) -> list[str]:
        for pid in scene.stopped_for_good:
            processes.send_signal(pid, signal.SIGKILL)
        return left_running(scene)

    Scene.left_running = ended


def _count_forks(forking: set[int]) -> None:
    """The processor seconds of forks are with the forking processes, which collect them."""
    own, ticks = program._processor_seconds, os.sysconf("SC_CLK_TCK")

    def of_forks(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[13:15])) / ticks  # cutime, cstime

    program._processor_seconds = lambda: own() + sum(map(of_forks, forking))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GspoMegaError as error:
        sys.exit(str(error))
