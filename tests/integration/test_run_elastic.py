"""Servers join and leave a run that samples ahead, while it runs: no step is lost, and nothing is sampled twice."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from run_support import REPOSITORY, Command, small_overrides

sys.path.insert(0, str(Path(__file__).parents[1] / "recovery"))

from log_check import check_log

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import Registration, read_registrations

STALENESS, GROUP_SIZE = 1, 4
# More than the run comes to; it is stopped.
ENDLESS = 10_000


@pytest.fixture
def command(tmp_path, quickstart_files):
    overrides = [
        *(one for one in small_overrides(quickstart_files, tmp_path / "runs", "run") if not one.startswith("eval.")),
        *("eval=null", f"train.num_steps={ENDLESS}", f"rollout.max_staleness={STALENESS}"),
        *("cluster.ranks_per_node=1", "parallel.expert=1", "checkpoint.every_steps=1000"),
    ]
    started: list[Command] = []

    def start(name: str, *more: str) -> Command:
        words = (str(REPOSITORY / "configs/quickstart.yaml"), *overrides, *more)
        started.append(Command(tmp_path, name, *words, tried_in_fork=True))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_server_joins_and_the_runs_own_leaves(command, tmp_path):
    train, run = command("train"), RunFolder(tmp_path / "runs" / "run")

    def server(number: int) -> Registration | None:
        attempt = run.latest_attempt()
        known = {} if attempt is None else {r.server_id: r for r in read_registrations(attempt.servers_dir)}
        return known.get(f"server-{number}")

    def state(number: int) -> str | None:
        found = server(number)
        assert found is None or found.state != "failed", found
        return None if found is None else found.state

    def steps() -> int:
        return len(read_metrics(run.metrics_file)) if run.metrics_file.exists() else 0

    def sampled_by(step: int) -> Counter[str]:
        batch = Journal(run.journal_dir).read(step).batch
        return Counter(turn.server_id for episode in batch.episodes for turn in episode.turns)

    train.wait_for("two steps", lambda: steps() >= 2)
    joined = command("serve")
    train.wait_for("the other server", lambda: state(1) == "ready")
    at = steps()
    train.wait_for("a step that it had part in", lambda: any(sampled_by(s)["server-1"] for s in range(at, steps())))
    own = server(0)
    assert own is not None
    os.kill(own.pid, signal.SIGTERM)
    train.wait_for("the run's own server has left", lambda: state(0) == "stopped")
    left_at = steps()
    train.wait_for("three steps more", lambda: steps() >= left_at + 3 + STALENESS)
    train.process.send_signal(signal.SIGTERM)
    assert train.finish() == 143, train.out + train.err
    joined.process.send_signal(signal.SIGTERM)
    assert joined.finish() == 0, joined.out + joined.err

    num_steps = steps()
    assert [line["step"] for line in read_metrics(run.metrics_file)] == list(range(1, num_steps + 1))
    journal = Journal(run.journal_dir)
    batches = [journal.read(step).batch for step in range(num_steps)]
    for step, batch in enumerate(batches):
        assert all(len(group.episodes) == GROUP_SIZE for group in batch.groups)
        lags = {step - v for one in batch.episodes for turn in one.turns for v in turn.weight_versions}
        assert lags <= set(range(STALENESS + 1)), f"step {step + 1}"
    numbers = [group.group_id for batch in batches for group in batch.groups]
    assert numbers == list(range(len(numbers))), "in order of admission, each once"
    check_log(journal)
    assert set(sampled_by(0)) == {"server-0"} and set(sampled_by(num_steps - 1)) == {"server-1"}
    assert "server 0 has left, as it was asked to; no server of 1 is left" in train.out, train.out
    assert "given up" not in train.out
    lines = read_metrics(run.metrics_file)
    assert sum(line["rollout/num_discarded_tokens"] for line in lines) == 0
    assert train.left_running(run.path) == []
