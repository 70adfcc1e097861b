"""The drill's drawing, table and comparison; and one fault of each way of striking, against a process that stands still."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_mega.base import failpoints, processes
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import ConfigError
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.train.standby import NAME
from gspo_mega.verify.drill import machine
from gspo_mega.verify.drill import scene as scene_module
from gspo_mega.verify.drill.kinds import KINDS, Fault
from gspo_mega.verify.drill.outcome import differences, journal_problems, outcome
from gspo_mega.verify.drill.plan import HEADERS, Row, draw_fault, draw_trial, next_fault, table
from gspo_mega.verify.drill.program import missing_processes, read_rows, refuse
from gspo_mega.verify.drill.scene import Command, NotThereError, Scene

REACHED = {
    True: {"save.rename.before": 6, "publish.rename.after": 6, "rollout.batch": 6, "publish.sent": 6},
    False: {"save.rename.before": 6, "rollout.batch": 6},
}
NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 2, 2, 2


# --- what is drawn ------------------------------------------------------------------------------------------


def drawn(seed, count=200, kinds=tuple(KINDS), live_share=0.5, rows=(), struck=lambda fault: True):
    """Trials, each drawn with the rows of those before it. `struck`: whether a fault is."""
    trials, rows = [], list(rows)
    for number in range(count):
        trials.append(draw_trial(seed, number, kinds, rows, REACHED, live_share))
        rows += [row(fault.kind, tried=struck(fault)) for fault in trials[-1].faults]
    return trials


def test_a_seed_draws_the_same_trials_and_another_seed_others():
    assert drawn(1, 50) == drawn(1, 50)
    assert drawn(1, 50) != drawn(2, 50)
    assert drawn(1, 50)[:20] == drawn(1, 20), "a longer drill begins as a shorter one"


def test_kinds_that_were_struck_least_come_next():
    """Between two kinds that every run has, and between two that only runs with servers have, counts stay close."""
    found = drawn(3)
    assert len(KINDS) >= 20
    counts = Counter(fault.kind for trial in found for fault in trial.faults)
    for is_live in (True, False):
        own = [counts[name] for name, kind in KINDS.items() if kind.is_live == is_live]
        assert max(own) - min(own) <= 2
    assert 0.4 < sum(trial.is_live for trial in found) / len(found) < 0.6
    before = [row(name) for name in KINDS if name not in ("full disk", "kill a rank")] * 2
    first = drawn(4, 1, rows=before, live_share=0.0)[0]
    assert {"full disk", "kill a rank"} <= {fault.kind for fault in first.faults}
    assert len({fault.kind for fault in first.faults}) == len(first.faults), "each kind once in a run"


def test_a_kind_that_is_never_struck_does_not_take_the_place_of_others():
    counts = Counter(
        fault.kind
        for trial in drawn(6, struck=lambda fault: fault.kind != "kill an episode worker", live_share=1.0)
        for fault in trial.faults
    )
    assert counts["kill an episode worker"] <= 2 * min(counts.values()) + 2


def test_what_only_a_server_has_is_struck_only_where_there_is_one():
    for trial in drawn(5):
        assert trial.is_live or not any(KINDS[fault.kind].is_live for fault in trial.faults)
    assert all(trial.is_live for trial in drawn(5, kinds=("kill a scheduler",), live_share=0.0))
    assert not any(trial.is_live for trial in drawn(5, live_share=0.0))


def test_what_a_command_begins_with_comes_when_one_begins_and_the_end_of_a_run_comes_last():
    late = Fault("full disk", "point", point="publish.rename.after", is_late=True)
    start, steps = Fault("kill a rank", "start"), Fault("kill a rank", "steps")
    begin = Fault("slow fsync", "start")
    left, order = [late, start, steps, begin], []
    for is_new in (True, False, True, False):
        order.append(next_fault(left, is_new))
        left.remove(order[-1])
    assert order == [begin, start, steps, late]
    reached = {"rollout.batch": 20, "publish.rename.after": 1, "save.rename.before": 20}
    faults = [draw_fault(KINDS["full disk"], reached, random.Random(n), num_faults=4) for n in range(200)]
    assert {fault.point for fault in faults if fault.is_late} == {"publish.rename.after"}
    assert all(fault.is_late == (fault.point == "publish.rename.after") for fault in faults)
    armed = {draw_fault(KINDS["no right at a declared point"], reached, random.Random(n), 4).point for n in range(50)}
    assert armed == {"save.rename.before"}, "a command that begins with a fault of its end leaves no time for others"
    assert all(fault.hit <= 4 for fault in faults), "each of four faults has its part of the run"
    assert all(fault.place <= 0.25 for fault in faults if fault.when == "steps")


def test_moments_are_points_that_the_run_reaches():
    faults = [fault for trial in drawn(7) for fault in trial.faults]
    for fault in faults:
        kind = KINDS[fault.kind]
        assert (fault.when == "point") == bool(fault.point)
        assert not fault.point or (fault.point in failpoints.POINTS and 1 <= fault.hit <= 3)
        assert fault.point.startswith(kind.points)
        if kind.do in ("disk_full", "denied"):
            assert fault.point not in failpoints.MOMENTS, "a moment is no operation that could fail"
        low, high = kind.seconds
        assert low <= fault.seconds <= high
    assert {fault.when for fault in faults} == {"start", "steps", "point"}


def test_a_kind_whose_points_are_not_reached_is_struck_during_the_steps():
    fault = draw_fault(KINDS["kill inside a publish"], {"rollout.batch": 3}, random.Random(1))
    assert (fault.when, fault.point) == ("steps", "")


# --- the table ----------------------------------------------------------------------------------------------


def row(kind="full disk", **more) -> Row:
    given = {"ended": "exit code 6", "equal": True, "problems": [], "tried": True, "is_live": False, **more}
    return Row(trial=0, kind=kind, moment="", done="", seconds=1.0, **given)


def test_the_table_counts_per_kind_and_names_what_was_not_tried():
    rows = [
        row(), row(ended="went on", is_live=True), row(tried=False),
        row("power cut", equal=False, problems=["differs: state: step"]),
    ]  # fmt: skip
    lines = {line[0]: line[1:] for line in table(rows, {"cut network": "it needs root"})}
    assert list(lines) == list(KINDS) and all(len(line) + 1 == len(HEADERS) for line in lines.values())
    assert lines["full disk"] == ("2", "1", "1", "1", "2", "")
    assert lines["power cut"] == ("1", "0", "0", "1", "0", "differs: state: step")
    assert lines["cut network"][-1] == "not tried: it needs root"


def test_rows_are_read_without_a_torn_end(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert read_rows(file) == []
    text = json.dumps(vars(row()))
    file.write_text(f"{text}\n{text}\n{text[:30]}")
    assert read_rows(file) == [row(), row()]


def test_the_command_shows_the_table_and_says_with_its_exit_code_whether_all_were_equal(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(vars(row())) + "\n")
    words = ["drill", "configs/quickstart.yaml", "--table", "--folder", str(tmp_path)]
    assert main(words) == 0
    assert "1 faults of 1 kinds in 1 runs; not as an undisturbed one: 0" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_text(json.dumps(vars(row(equal=False))) + "\n")
    assert main(words) == 1
    assert main([*words, "--kinds", "kill a rankk"]) == 2
    assert "'kill a rankk' is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override", ["cluster.num_nodes=2", "journal.keep_last=3", "train.from_rollouts=x", "train.rollouts_only=true"]
)
def test_configurations_that_cannot_be_drilled(override):
    loaded = load_config("configs/quickstart.yaml", [override], "train")
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*set {override.partition('=')[0]}="):
        refuse(loaded)


# --- the comparison -----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    checkpoint = folder.checkpoint_dir(NUM_STEPS)
    (checkpoint / "megatron").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (checkpoint / "megatron" / name).write_bytes(b"weights")
    state = {"step": NUM_STEPS, "summary": {"totals": {"num_tokens": 4, "time/step_seconds": 1.0}}}
    atomic_write_json(checkpoint / "state.json", {"format_version": 2, "state": state})
    atomic_write_text(folder.latest_checkpoint_file, checkpoint.name)
    folder.huggingface_dir.mkdir()
    (folder.huggingface_dir / "model.safetensors").write_bytes(b"weights")
    journal = Journal(folder.journal_dir)
    for step in range(NUM_STEPS):
        record(journal, step, [group(step, number) for number in range(NUM_GROUPS)])
    lines = [{"step": step, "time": float(step), "reward/mean": 0.5, "time/step_seconds": 2.0} for step in (1, 2)]
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def record(journal: Journal, step: int, groups: list[Group]) -> None:
    with journal.begin(step, step, GROUP_SIZE, {}) as writer:
        for one in groups:
            for episode in one.episodes:
                writer.add(episode)
        writer.finish(RolloutBatch(step, groups, {}, {}), {})


def group(step: int, number: int, tokens=(5, 6), prompt: str | None = None, size: int = GROUP_SIZE) -> Group:
    asked = Prompt(prompt or f"train:{step}-{number}", "train", (1, 2), "1 + 1 =", answer="2")
    rows = [
        one_turn_row(
            f"step{step:06d}-g{number:05d}-s{sample:03d}", number, asked, list(tokens), [1, 1], [-1.0, -0.5],
            [step] * 2, "stop", "two", reward=float(sample),
        )
        for sample in range(size)
    ]  # fmt: skip
    return Group.from_rows(number, asked, rows)


def copy_of(run: RunFolder) -> RunFolder:
    return RunFolder(shutil.copytree(run.path, run.path.with_name("other")))


def test_the_same_run_at_another_time_has_the_same_outcome(run):
    other = copy_of(run)
    lines = other.metrics_file.read_text().replace('"time": 1.0', '"time": 77.0').replace(": 2.0}", ": 3.0}")
    other.metrics_file.write_text(lines)
    (other.checkpoint_dir(NUM_STEPS) / "megatron" / ".metadata").write_bytes(b"the same in another order")
    assert differences(outcome(run), outcome(other)) == []
    assert journal_problems(other, GROUP_SIZE, run) == []


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda run: (run.checkpoint_dir(2) / "megatron/__0_0.distcp").write_bytes(b"wEights"), "checkpoint/megatron/__0_0.distcp"),
        (lambda run: (run.huggingface_dir / "model.safetensors").write_bytes(b"other"), "hf/model.safetensors"),
        (lambda run: (run.huggingface_dir / "more").write_bytes(b""), "hf/more"),
        (lambda run: run.metrics_file.write_text(run.metrics_file.read_text().replace("0.5", "0.25", 1)), "metrics/step 1: reward/mean"),
        (lambda run: run.metrics_file.write_text(run.metrics_file.read_text().splitlines()[1] + "\n"), "metrics/step 1"),
        (lambda run: run.metrics_file.write_text(run.metrics_file.read_text() * 2), "metrics/steps"),
        (lambda run: record(Journal(run.journal_dir), 1, [group(1, 0), group(1, 1, tokens=(5, 7))]), "journal/step 2"),
        (lambda run: Journal(run.journal_dir).file(1).unlink(), "journal/step 2"),
    ],
)  # fmt: skip
def test_every_difference_is_named(run, change, name):
    other = copy_of(run)
    change(other)
    assert name in differences(outcome(run), outcome(other))


def test_one_token_in_the_middle_of_a_long_response_is_a_difference(run):
    other = copy_of(run)
    tokens = list(range(3000))
    for folder, one in ((run, 7), (other, 8)):
        long = one_turn_row(
            "step000001-g00000-s000", 0, group(1, 0).prompt, [*tokens, one, *tokens], [1] * 6001, [-1.0] * 6001,
            [1] * 6001, "stop", "two", reward=1.0,
        )  # fmt: skip
        record(Journal(folder.journal_dir), 1, [Group.from_rows(0, group(1, 0).prompt, [long])])
    assert differences(outcome(run), outcome(other)) == ["journal/step 2"]


def test_a_changed_counter_is_named(run):
    other = copy_of(run)
    state = json.loads((other.checkpoint_dir(2) / "state.json").read_text())
    state["state"]["step"] = 3
    (other.checkpoint_dir(2) / "state.json").write_text(json.dumps(state))
    assert differences(outcome(run), outcome(other)) == ["state: step"]


def test_metrics_that_only_a_run_with_servers_has_are_left_out_where_it_is_compared_with_one_without(run):
    other = copy_of(run)
    other.metrics_file.write_text(run.metrics_file.read_text().replace("}", ', "publish/num_bytes": 3}'))
    assert differences(outcome(run), outcome(other), same_source=False) == []
    assert "metrics/step 1: publish/num_bytes" in differences(outcome(run), outcome(other))


@pytest.mark.parametrize(
    "groups, problem",
    [
        ([group(1, 0)], "its prompts are not those that were due"),
        ([group(1, 0), group(1, 1, prompt="train:1-0")], "its prompts are not those that were due"),
        ([group(1, 0), group(1, 1, size=1)], "group 1 has 1 samples of 2"),
    ],
)
def test_a_journal_that_lost_or_doubled_something(run, groups, problem):
    other = copy_of(run)
    record(Journal(other.journal_dir), 1, groups)
    assert any(problem in one for one in journal_problems(other, GROUP_SIZE, run))


def test_a_sample_that_was_sampled_twice(run):
    journal = Journal(run.journal_dir)
    groups = [group(1, 0), group(1, 1)]
    with journal.begin(1, 1, GROUP_SIZE, {}) as writer:
        for episode in (*groups[0].episodes, *group(1, 0, tokens=(8, 9)).episodes, *groups[1].episodes):
            writer.add(episode)
        writer.finish(RolloutBatch(1, groups, {}, {}), {})
    assert [one for one in journal_problems(run, GROUP_SIZE) if "was sampled again" in one]
    journal.put_aside(1)
    assert [one for one in journal_problems(run, GROUP_SIZE) if "were of no use" in one]


# --- striking -----------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    """A scene whose command is a process that stands still, with a child that looks like a rank, and one that looks like
    a standby and, once the file `go` is there, like what has become a rank.
    """
    monkeypatch.setattr(scene_module, "_LEFT_SECONDS", 0.2)
    rank, program = tmp_path / "gspo_mega.train.worker", tmp_path / "program.py"
    standby = tmp_path / "gspo_mega.train.standby"
    ready, waits = tmp_path / "ready", tmp_path / "waits"
    rank.write_text(f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)")
    standby.write_text(
        "import os, pathlib, time\nname = pathlib.Path('/proc/self/comm')\n"
        f"name.write_text({NAME!r}); pathlib.Path({str(waits)!r}).touch()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "name.write_text('python'); time.sleep(60)"
    )
    program.write_text(
        f"import subprocess, sys; one = subprocess.Popen([sys.executable, {str(standby)!r}])\n"
        f"subprocess.run([sys.executable, {str(rank)!r}])"
    )
    scene = Scene(tmp_path / "trial", "run", [], own_network=False, disk_bytes=None)
    processes.adopt_orphans()
    process = subprocess.Popen([sys.executable, str(program)], start_new_session=True)
    scene.command = Command(process, time.monotonic(), tmp_path / "reached", tmp_path / "err")
    deadline = time.monotonic() + 30
    while not (ready.exists() and waits.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    yield scene
    scene.close(remove=True)
    process.wait()
    processes.adopt_orphans(False)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_standby_is_a_rank_once_it_has_become_one(sleeper, tmp_path):
    (rank,), (standby,) = sleeper.pids("rank"), sleeper.pids("standby")
    assert KINDS["stop a standby for good"].strike(sleeper, Fault("", "steps")) == "SIGSTOP to standby"
    deadline = time.monotonic() + 10
    while state_of(standby) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    sleeper.wake()  # not what was stopped for good
    assert state_of(rank) != "T" and state_of(standby) == "T"
    processes.send_signal(standby, signal.SIGCONT)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 30
    while len(both := sleeper.pids("rank")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {*both} == {rank, standby} and not sleeper.pids("standby")
    with pytest.raises(NotThereError):
        KINDS["kill a standby"].strike(sleeper, Fault("", "steps"))


def test_signals_reach_the_process_of_the_role_and_what_is_left_is_named(sleeper):
    fault = Fault("", "steps")
    (rank,) = sleeper.pids("rank")
    assert KINDS["stop a rank a while"].strike(sleeper, fault) == "SIGSTOP to rank 0"
    deadline = time.monotonic() + 10
    while state_of(rank) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(rank) == "T"
    sleeper.wake()
    while state_of(rank) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state_of(rank) != "T"
    KINDS["stop a rank for good"].strike(sleeper, fault)
    KINDS["stop a rank a while"].strike(sleeper, fault)
    sleeper.wake()
    time.sleep(0.1)
    assert state_of(rank) == "T", "what is stopped for good is not woken with others"
    with pytest.raises(NotThereError):
        KINDS["kill a scheduler"].strike(sleeper, fault)
    KINDS["low memory of a rank"].strike(sleeper, fault)
    limit = next(line for line in Path(f"/proc/{rank}/limits").read_text().splitlines() if "address space" in line)
    assert limit.split()[3] != "unlimited"
    KINDS["kill the supervisor"].strike(sleeper, fault)
    assert sleeper.command.process.wait(10) == -signal.SIGKILL
    assert sleeper.command.said() == "killed by SIGKILL"
    assert any(f"process {rank} still runs" in one for one in sleeper.left_running()), "nothing ended it"
    assert sleeper.pids("rank") == []


def test_points_are_read_as_they_are_reached_and_a_torn_line_waits(tmp_path):
    command = Command(None, 0.0, tmp_path / "reached", tmp_path / "err")
    command.look()
    assert not command.reached and command.first_reached is None
    with command.record.open("a") as file:
        file.write("save.clear.before\nsave.cl")
    command.look()
    with command.record.open("a") as file:
        file.write("ear.after\n")
    command.look()
    assert command.reached == {"save.clear.before": 1, "save.clear.after": 1}


def test_a_traceback_is_told_from_an_error_for_a_person(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(6)"])
    ended.wait()
    command = Command(ended, 0.0, tmp_path / "reached", tmp_path / "err")
    command.errors.write_text("checkpoint x cannot be written: no space\nfree some\n")
    assert (command.said(), command.has_traceback()) == ("exit code 6: checkpoint x cannot be written: no space", False)
    command.errors.write_text("a warning\nTraceback (most recent call last):\n  File\nOSError: no\n")
    assert (command.said(), command.has_traceback()) == ("exit code 6: OSError: no", True)


def test_faults_that_begin_with_the_command_name_their_point_and_calls(tmp_path):
    fault = Fault("", "point", point="save.rename.before", hit=2, amount=0.5)
    mark = tmp_path / "mark"
    armed = failpoints.InjectedFault.parse(KINDS["no space at a declared point"].variable(fault, mark))
    assert (armed.point, armed.hit, armed.do, armed.once) == ("save.rename.before", 2, "disk_full", 1)
    again = failpoints.InjectedFault.parse(KINDS["kill at a declared point"].variable(replace(fault, amount=0.1), mark))
    assert (again.do, again.mark, again.once) == ("kill", str(mark), 0), "some kills come again after each restart"
    assert KINDS["full disk"].variable(fault, mark) == "" and KINDS["full disk"].prefix(fault, tmp_path) == []
    words = KINDS["failing fsync"].prefix(replace(fault, amount=0.0), tmp_path / "log")
    assert words[-1] == "inject=fsync,fdatasync:error=EIO:when=1"


def test_processes_that_a_configuration_does_not_have_are_named():
    """The soak's configurations: each kind that needs a process is struck in one of them and left out of another."""
    folder = Path(__file__).parents[2] / "soak/drills"
    missing = {path.stem: missing_processes(load_config(path, [], "train").config) for path in folder.glob("*.yaml")}
    assert [name for name in sorted(missing) if "standby" not in missing[name]] == ["kept", "standbys"]
    assert [name for name in sorted(missing) if "episode worker" not in missing[name]] == ["turns"]
    assert missing["ahead"]["standby"] == "train.standby_processes is false"


