"""The supervisor of one server: restarts, giving up, and leaving nothing behind. A stand-in plays SGLang."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import run_config
from waiting import alive, until, wait_gone

from gspo_mega.base import processes
from gspo_mega.base.errors import RolloutError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.rollout.registration import Registration, read_registrations

# Of a process that ends at once on a free machine. Waiting longer costs nothing where all is well.
PATIENCE_SECONDS = 120.0
SPEC = read_model_spec(Path(__file__).parents[2] / "configs/models/quickstart_moe.json")


class Supervised:
    def __init__(self, folder: Path, behaviour: str, launcher=(), **server):
        self.attempt = RunFolder(folder / "run").new_attempt()
        self.become(behaviour)
        # So long a drain that whoever waits for it though nothing is open does not end in time.
        settings = {"start_deadline_seconds": 60.0, "max_restarts": 2, "drain_seconds": 600.0, **server}
        self.config = load_config(run_config(folder, folder / "model", server=settings)).config
        self.launcher = launcher
        self.start()

    def start(self) -> None:
        driver = Path(__file__).with_name("supervise_driver.py")
        self.process = subprocess.Popen(
            [*self.launcher, sys.executable, str(driver), str(self.attempt.path), self.config.model_dump_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def become(self, behaviour: str) -> None:
        (self.attempt.path / "behaviour").write_text(behaviour)

    def commit(self, version: int) -> Path:
        """Make a version the current one, as a publish by disk does. Returns its folder."""
        run = self.attempt.run_folder
        folder = run.weights_version_dir(version)
        folder.mkdir(parents=True)
        atomic_write_json(run.current_weights_file, {"weight_version": version, "path": str(folder)})
        return folder

    def registration(self) -> Registration:
        return read_registrations(self.attempt.servers_dir)[0]

    def until(self, condition, seconds=PATIENCE_SECONDS) -> Registration:
        deadline = time.monotonic() + seconds
        while True:
            if (found := read_registrations(self.attempt.servers_dir)) and condition(found[0]):
                return found[0]
            assert time.monotonic() < deadline, (found, self.log())
            time.sleep(0.02)

    def log(self) -> str:
        path = self.attempt.server_log(1)
        return path.read_text() if path.exists() else ""

    def head(self) -> int:
        """The pid of the stand-in that runs now."""
        return int(re.findall(r"head (\d+)", self.log())[-1])

    def segments(self) -> list[Path]:
        return [Path(path) for path in re.findall(r"segment (\S+)", self.log())]

    def children(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"child (\d+)", self.log())]


@pytest.fixture
def supervised(tmp_path):
    made = []

    def make(*args, **kwargs):
        folder = tmp_path / f"run{len(made)}" if made else tmp_path
        folder.mkdir(exist_ok=True)
        made.append(Supervised(folder, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.terminate()
        one.process.communicate(timeout=PATIENCE_SECONDS)


@pytest.fixture
def pool_of():
    """A pool over a supervised server's attempt, closed at the end."""
    made = []

    def make(one, **rollout):
        config = one.config.model_copy(update={"rollout": one.config.rollout.model_copy(update=rollout)})
        made.append(ServerPool(config.rollout, SPEC, one.attempt))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_a_server_becomes_ready_and_its_heart_beats(supervised):
    one = supervised("ok")
    seen = one.until(lambda r: r.state == "ready")
    assert (seen.server_id, seen.generation, seen.pid) == ("server-1", 1, one.process.pid)
    assert seen.address.startswith("http://127.0.0.1:")
    one.until(lambda r: r.heartbeat > seen.heartbeat + 1)
    assert one.attempt.api_key_file.stat().st_mode & 0o777 == 0o600


