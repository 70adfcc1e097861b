import os
import stat
import threading

import pytest

from gspo_mega.base.run_folder import Attempt, RunFolder, atomic_write_json, atomic_write_text, read_json
from gspo_mega.rollout.registration import read_secret


def test_paths_are_those_of_the_contract(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "demo")
    relative = lambda path: str(path.relative_to(folder.path))  # noqa: E731
    attempt = folder.attempt(1)
    assert relative(attempt.path) == "attempts/0001"
    assert relative(attempt.server_file("server-0")) == "attempts/0001/servers/server-0.json"
    assert relative(attempt.error_file(3)) == "attempts/0001/errors/rank_3.json"
    assert relative(attempt.rank_log(2)) == "attempts/0001/logs/rank_2.log"
    assert relative(attempt.server_log(0)) == "attempts/0001/logs/server_0.log"
    assert relative(folder.weights_version_dir(12)) == "weights/v00000012"
    assert relative(folder.checkpoint_dir(100)) == "checkpoints/step_00000100"
    assert attempt.run_folder.path == folder.path
    assert not folder.path.exists(), "naming paths creates nothing"


def test_new_attempts_count_up_and_latest_follows(tmp_path):
    folder = RunFolder(tmp_path / "demo")
    assert folder.latest_attempt() is None
    first = folder.new_attempt()
    second = folder.new_attempt()
    assert (first.number, second.number) == (1, 2)
    assert [a.number for a in folder.attempts()] == [1, 2]
    assert os.readlink(folder.latest_attempt_link) == "0002"
    assert folder.latest_attempt().path == second.path
    assert read_secret(first.api_key_file) != read_secret(second.api_key_file)


def test_attempts_beyond_four_digits_stay_in_order(tmp_path):
    folder = RunFolder(tmp_path)
    for number in (9999, 10000):
        folder.attempt(number).create()
    (folder.attempts_dir / "notes").mkdir()
    assert [a.number for a in folder.attempts()] == [9999, 10000]
    assert folder.new_attempt().number == 10001


def test_api_key_is_for_the_owner_alone_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        attempt = RunFolder(tmp_path).new_attempt()
    finally:
        os.umask(old)
    assert stat.S_IMODE(attempt.api_key_file.stat().st_mode) == 0o600
    assert len(read_secret(attempt.api_key_file)) == 64


def test_an_attempt_is_not_created_twice(tmp_path):
    attempt = Attempt(tmp_path / "0001").create()
    with pytest.raises(FileExistsError):
        attempt.create()


def test_readers_never_see_a_part_of_a_file(tmp_path):
    path = tmp_path / "state.json"
    values = [{"value": letter * 200_000} for letter in "ab"]
    atomic_write_json(path, values[0])
    done = threading.Event()

    def write():
        for i in range(60):
            atomic_write_json(path, values[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set():
        assert read_json(path) in values
        reads += 1
    writer.join()
    assert reads > 0
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "state.json"
    atomic_write_json(path, {"step": 1})
    with pytest.raises(ValueError):
        atomic_write_json(path, {"loss": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert read_json(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_reading_nothing_and_reading_damage(tmp_path):
    assert read_json(tmp_path / "absent.json") is None
    (tmp_path / "bad.json").write_text('{"step": ')
    with pytest.raises(ValueError, match="bad.json"):
        read_json(tmp_path / "bad.json")
