"""A real server outlives its rank twice (`train.keep_servers`): killed within a publish that is half done and within a
rollout. The same SGLang goes on, and the run ends where a replay of its journal does, to the bit.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path

from run_support import PATIENCE_SECONDS, REPOSITORY, Command, small_overrides
from waiting import until

from gspo_mega.base import failpoints, processes
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.metrics.writer import read_metrics
from gspo_mega.rollout.registration import Registration, read_registrations, read_secret
from gspo_mega.verify.drill.outcome import differences, journal_problems, outcome

GROUP_SIZE, NUM_STEPS = 4, 3


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def call(server: Registration, key: Path, path: str, body: dict) -> None:
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    headers = {"Authorization": f"Bearer {read_secret(key)}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    assert connection.getresponse().status == 200
    connection.close()


def test_the_same_server_goes_on_after_its_rank_is_killed(tmp_path, quickstart_files, monkeypatch):
    record, hold, run = tmp_path / "reached", tmp_path / "hold", RunFolder(tmp_path / "runs" / "run")
    # A start publishes its own weights twice, to prove that updates arrive. So its second step stops it.
    monkeypatch.setenv(failpoints.VARIABLE, f"point=publish.sent,hit=4,do=stop,record={record}")

    def overrides(name: str, *more: str) -> list[str]:
        small = [one for one in small_overrides(quickstart_files, tmp_path / "runs", name) if "eval." not in one]
        shape = ["eval=null", "cluster.ranks_per_node=1", "parallel.expert=1", f"train.num_steps={NUM_STEPS}"]
        reward = [f"reward.functions=[{{function: 'run_support:held', options: {{hold: '{hold}'}}}}]"]
        reward.append(f"reward.deadline_seconds={PATIENCE_SECONDS}")
        rest = ["checkpoint.every_steps=1", "publish.method=distributed", "train.keep_servers=true"]
        return [str(REPOSITORY / "configs/quickstart.yaml"), *small, *shape, *reward, *rest, *more]

    def rank() -> int:
        attempt = run.latest_attempt()
        return (read_json(attempt.beat_file(0)) or {}).get("pid", 0) if attempt is not None else 0

    def server(number: int) -> Registration:
        (found,) = read_registrations(run.attempt(number).servers_dir)
        return found

    def kill() -> None:
        os.kill(rank(), signal.SIGKILL)
        command.wait_for(f"attempt {count + 1}", lambda: run.attempt(count + 1).kept_server_file("server-0").exists())

    command, count = Command(tmp_path, "train", *overrides("run"), forked=True), 1
    try:
        command.wait_for("a publish that stands still", lambda: bool(rank()) and is_stopped(rank()))
        assert record.read_text().split()[-1] == "publish.sent"
        serving = server(1)
        of_sglang = processes.living_below(serving.pid)
        # As if the rank had been killed while it sent: requests stand still, and the update is not over.
        key = run.attempt(1).api_key_file
        call(serving, key, "/pause_generation", {"mode": "in_place"})
        call(serving, key, "/begin_weight_update", {"selector": "target"})
        groups = run.attempt(1).weight_groups_file.read_text().split()
        assert len(groups) == 1 and groups[0].startswith("weights-")
        num_reached = len(record.read_text())
        hold.touch()  # the next rollout does not end
        kill()
        count = 2
        command.wait_for("a rollout", lambda: "rollout.trajectory" in record.read_text()[num_reached:])
        killed = rank()
        os.kill(killed, signal.SIGSTOP)
        until(lambda: is_stopped(killed), PATIENCE_SECONDS)
        reached = record.read_text()[num_reached:]
        assert reached.rfind("rollout.trajectory") > reached.rfind("rollout.batch"), "it is killed in a rollout"
        hold.unlink()
        kill()
        until(lambda: server(3).state == "ready", PATIENCE_SECONDS)
        assert processes.living_below(serving.pid) >= of_sglang and len(of_sglang) >= 2
        assert command.finish() == 0, command.err
        for number in (1, 2, 3):
            assert (server(number).pid, server(number).address) == (serving.pid, serving.address)
            assert (server(number).state, server(number).generation) == ("stopped", number)
            assert server(number).weight_version is None
        assert run.attempt(1).server_log(0).samefile(run.attempt(3).server_log(0))
        said = [line for line in command.out.splitlines() if line.startswith("servers  ")]
        assert len(said) == 2 and all(line.startswith("servers  1 of 1 kept, ready after ") for line in said), said
    finally:
        command.end()
    lines = read_metrics(run.metrics_file)
    assert [line["run/num_kept_servers"] for line in lines] == [0, 1, 1]
    assert [line["publish/weight_version"] for line in lines] == [1, 2, 3]
    assert journal_problems(run, GROUP_SIZE) == []

    monkeypatch.delenv(failpoints.VARIABLE)
    replay = Command(tmp_path, "train", *overrides("replay", f"train.from_rollouts={run.path}"), forked=True)
    try:
        assert replay.finish() == 0, replay.err
    finally:
        replay.end()
    assert differences(outcome(run), outcome(RunFolder(tmp_path / "runs" / "replay")), same_source=False) == []
