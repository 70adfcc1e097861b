"""The supervisor with real processes that misbehave: what the user sees, how fast it ends, that nothing is left."""

import ipaddress
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launcher_runs import DEADLINE_SECONDS, PATIENCE_SECONDS, Launched, write_config
from waiting import until


@pytest.fixture
def start(tmp_path):
    """start(behaviours) launches a run of 2 ranks and 1 server; at the end of the test nothing may be left of it."""
    launched = []

    def launch(behaviours, stop_grace_seconds=60.0, work=None, **server):
        write_config(tmp_path, server=server)
        launched.append(Launched(tmp_path, behaviours, stop_grace_seconds, work))
        return launched[-1]

    yield launch
    for run in launched:
        run.leaves_nothing()


def seconds_to_finish(run) -> tuple[float, int, str, str]:
    started = time.monotonic()
    code, out, err = run.finish()
    return time.monotonic() - started, code, out, err


def test_success_shows_rank_0s_lines_once_and_ends_the_server(start):
    run = start({"rank 0": "finish", "rank 1": "finish"})
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("step")] == [f"step {i} of rank 0" for i in range(3)]
    assert "chatter" not in out
    attempt = run.folder.latest_attempt()
    assert "chatter" in attempt.rank_log(1).read_text()
    assert str(attempt.logs_dir) in out
    assert "server 0 runs as process" in attempt.supervisor_log.read_text()
    assert run.left_running() == []


def test_a_users_error_is_its_text_and_nothing_else(start):
    run = start({"rank 0": "echo", "rank 1": "user_error"})
    run.wait_started()
    seconds, code, out, err = seconds_to_finish(run)
    assert code == 2
    assert err == "data.path: no such file: nowhere.jsonl\n"
    assert "Traceback" not in out
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_a_defect_shows_the_traceback_of_the_rank_that_caused_it_once(start):
    run = start({"rank 0": "echo", "rank 1": "defect"})
    run.wait_started()
    seconds, code, out, err = seconds_to_finish(run)
    assert code == 7
    assert err.startswith("rank 1 failed:")
    assert err.count("Traceback") == 1 and "ZeroDivisionError: one over nothing" in err
    assert "Connection closed" not in out + err
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_ranks_and_grandchildren_that_ignore_sigterm_end_all_the_same(start):
    run = start({"rank 0": "deaf", "rank 1": "defect", "server 0": "deaf"})
    run.wait_started()
    seconds, code, _, err = seconds_to_finish(run)
    assert (code, err.count("ZeroDivisionError: one over nothing")) == (7, 1)
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_a_rank_killed_from_outside_is_the_cause_not_its_peers_echo(start):
    run = start({"rank 0": "hang", "rank 1": "killed"})
    run.wait_started()
    seconds, code, _, err = seconds_to_finish(run)
    assert code == 7
    assert "rank 1 was killed by SIGKILL" in err and "memory" in err
    assert seconds < DEADLINE_SECONDS


def test_a_rank_without_a_record_shows_the_end_of_its_log(start):
    run = start({"rank 1": "no_record"})
    code, _, err = run.finish()
    assert code == 7
    assert "rank 1 exited with code 9" in err and "Fatal: something in a library" in err


def test_a_server_that_gave_up_ends_the_run(start):
    run = start({"server 0": "give_up"})
    run.wait_started()
    seconds, code, _, err = seconds_to_finish(run)
    assert code == 3
    assert "server 0 gave up: SGLang exited with code 1" in err and "the server's last words" in err
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_a_server_that_is_gone_ends_the_run(start):
    code, _, err = start({"server 0": "no_record"}).finish()
    assert code == 9
    assert "server 0 gave up: its process exited with code 9" in err and "Fatal: something in a library" in err


