"""What a reward function finds around it, and what it does not: variables, descriptors, network, files, output."""

import ctypes
import os
import socket

import psutil
import pytest
from scoring_support import score, settings, trajectory

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards import guarded_process

pytestmark = pytest.mark.usefixtures("folder", "no_process_is_left")


def test_of_the_environment_only_what_is_harmless_or_named(monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "GSPO_SAVE_SECONDS", "MASTER_ADDR", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("JUDGE_MODEL", "small")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/a/folder/of/the/users")
    found = (
        "Path('found').write_text(' '.join(os.environ)) and os.environ['OMP_NUM_THREADS'] == '1' and"
        " os.environ.get('JUDGE_MODEL') == "
    )
    trajectories, _ = score(settings("user_rewards:behave", environment=("JUDGE_MODEL",)), found + "'small'")
    assert (trajectories[0].reward, trajectories[0].reward_error) == (1.0, None)
    given = set(open("found").read().split())
    way_out = {"HTTPS_PROXY", "no_proxy", "NO_PROXY"}  # to the network outside, which a function may ask
    assert given <= {*guarded_process.ENVIRONMENT, "JUDGE_MODEL"} | way_out
    assert {"PATH", "HOME", "PYTHONPATH"} | way_out <= given
    trajectories, _ = score(settings("user_rewards:behave"), found + "None")
    assert trajectories[0].reward == 1.0


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("JUDGE_URL", raising=False)
    with pytest.raises(RewardError, match="reward.environment: JUDGE_URL is not set"):
        score(settings("gsm8k", environment=("PATH", "JUDGE_URL")), "1")


def test_no_descriptor_of_ours_is_open_there(tmp_path):
    """Not even one that we made inheritable; of its own a process has three and its two pipes."""
    secret = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(secret, True)
    try:
        listing = (
            "Path('found').write_text(chr(10).join(os.readlink(f'/proc/self/fd/{n}') for n in"
            " os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}'))) and 1"
        )
        [t], _ = score(settings("user_rewards:behave"), listing)
    finally:
        os.close(secret)
    found = open("found").read().split("\n")
    assert t.reward == 1.0 and len(found) == 5
    assert found.count("/dev/null") == 1 and sum(name.startswith("pipe:") for name in found) == 4


def may_have_a_network_of_its_own():
    """Whether the kernel lets this user have one, asked in a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(0x50000000) == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_a_network_nothing_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connect = f"[__import__('socket').create_connection(('127.0.0.1', {port}), timeout=5).close(), 1][1]"
        [reached], _ = score(settings("user_rewards:behave"), connect)
        assert reached.reward == 1.0
        if not may_have_a_network_of_its_own():
            with pytest.raises(RewardError, match="reward.network: false: the kernel refuses"):
                score(settings("user_rewards:behave", network=False), connect)
            return
        trajectories, _ = score(
            settings("user_rewards:behave", network=False, deadline_seconds=20.0), connect, "os.getuid()"
        )
        assert "OSError" in trajectories[0].reward_error and "unreachable" in trajectories[0].reward_error
        assert trajectories[1].reward == os.getuid()


def test_without_a_network_children_still_end_with_the_pool(folder):
    if not may_have_a_network_of_its_own():
        return
    start = "Path('pid').write_text(str(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)) and 1"
    [t], _ = score(settings("user_rewards:behave", network=False), start)
    assert t.reward == 1.0 and not psutil.pid_exists(int((folder / "pid").read_text()))


def test_a_file_has_a_bound(folder):
    reward = settings("user_rewards:behave", file_bytes=1000)
    trajectories, _ = score(reward, "Path('a').write_text('x' * 1000)", "Path('b').write_text('x' * 1001)", "1")
    assert trajectories[0].reward == 1000.0 and trajectories[2].reward == 1.0
    assert "OSError" in trajectories[1].reward_error and (folder / "b").stat().st_size <= 1000


def test_what_is_printed_has_a_bound(monkeypatch, capfd):
    monkeypatch.setattr(guarded_process, "MOST_OUTPUT_BYTES", 1000)
    trajectories, _ = score(
        settings("user_rewards:behave"), trajectory("print('x' * 100_000) or 1"), "print('y' * 100_000) or 1"
    )
    assert [t.reward for t in trajectories] == [1.0, 1.0]
    _, err = capfd.readouterr()
    assert err.count("x") + err.count("y") < 1200 and "printed more than 1000 bytes; what follows is not shown" in err


def test_a_log_that_cannot_be_written_to_holds_no_function_up(monkeypatch):
    write = os.write

    def full(descriptor, data):
        if descriptor == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(guarded_process.os, "write", full)
    trajectories, _ = score(settings("user_rewards:behave"), "print('x' * 1_000_000) or 1", "1")
    assert [t.reward for t in trajectories] == [1.0, 1.0]