def test_a_failed_start_is_registered_with_its_last_error_and_how_many_are_left(supervised, monkeypatch):
    """Also: the server's processes see no proxy, though this process's environment names one."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    one = supervised("proxied traceback")
    seen = one.until(lambda r: r.num_failures == 1)
    assert seen.error.endswith(": RuntimeError: the reason \x1b[2J of the end") and "\n" not in seen.error
    assert (seen.failed_starts, seen.most_starts) == (1, 3)
    assert seen.state != "restarting" or seen.retry.startswith("attempt 2 of 3; last failure: SGLang exited with code")
    one.become("proxied")
    ready = one.until(lambda r: r.state == "ready")
    assert ready.retry is None and ready.num_failures in (1, 2)
    assert set(re.findall("own address by (.*)", one.log())) == {"{'no': '*'}"}


@pytest.mark.parametrize(("behaviour", "seconds"), [("busy", (1.6, 30)), ("busy stubborn", (2, 30))])
def test_a_busy_server_drains_before_it_ends(supervised, behaviour, seconds):
    """It registers that it does, cuts short what is left when the time is nearly over, and ends at its deadline."""
    one = supervised(behaviour, drain_seconds=2.0)
    one.until(lambda r: r.state == "ready")
    began = time.monotonic()
    one.process.terminate()
    one.until(lambda r: r.state == "draining")
    assert one.process.wait(timeout=PATIENCE_SECONDS) == 0
    assert seconds[0] <= time.monotonic() - began < seconds[1]
    assert one.registration().state == "stopped"
    assert "asked what is open by a key" in one.log()
    assert one.log().count('posted /abort_request {"rid": "", "abort_all": true}') == 1


@pytest.mark.parametrize("how", ["a second signal", "drain_seconds 0"])
def test_a_drain_can_be_left_out(supervised, how):
    one = supervised("busy stubborn", drain_seconds=0 if how == "drain_seconds 0" else 600.0)
    one.until(lambda r: r.state == "ready")
    one.process.terminate()
    if how == "a second signal":
        one.until(lambda r: r.state == "draining")
        one.process.terminate()
    assert one.process.wait(timeout=PATIENCE_SECONDS) == 0
    wait_gone([*one.children(), one.head()], PATIENCE_SECONDS)
    assert "abort_request" not in one.log()


@pytest.mark.parametrize("behaviour", ["ok", "ignore_term"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_whole_group(supervised, behaviour, number):
    one = supervised(behaviour)
    one.until(lambda r: r.state == "ready")
    (child,) = one.children()  # it ignores SIGTERM
    assert alive([child])
    one.process.send_signal(number)
    assert one.process.wait(timeout=PATIENCE_SECONDS) == 0
    assert not alive([child])
    assert one.registration().state == "stopped"


def test_a_signal_is_heard_during_the_start(supervised):
    one = supervised("never_healthy")
    one.until(lambda r: r.state == "starting")
    until(one.children, PATIENCE_SECONDS)
    one.process.terminate()
    assert one.process.wait(timeout=PATIENCE_SECONDS) == 0
    assert not alive(one.children())


def test_a_dead_server_is_started_again_with_the_current_weights(supervised):
    one = supervised("ok")
    one.until(lambda r: r.state == "ready")
    folder = one.commit(12)
    os.kill(one.head(), signal.SIGKILL)
    again = one.until(lambda r: r.state == "ready" and r.generation == 2)
    assert again.weight_version == 12
    assert "SIGKILL" in again.error
    assert f"serves {folder} version 12" in one.log()
    first, second = one.children()
    assert alive([first, second]) == [second]


def test_a_start_from_model_path_holds_no_version_until_it_is_published_to(supervised, pool_of):
    """Whatever the run committed: with model.weights, or after some steps by groups, model.path holds other weights."""
    one = supervised("ok")
    seen = one.until(lambda r: r.state == "ready")
    assert seen.weight_version is None and "serves" in one.log() and "version None" in one.log()
    pool = pool_of(one, no_server_deadline_seconds=0.3)
    pool.wait_ready(1, 60)
    assert [server.server_id for server in pool.servers_behind()] == ["server-1"]
    with pytest.raises(RolloutError, match="server-1: ready, holds version None of 0"):
        pool.loop.run(pool.acquire())
    pool.commit(7, [("server-1", 1)])  # published to by groups: nothing of version 7 is on disk
    assert pool.servers_behind() == []
    os.kill(one.head(), signal.SIGKILL)
    again = one.until(lambda r: r.state == "ready" and r.generation == 2)
    assert again.weight_version is None
    until(lambda: [server.generation for server in pool.servers_behind()] == [2], PATIENCE_SECONDS)


def test_what_an_earlier_attempt_committed_gives_a_start_no_version(supervised, tmp_path):
    """A run goes back to its checkpoint: version 9 of the attempt before is not the version 9 that this one will
    make.
    """
    run = RunFolder(tmp_path / "run")
    folder, current = run.weights_version_dir(9), run.current_weights_file
    folder.mkdir(parents=True)
    atomic_write_json(current, {"weight_version": 9, "path": str(folder)})
    os.utime(current, (time.time() - 60, time.time() - 60))
    one = supervised("ok")
    assert one.until(lambda r: r.state == "ready").weight_version is None
    assert f"serves {folder} version None" in one.log(), "the newest weights there are, all the same"


def test_a_supervisor_that_is_started_again_counts_on(supervised):
    """In the same attempt: a generation names one start, and what was proved of it."""
    one = supervised("ok")
    one.until(lambda r: r.state == "ready")
    one.process.terminate()
    one.process.wait(timeout=PATIENCE_SECONDS)
    one.start()
    assert one.until(lambda r: r.state == "ready").generation == 2
    assert len(set(re.findall(r"seed (\d+)", one.log()))) == 2, "and its samples are new ones"


def test_a_server_that_keeps_dying_is_given_up_with_its_last_words(supervised):
    one = supervised("exit", max_restarts=2)
    output, _ = one.process.communicate(timeout=PATIENCE_SECONDS)
    assert one.process.returncode == 7
    assert (
        "exited with code 3" in output and "restarted 2 times already" in output and "the reason of the end" in output
    )
    seen = one.registration()
    assert (seen.state, seen.generation) == ("failed", 3)
    assert not alive(one.children()) and len(one.children()) == 3


def test_restarts_are_forgiven_by_time_in_health(supervised):
    """More crashes than server.max_restarts, each after it had served for long enough."""
    one = supervised("die_after_probes", max_restarts=1, restart_forgiven_after_seconds=0.05)
    assert one.until(lambda r: r.generation >= 4 or r.state == "failed").state != "failed"


def test_weights_that_are_removed_while_they_are_loaded_are_no_refusal(supervised):
    """A run that publishes faster than a server starts has removed the version that the start began with."""
    one = supervised("die_later", max_restarts=50)
    one.until(lambda r: r.state == "ready")
    folder = one.commit(3)
    one.become("lose_weights")
    failed = one.until(lambda r: r.generation >= 2 and str(folder) in (r.error or ""))
    assert f"its weights were removed while it loaded them: {folder}" in failed.error
    assert one.until(lambda r: r.state == "ready" and r.generation >= 3).weight_version is None
    assert f"serves {folder} version 3" in one.log() and "/model version None" in one.log().rpartition("serves ")[2]


def test_a_refused_configuration_is_not_tried_again(supervised):
    one = supervised("refuse")
    output, _ = one.process.communicate(timeout=PATIENCE_SECONDS)
    assert one.process.returncode == 2
    assert "server.options.x: no such argument" in output
    assert (one.registration().state, one.registration().generation) == ("failed", 1)


@pytest.mark.parametrize(("behaviour", "cause"), [("never_healthy", "not healthy 3 s"), ("wedged", "silent for")])
def test_a_server_that_does_not_answer_is_started_again(supervised, behaviour, cause):
    one = supervised(behaviour, start_deadline_seconds=3.0)  # the wedged one has to be healthy first
    again = one.until(lambda r: r.generation >= 2)
    assert cause in again.error


def test_when_the_parent_goes_so_does_the_server(supervised):
    # A shell starts the supervisor and is killed: nothing tells the supervisor but its parent's end.
    one = supervised("ok", launcher=("bash", "-c", '"$@" & wait', "bash"))
    seen = one.until(lambda r: r.state == "ready")
    (child,) = one.children()
    one.process.kill()
    one.until(lambda r: r.state == "stopped")
    wait_gone([child, seen.pid], PATIENCE_SECONDS)


def test_a_current_json_of_no_sense_is_named(supervised, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.weights_dir.mkdir(parents=True)
    atomic_write_json(run.current_weights_file, {"version": 3})
    one = supervised("ok")
    output, _ = one.process.communicate(timeout=PATIENCE_SECONDS)
    assert one.process.returncode == 2
    assert "current.json: needs weight_version and path" in output


@pytest.fixture
def foreign_segment():
    """Another server's shared memory."""
    path = Path(f"/dev/shm/sglang_loads_{os.urandom(6).hex()}_0.shm")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink()