@pytest.mark.parametrize("end", ["give_up", "no_record"])
def test_one_server_that_is_gone_leaves_the_run_to_the_others(start, end):
    run = start({"server 0": end, "rank 0": "finish_when_told", "rank 1": "finish_when_told"}, num_servers=2)
    run.wait_started(4)
    log = run.folder.latest_attempt().supervisor_log
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "server 0 is given up" not in log.read_text() and run.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (run.folder.latest_attempt().path / "go on").touch()
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    (warning,) = [line for line in out.splitlines() if line.startswith("warning")]
    said = {"give_up": "SGLang exited with code 1", "no_record": "exited with code 9"}[end]
    assert "server 0 is given up" in warning and said in warning and "1 of 2 servers is left" in warning
    assert run.left_running() == []


def test_the_last_server_that_gives_up_ends_the_run_with_the_first_ones_words(start):
    run = start({"server 0": "give_up", "server 1": "give_up_later"}, num_servers=2)
    run.wait_started(4)
    (run.folder.latest_attempt().path / "go on").touch()
    code, out, err = run.finish()
    assert code == 3
    assert "server 0 gave up: SGLang exited with code 1" in err and "1 of 2 servers is left" in out
    assert "server 1 is given up: SGLang exited with code 9; no server of 2 is left" in out
    assert run.left_running() == []


def test_what_a_rank_leaves_behind_is_ended_too(start):
    run = start({"rank 0": "orphan", "rank 1": "orphan"})
    code, _, _ = run.finish()
    assert code == 0
    assert run.left_running() == []


