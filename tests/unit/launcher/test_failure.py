from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.run_folder import Attempt, atomic_write_json
from gspo_mega.launcher.attempt_state import describe_failure, one_line, summary_of, what_now


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path / "0001").create()


def child(attempt, kind, index, exit_code, log="one\ntwo\n"):
    path = attempt.rank_log(index) if kind == "rank" else attempt.server_log(index)
    path.write_text(log)
    how = f"exited with code {exit_code}" if exit_code is None or exit_code >= 0 else "was killed by SIGKILL"
    return SimpleNamespace(
        spec=SimpleNamespace(kind=kind, index=index, log=path),
        name=f"{kind} {index}",
        exit_code=exit_code,
        end_described=how,
    )


def record(attempt, rank, time, *, text="text", user=False, exit_code=7, **more):
    atomic_write_json(
        attempt.error_file(rank),
        {
            "rank": rank,
            "type": "E",
            "text": text,
            "traceback": f"Traceback: {text}",
            "time": time,
            "is_user_error": user,
            "exit_code": exit_code,
            **more,
        },
    )


def test_the_earliest_record_is_the_cause(attempt):
    record(attempt, 0, 12.0, text="echo")
    record(attempt, 1, 11.0, text="cause", exit_code=5)
    error = describe_failure([child(attempt, "rank", 0, 7), child(attempt, "rank", 1, 5)], attempt)
    assert "rank 1 failed" in str(error) and "Traceback: cause" in str(error) and "echo" not in str(error)
    assert error.exit_code == 5


def test_what_the_machine_did_is_said_without_a_traceback(attempt):
    for fault, has_hint in (("it ran out of memory: can't allocate", True), ("another rank cannot be reached", False)):
        record(attempt, 0, 12.0, machine_fault=fault)
        error = describe_failure([child(attempt, "rank", 0, 7)], attempt)
        assert str(error) == f"rank 0 failed: {fault}\n(where, and all of its output: {attempt.rank_log(0)})"
        assert one_line(error) == f"rank 0 failed: {fault}"
        assert ("gspo-mega plan" in what_now(attempt, "no restart", error)) == has_hint


def test_a_killed_rank_comes_before_the_records_of_its_peers(attempt):
    record(attempt, 0, 1.0, text="connection closed")
    error = describe_failure([child(attempt, "rank", 0, 7), child(attempt, "rank", 1, -9)], attempt)
    assert "rank 1 was killed by SIGKILL" in str(error)


def test_a_rank_comes_before_a_server(attempt):
    error = describe_failure([child(attempt, "server", 0, 1), child(attempt, "rank", 0, 1)], attempt)
    assert str(error).startswith("rank 0 exited with code 1")


def test_the_tail_of_a_long_log_and_an_empty_log(attempt):
    long = child(attempt, "rank", 0, 1, log="\n".join(f"line {i}" for i in range(100)))
    text = str(describe_failure([long], attempt))
    assert "line 99" in text and "line 80" in text and "line 79" not in text
    assert "is empty" in str(describe_failure([child(attempt, "rank", 0, 1, log="")], attempt))


PACKAGES = """\
/v/lib/python3.11/site-packages/megatron/core/optimizer/clip_grads.py:29: UserWarning: Transformer Engine and Apex are\
 not installed. Falling back to local implementations
  warnings.warn(
2026-11-28 22:07:46,838 INFO megatron.core.distributed.fsdp.src: Detected Megatron Core, using Megatron-FSDP.
{}/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `x` is deprecated.
  return func(*args, **kwargs)
"""


def test_what_packages_say_at_every_start_is_not_shown_as_the_end_of_a_log(attempt):
    said = "2026-11-28 22:07:53,506 INFO gspo_mega.engine: step 3\n/home/me/reward.py:3: UserWarning: mine\n  warn()\n"
    text = str(describe_failure([child(attempt, "rank", 1, -9, log=PACKAGES.format(said))], attempt))
    assert text.endswith("rank_1.log:\n  " + said.rstrip().replace("\n", "\n  "))
    text = str(describe_failure([child(attempt, "rank", 1, -9, log=PACKAGES.format(""))], attempt))
    assert text.endswith("rank_1.log has nothing but what packages say when they are imported)")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank 1 failed:\n\nTraceback: x\nKeyError: 3", "rank 1 failed: KeyError: 3"),
        ("Traceback:\nKeyError: 3", "KeyError: 3"),
        ("rank 1 was killed\nend of /x:\n  one\n  return func(*args)", "rank 1 was killed"),
        ("ranks exited\nend of /x:\n  one\n  srun: error: no step", "ranks exited: srun: error: no step"),
        ("rank 1 was killed\nend of /x:\n  /y.py:3: FutureWarning: an error", "rank 1 was killed"),
        ("", ""),
    ],
)
def test_a_recorded_error_in_one_line(text, line):
    assert summary_of(text) == line


def test_a_run_that_failed_for_good_says_why_it_ends_and_what_to_do(attempt):
    killed = describe_failure([child(attempt, "rank", 1, -9)], attempt)
    said = what_now(attempt, "no automatic restart: the run came no further than the start before", killed).splitlines()
    assert said[0].startswith("failed   no automatic restart")
    assert "batch.micro_batch_tokens" in said[1] and "To continue: gspo-mega train" in said[2]
    failed = describe_failure([child(attempt, "rank", 1, 1)], attempt)
    assert "memory" not in what_now(attempt, "no automatic restart: train.max_restarts is 0", failed)


