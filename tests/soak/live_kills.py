"""Kills the parts of real runs at random times: the supervisor, a rank, the SGLang server. What a run learns must not
show it.

    python tests/soak/live_kills.py [--kills 10] [--seed 1] [--staleness 0] [--folder DIR]

A run of the quickstart's untrained model, two ranks and a server, is killed with SIGKILL again and again, at a time
drawn uniformly from `SECONDS` after it began to sample, and started again by the same command (a server is restarted by
the run itself). In the end every step must have trained on exactly the prompts that were due, each in whole groups,
sampled by the weights that the step began with, or by those of at most `--staleness` steps before; no sample that the
journal has may have been sampled again; nothing may be left running; and a replay of its journal, without servers and
never interrupted, must end with the same weights, to the bit. Not part of the test suite; ends with an
error at the first difference. On two busy cores `--kills 5 --seed 1` and the kill before the end (3 of the supervisor,
2 of the server, 1 of a rank) took 8 steps and 244 s: nothing lost, nothing twice, the same weights.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("integration", "recovery")]

from log_check import check_log
from run_support import REPOSITORY, Command, kill_server, make_quickstart, small_overrides

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.stream import epoch_order
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import Registration, read_registrations

SECONDS = 6.0
VICTIMS = ("supervisor", "rank 0", "rank 1", "server")
NUM_PROMPTS, GROUP_SIZE, NUM_ROWS = 4, 4, 64
# More than a run of many kills comes to; the last start is told where to end.
ENDLESS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=0, help="rollout.max_staleness")
    parser.add_argument("--folder", type=Path, help="where the run is kept; a temporary folder by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        soak, begun = Soak(args.folder or Path(temporary), args.staleness), time.monotonic()
        try:
            killed = soak.kill(args.kills, random.Random(args.seed))
            num_steps = soak.finish()
            soak.check(num_steps)
        finally:
            for command in soak.started:
                command.end()
        what = ", ".join(f"{victim} {count}" for victim, count in sorted(killed.items()))
        print(
            f"{killed.total()} kills ({what}) in {num_steps} steps and {time.monotonic() - begun:.0f} s: nothing lost,"
            " nothing twice, the same weights"
        )
    return 0


class Soak:
    def __init__(self, root: Path, staleness: int) -> None:
        self.root, self.files, self.staleness = root, make_quickstart(root / "files"), staleness
        self.folder = RunFolder(root / "runs" / "run")
        self.started: list[Command] = []

    def start(self, num_steps: int, *more: str, name: str = "run") -> Command:
        small = small_overrides(self.files, self.root / "runs", name)
        settings = (
            "checkpoint.every_steps=1",
            "eval=null",
            "rollout.max_concurrent_requests=4",
            f"rollout.max_staleness={self.staleness}",
            f"train.num_steps={num_steps}",
        )
        reward = f"reward.functions=[{{function: 'run_support:score', options: {{log: {self.root / 'scores'}}}}}]"
        self.started.append(
            Command(self.root, "train", str(REPOSITORY / "configs/quickstart.yaml"), *small, *settings, reward, *more)
        )
        return self.started[-1]

    def kill(self, num_kills: int, draw: random.Random) -> Counter[str]:
        killed: Counter[str] = Counter()
        command = self.start(ENDLESS)
        command.wait_for_line("data ")
        while killed.total() < num_kills:
            command.wait_for("its server", lambda: self._server() is not None and self._server().state == "ready")
            time.sleep(draw.uniform(0, SECONDS))
            victim = draw.choice(VICTIMS)
            killed[victim] += 1
            if victim == "server":
                server = self._server()
                kill_server(server.pid)
                command.wait_for(
                    "its end is known", lambda server=server: self._server().generation > server.generation
                )
            else:
                self._kill_process(command, victim)
                command = self.start(ENDLESS)
                command.wait_for_line("data ")
            print(f"{killed.total()} kills, {victim} the last; {self._step()} steps are saved", flush=True)
        self._kill_process(command, "supervisor")
        killed["supervisor"] += 1
        return killed

    def _kill_process(self, command: Command, victim: str) -> None:
        if victim == "supervisor":
            command.process.kill()
        else:
            os.kill(command.rank(int(victim[-1])), signal.SIGKILL)
        command.finish()
        deadline = time.monotonic() + 10
        while (left := command.left_running(self.folder.path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"{victim} was killed, and these still run: {left}"

    def _server(self) -> Registration | None:
        return next(iter(read_registrations(self.folder.latest_attempt().servers_dir)), None)

    def _step(self) -> int:
        latest = self.folder.latest_checkpoint_file
        return int(latest.read_text().removeprefix("step_")) if latest.exists() else 0

    def finish(self) -> int:
        """Two more steps, to an orderly end. Returns the number of all."""
        num_steps = self._step() + 2
        command = self.start(num_steps)
        assert command.finish() == 0, command.out + command.err
        assert command.left_running(self.folder.path) == []
        return num_steps

    def check(self, num_steps: int) -> None:
        lines = read_metrics(self.folder.metrics_file)
        assert [(line["step"], line["publish/weight_version"]) for line in lines] == [
            (step, step) for step in range(1, num_steps + 1)
        ]
        assert self.staleness or all(line["mismatch/abs_log_ratio_max"] < 1e-3 for line in lines), (
            "a rollout was of other weights than its step began with"
        )
        journal, late = Journal(self.folder.journal_dir), 0
        for step in range(num_steps):
            trajectories = journal.read(step).batch.trajectories
            assert Counter(t.prompt.text for t in trajectories) == dict.fromkeys(self._due(step), GROUP_SIZE), (
                f"step {step + 1}"
            )
            lags = [step - version for t in trajectories for version in t.weight_versions]
            assert 0 <= min(lags) <= max(lags) <= self.staleness, f"step {step + 1}"
            late += sum(lag > 0 for lag in lags)
        assert (late > 0) == (self.staleness > 0), "nothing was sampled ahead"
        check_log(journal)
        assert not list(journal.folder.glob("*.old-*")), "something that was recorded was of no use"
        replay = self.start(num_steps, "--from-rollouts", str(self.folder.path), name="replay")
        assert replay.finish() == 0, replay.out + replay.err
        ends = [
            RunFolder(self.root / "runs" / name).huggingface_dir.glob("*.safetensors") for name in ("run", "replay")
        ]
        one, other = ({path.name: path.read_bytes() for path in end} for end in ends)
        assert one and one == other, "the replay ends with other weights"

    def _due(self, step: int) -> set[str]:
        texts = (self.files / "data/train.jsonl").read_text().splitlines()
        rows = (divmod(place, NUM_ROWS) for place in range(step * NUM_PROMPTS, (step + 1) * NUM_PROMPTS))
        chosen = [epoch_order(NUM_ROWS, seed=1, source="train", epoch=epoch)[place] for epoch, place in rows]
        return {re.search(r'"prompt": "([^"]+)"', texts[row]).group(1) for row in chosen}


if __name__ == "__main__":
    sys.exit(main())