def test_a_killed_servers_shared_memory_goes_with_it_and_no_others(supervised, foreign_segment):
    one = supervised("shared_memory")
    one.until(lambda r: r.state == "ready")
    (first,) = one.segments()
    assert first.exists()
    os.kill(one.head(), signal.SIGKILL)
    one.until(lambda r: r.state == "ready" and r.generation == 2)
    _, second = one.segments()
    assert (first.exists(), second.exists()) == (False, True)
    one.process.terminate()
    assert one.process.wait(timeout=PATIENCE_SECONDS) == 0
    assert not second.exists() and foreign_segment.exists()


def test_what_a_supervisor_left_that_was_killed_is_removed_by_the_next(
    supervised, foreign_segment, tmp_path, monkeypatch
):
    """Of those whose supervisor lives nothing is touched, and no folder of another kind."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "gspo-server-by-hand").mkdir()
    killed, living = supervised("shared_memory"), supervised("shared_memory")
    for one in (killed, living):
        one.until(lambda r: r.state == "ready")
    (left,), (used,) = killed.segments(), living.segments()
    killed.process.kill()
    killed.process.wait()
    for pid in (killed.head(), *killed.children()):
        processes.send_signal(pid, signal.SIGKILL)
    wait_gone([killed.head()], PATIENCE_SECONDS)
    assert left.exists() and len(list(tmp_path.glob("gspo-server-*"))) == 3
    killed.become("ok")
    killed.start()
    killed.until(lambda r: r.state == "ready" and r.generation == 2)
    assert (left.exists(), used.exists(), foreign_segment.exists()) == (False, True, True)
    assert len(list(tmp_path.glob("gspo-server-*"))) == 3, "by hand, the living one's, its own"


def test_nothing_is_left_in_the_temporary_folder(supervised, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    one = supervised("ok")
    one.until(lambda r: r.state == "ready")
    assert [p for p in os.listdir(tmp_path) if p.startswith("gspo-server-")]
    one.process.terminate()
    one.process.wait(timeout=PATIENCE_SECONDS)
    assert [p for p in os.listdir(tmp_path) if p.startswith("gspo-server-")] == []
