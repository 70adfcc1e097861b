"""The supervisor with real processes that misbehave: what the user sees, how fast it ends, that nothing is left."""

import json
import os
import signal
import time

import pytest
from launcher_runs import DEADLINE_SECONDS, Launched, make_config

@pytest.fixture
def start(tmp_path):
    """start(behaviours) launches a run of 2 ranks and 1 server; at the end of the test nothing may be left of it."""
    make_config(tmp_path)
    launched = []

    def launch(behaviours, stop_grace_seconds=60.0, work=None):
        launched.append(Launched(tmp_path, behaviours, stop_grace_seconds, work))
        return launched[-1]

    yield launch
    for run in launched:
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := run.left_running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


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
    assert "server 0 started" in attempt.supervisor_log.read_text()
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
    assert "server 0 exited with code 9" in err and "Fatal: something in a library" in err


def test_what_a_rank_leaves_behind_is_ended_too(start):
    run = start({"rank 0": "orphan", "rank 1": "orphan"})
    code, _, _ = run.finish()
    assert code == 0
    assert run.left_running() == []


@pytest.mark.parametrize("number, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_one_signal_stops_in_order(start, number, expected):
    run = start({"rank 0": "stop", "rank 1": "stop"})
    run.wait_started()
    run.process.send_signal(number)
    code, out, err = run.finish()
    assert (code, err) == (expected, "")
    assert "same command continues" in out
    assert run.folder.latest_attempt().stop_reason() == number.name
    assert run.left_running() == []


def test_a_second_signal_ends_at_once(start):
    run = start({"rank 0": "deaf", "rank 1": "deaf"})
    run.wait_started()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None, "one signal waits for the ranks"
    run.process.send_signal(signal.SIGINT)
    seconds, code, out, _ = seconds_to_finish(run)
    assert code == 130
    assert "last checkpoint" in out
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
    deadline = time.monotonic() + 5
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
    deadline = time.monotonic() + 120
    while (attempt := run.folder.latest_attempt()) is None or not attempt.console_log.exists() or text not in attempt.console_log.read_text():
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_real_ranks_work_together_and_leave_a_result(start):
    run = start({}, work="add_up")
    code, out, err = run.finish(180)
    assert (code, err) == (0, "")
    assert "demo: 2 ranks, sum 3\n" in out
    assert json.loads(run.folder.latest_attempt().result_file.read_text()) == {"sum": 3.0}
    assert run.left_running() == []


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
    code, _, err = run.finish(180)
    assert code == 7
    assert err.startswith("rank 1 was killed by SIGKILL")
    assert run.left_running() == []


def test_real_ranks_that_stop_in_order_say_so_by_their_exit_code(start):
    run = start({}, work="stop_in_order")
    wait_for_console(run, "waiting for a stop")
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish(60)
    assert (code, err) == (130, "")
    assert "Stopped in order" in out
    assert json.loads(run.folder.latest_attempt().result_file.read_text()) == {"stopped": "SIGINT"}