def test_needs_that_are_missing_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    found = machine.missing_needs(has_own_mounts=False)
    assert set(found) == {"mounts", "disk", "network", "sockets", "strace"}
    assert "root, or user name spaces" in found["disk"]
    assert {need for kind in KINDS.values() for need in kind.needs} <= {*found, "standby", "episode worker"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_disk_fills_turns_read_only_and_loses_what_was_not_flushed(tmp_path):
    if "disk" in (missing := machine.missing_needs(has_own_mounts=True)):
        pytest.skip(missing["disk"])
    disk = machine.Disk(tmp_path / "image", tmp_path / "mount", 2**24)
    try:
        kept, lost = disk.mount / "kept", disk.mount / "lost"
        disk.fill(8192)
        with pytest.raises(OSError, match="No space left"):
            kept.write_bytes(bytes(2**20))
        disk.free()
        with kept.open("wb") as file:
            file.write(b"flushed")
            file.flush()
            os.fsync(file.fileno())
        with lost.open("wb") as file:
            file.write(b"not flushed")
            file.flush()  # the kernel has it, the disk does not
            disk.fail()
        with pytest.raises(OSError, match="Input/output error"):
            (disk.mount / "more").write_bytes(b"x")
        disk.mend()
        assert kept.read_bytes() == b"flushed"
        assert not lost.exists() or lost.read_bytes() == b""
        disk.make_read_only()
        with pytest.raises(OSError, match="Read-only file system"):
            (disk.mount / "more").write_bytes(b"x")
        disk.mend()
        (disk.mount / "more").write_bytes(b"x")
    finally:
        disk.close()