def test_a_servers_exit_code_is_kept_where_it_is_one(attempt):
    assert describe_failure([child(attempt, "server", 0, 2)], attempt).exit_code == 2
    assert describe_failure([child(attempt, "server", 0, -9)], attempt).exit_code == 3
    assert describe_failure([child(attempt, "server", 0, 0)], attempt).exit_code == 3


def test_a_reward_models_server_is_not_taken_for_one_of_the_policy(attempt):
    atomic_write_json(attempt.server_file("server-0"), {"error": "of the policy"})
    error = describe_failure([child(attempt, "reward server", 0, 2, log="no score.bias\n")], attempt)
    assert str(error).startswith("reward server 0 exited with code 2") and "no score.bias" in str(error)
    assert error.exit_code == 2 and "of the policy" not in str(error)


SRUN = "srun: error: node2: task 3: {}\nsrun: Terminating StepId=7.1\nsrun: error: node1: tasks 0-1: Terminated\n"


@pytest.mark.parametrize(
    ("how", "hint"),
    [("Killed", "ran out of memory"), ("Out Of Memory", ""), ("Segmentation fault (core dumped)", "")],
)
def test_of_a_slurm_step_the_first_task_that_was_killed_is_the_cause(attempt, how, hint):
    record(attempt, 0, 1.0, text="connection closed by peer")
    error = describe_failure([child(attempt, "ranks", 0, 137, SRUN.format(how))], attempt)
    assert str(error).startswith(f"rank 3 on node2 ended without an error report: {how}") and hint in str(error)


def test_of_a_slurm_step_a_rank_with_a_record_is_the_cause(attempt):
    record(attempt, 3, 1.0, text="the cause")
    step = child(attempt, "ranks", 0, 7, SRUN.format("Exited with exit code 7"))
    assert str(describe_failure([step], attempt)).startswith("rank 3 failed:\n\nTraceback: the cause")


def test_of_a_slurm_step_without_any_record_srun_is_heard(attempt):
    error = describe_failure([child(attempt, "ranks", 0, 1, "srun: error: Unable to create step\n")], attempt)
    assert "exited with code 1" in str(error) and str(error).endswith("srun: error: Unable to create step")


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("the disk is full", "the disk is full"),
        ("a disk is full:\n  make room", "a disk is full"),
        (f"rank 1 failed:\n{TRACEBACK}ValueError: x", "rank 1 failed: ValueError: x"),
        (f"rank 1 failed:\n{TRACEBACK}ValueError: x\n  and more of it\n(logs: /x)", "rank 1 failed: ValueError: x"),
        # The end of a log is indented as a whole.
        (
            "rank 1 ended:\nend of /x/rank_1.log:\n  " + f"starting\n{TRACEBACK}ValueError: x".replace("\n", "\n  "),
            "rank 1 ended: ValueError: x",
        ),
        (f"rank 1 failed:\n{TRACEBACK}", "rank 1 failed"),
    ],
)
def test_a_failure_in_one_line(text, line):
    assert one_line(GspoMegaError(text)) == line


def test_a_killed_task_that_left_a_record_says_itself_what_was_wrong(attempt):
    """A rank that reports an error and then takes long to end is killed with the others; the cause is its report."""
    log = "srun: error: n1: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 7\n"
    record(attempt, 1, 1.0, text="the cause")
    error = describe_failure([child(attempt, "ranks", 0, 1, log)], attempt)
    assert "rank 1 failed" in str(error) and "Traceback: the cause" in str(error)
    attempt.error_file(1).unlink()
    record(attempt, 0, 1.0, text="connection closed")
    error = describe_failure([child(attempt, "ranks", 0, 1, log)], attempt)
    assert str(error).startswith("rank 1 on n1 ended without an error report: Killed")


def test_a_rank_that_reported_its_error_and_was_killed_then_is_no_killed_rank(attempt):
    record(attempt, 1, 1.0, text="the cause")
    record(attempt, 0, 2.0, text="echo")
    error = describe_failure([child(attempt, "rank", 0, 7), child(attempt, "rank", 1, -9)], attempt)
    assert "rank 1 failed" in str(error) and "Traceback: the cause" in str(error)


def test_logs_and_records_on_a_lost_disk_do_not_hide_how_a_rank_ended(attempt):
    """Reading them fails, here because folders are in their places."""
    rank, server = child(attempt, "rank", 0, 1), child(attempt, "server", 0, 3)
    for path in (rank.spec.log, server.spec.log):
        path.unlink()
        path.mkdir()
    for path in (attempt.error_file(0), attempt.server_file("server-0")):
        path.mkdir()
    text = str(describe_failure([rank], attempt))
    assert text.startswith("rank 0 exited with code 1 without an error report")
    assert f"its log {rank.spec.log} cannot be read: Is a directory" in text
    assert str(describe_failure([server], attempt)).startswith("server 0 exited with code 3")
    rank.spec.kind = "ranks"
    assert "cannot be read" in str(describe_failure([rank], attempt))