def test_orphans_that_end_leave_no_zombies(start):
    run = start({"rank 0": "ended_orphans", "rank 1": "ended_orphans"})
    run.wait_started()
    attempt, deadline = run.folder.latest_attempt(), time.monotonic() + PATIENCE_SECONDS
    while len(list(attempt.path.glob("left rank *"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while zombies := [pid for pid in children_of(run.process.pid) if "(zombie)" in status_of(pid)]:
        assert time.monotonic() < deadline, f"{len(zombies)} zombies"
        time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 130


def children_of(pid):
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def status_of(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_supervisor_that_lost_its_folder_ends_its_ranks_and_says_who_has_it(start):
    run = start({})
    run.wait_started()
    (record,) = run.folder.lease_dir.glob("0*")
    other = json.loads(record.read_text()) | {"host": "node7", "boot": "another", "pid": 77}
    (run.folder.lease_dir / f"{int(record.name) + 1:08d}").write_text(json.dumps(other))
    code, _, err = run.finish()
    assert code == 9
    assert "was taken over by process 77 on node7, which saw no sign of life from this one" in err
    assert run.left_running() == []


@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_one_signal_stops_in_order(start, number, expected):
    run = start({"rank 0": "stop", "rank 1": "stop"})
    run.wait_started()
    run.process.send_signal(number)
    code, out, err = run.finish()
    assert (code, err) == (expected, "")
    closing = f"Stopped in order ({number.name}). Saved: no checkpoint yet; what was sampled is in {run.folder.path}"
    assert out.splitlines()[-1].startswith(closing) and out.endswith(f"gspo-mega train {run.folder.path}\n")
    assert run.folder.latest_attempt().stop_reason() == number.name
    assert run.left_running() == []


def test_a_second_signal_ends_at_once(start):
    run = start({"rank 0": "deaf", "rank 1": "deaf"})
    run.wait_started()
    run.process.send_signal(signal.SIGINT)
    until(lambda: run.folder.latest_attempt().stop_reason() == "SIGINT", PATIENCE_SECONDS)
    time.sleep(0.5)
    assert run.process.poll() is None, "one signal waits for the ranks"
    run.process.send_signal(signal.SIGINT)
    seconds, code, out, _ = seconds_to_finish(run)
    assert code == 130
    assert out.splitlines()[-1].startswith("Ended at once (SIGINT). Saved: no checkpoint yet; ")
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_ranks_that_do_not_stop_end_with_the_grace_period(start):
    run = start({"rank 0": "stop"}, stop_grace_seconds=1.0)
    run.wait_started()
    run.process.send_signal(signal.SIGTERM)
    seconds, code, out, _ = seconds_to_finish(run)
    assert code == 143
    assert "did not stop within 1 s" in out
    assert 1.0 < seconds < DEADLINE_SECONDS


def test_work_that_finished_is_a_success_though_a_stop_was_asked_for(start):
    run = start({"rank 0": "finish", "rank 1": "finish"})
    run.wait_started(1)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 0


def test_all_die_with_the_supervisor_when_it_is_killed(start):
    run = start({})
    run.wait_started()
    assert len(run.left_running()) == 4, "the supervisor, two ranks, a server"
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while run.left_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.left_running() == []


def test_two_runs_never_share_a_folder(start):
    first = start({})
    first.wait_started()
    code, _, err = start({}).finish()
    assert code == 2
    assert "in use by another run" in err and str(first.process.pid) in err
    assert len(first.folder.attempts()) == 1
    first.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGINT)
    first.finish()


# --- real ranks: torch.distributed over gloo, in the real shell of a rank ------------------------------------


def wait_for_console(run, text):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (
        (attempt := run.folder.latest_attempt()) is None
        or not attempt.console_log.exists()
        or text not in attempt.console_log.read_text()
    ):
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_real_ranks_work_together_and_leave_a_result(start):
    run = start({}, work="add_up")
    code, out, err = run.finish()
    assert (code, err) == (0, "")
    assert "demo: 2 ranks, sum 3\n" in out
    assert json.loads(run.folder.latest_attempt().result_file.read_text()) == {"sum": 3.0}
    assert run.left_running() == []


def test_ranks_listen_on_the_loopback_alone(start):
    """Whatever the machine's name resolves to: gloo by itself takes the address of that."""
    run = start({}, work="stop_in_order")
    wait_for_console(run, "waiting for a stop")
    ranks = [pid for pid in run.left_running() if b"launcher_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    listening = [
        {c.laddr.ip for c in psutil.Process(pid).net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}
        for pid in ranks
    ]
    assert len(listening) >= 2 and all(ipaddress.ip_address(address).is_loopback for address in set().union(*listening))
    assert sum(map(bool, listening)) == 2, "the store of rank 0, and gloo of both"
    run.process.send_signal(signal.SIGINT)
    run.finish()


def test_one_ranks_error_ends_another_that_sits_in_a_collective(start):
    run = start({}, work="fail_while_others_wait")
    wait_for_console(run, "rank 0 sits in a collective")
    seconds, code, out, err = seconds_to_finish(run)
    assert (code, err) == (2, "train.jsonl:7: not JSON\n")
    assert "Traceback" not in out
    assert seconds < DEADLINE_SECONDS
    assert run.left_running() == []


def test_a_real_rank_killed_beside_one_in_a_collective(start):
    run = start({}, work="hang_while_one_dies")
    code, _, err = run.finish()
    assert code == 7
    assert err.startswith("rank 1 was killed by SIGKILL")
    assert run.left_running() == []


def test_real_ranks_that_stop_in_order_say_so_by_their_exit_code(start):
    run = start({}, work="stop_in_order")
    wait_for_console(run, "waiting for a stop")
    # Asked for their stacks, by a signal and from outside, they tell them and go on.
    run.process.send_signal(signal.SIGUSR2)
    logs = run.folder.latest_attempt().logs_dir
    until(lambda: len(list(logs.glob("stacks_1/rank_?.txt"))) == 2, PATIENCE_SECONDS)
    for rank in (0, 1):
        text = (logs / f"stacks_1/rank_{rank}.txt").read_text()
        assert text.startswith(f"rank {rank}, phase start, ") and "in stop_in_order\n" in text and "Thread 0x" in text
    asked = subprocess.run(
        [sys.executable, "-m", "gspo_mega", "status", str(run.folder.path), "--stacks"], capture_output=True, text=True
    )
    assert re.search(r"^rank 1, phase start; at \S+:\d+ in ", asked.stdout, re.M), asked
    assert f"stacks of all 2 ranks: {logs / 'stacks_2'}" in asked.stdout
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert (code, err) == (130, "")
    assert f"SIGUSR2: stacks of all 2 ranks: {logs / 'stacks_1'}\n" in out
    assert "Stopped in order" in out
    assert json.loads(run.folder.latest_attempt().result_file.read_text()) == {"stopped": "SIGINT"}
