"""A failed start of a server is shown when it happens, once each, with its cause, its log and how many are left."""

import re
import time
from dataclasses import replace

import pytest

from gspo_mega.base.run_folder import Attempt
from gspo_mega.launcher import watchdog
from gspo_mega.launcher.watchdog import ServerFailures
from gspo_mega.rollout.registration import Registration
from gspo_mega.rollout.server.process import failure_line


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_READING_SECONDS", 0.0)
    made = Attempt(tmp_path / "0001")
    made.servers_dir.mkdir(parents=True)
    return made


def test_each_failed_start_is_shown_once(attempt):
    said = []
    failures = ServerFailures([(attempt, ""), (Attempt(attempt.path / "none"), " of reward model style")], said.append)
    one = Registration("server-0", "", 7, "starting", 1, None, time.time(), most_starts=6)
    one.write(attempt.servers_dir)
    failures.show_new()
    assert said == []
    causes = [f"SGLang exited with code 1 (see log): ProxyError: {number}" for number in (1, 2, 3)]
    for number in (1, 3):  # the second and the third follow each other faster than anybody looks
        one = replace(one, num_failures=number, failed_starts=number, recent_failures=causes[:number])
        for state in ("restarting", "starting"):
            replace(one, state=state).write(attempt.servers_dir)
            failures.show_new()
    assert said == [
        f"warning  server-0 failed (attempt {number} of 6): {cause}; it is started again (log: {attempt.server_log(0)})"
        for number, cause in enumerate(causes, 1)
    ]
    replace(one, state="failed").write(attempt.servers_dir)
    (attempt.servers_dir / "server-1.json").write_text("{}")
    failures.show_new()
    assert len(said) == 3  # a server that is given up is reported as that
    again = replace(one, pid=8, num_failures=1, failed_starts=1, recent_failures=[f"see {attempt.server_log(0)}"])
    again.write(attempt.servers_dir)
    (attempt.servers_dir / "server-1.json").unlink()
    failures.show_new()
    assert said[3] == f"warning  server-0 failed (attempt 1 of 6): see {attempt.server_log(0)}; it is started again"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", None),
        ("\n \n", None),
        ("loading\nKilled\n", "Killed"),
        ("disabled: init failed (ModuleNotFoundError: No module named 'harmony')\nKilled\n", "Killed"),
        ("init failed (aiohttp.ClientError: no answer) (x)\nKilled\n", "Killed"),
        ("Traceback (most recent call last):\n  x\nrequests.exceptions.ProxyError: no way\nbye\n", None),
        ("[2026-01-01 TP0] Scheduler hit an exception: ValueError: bad shape\n", "ValueError: bad shape"),
        ("OSError: first\nRuntimeError: second\n[sigquit received]\n", "RuntimeError: second"),
    ],
)
def test_the_last_error_of_a_log_is_its_word(tmp_path, log, expected):
    file = tmp_path / "log"
    file.write_text("KeyError: of an earlier start\n" + log)
    found = failure_line(file, len("KeyError: of an earlier start\n"))
    assert found == (expected or ("requests.exceptions.ProxyError: no way" if "Proxy" in log else None))
    assert failure_line(tmp_path / "none") is None


def test_too_little_memory_is_said_with_the_key_that_changes_it(tmp_path):
    file = tmp_path / "log"
    file.write_text(
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1. Raise"
        " --mem-fraction-static above 0.132 (minimum viable = 1 - available/pre = 0.1318). If using speculative"
        " decoding, draft weights are now counted.\n"
    )
    found = failure_line(file)
    assert found.startswith(
        "server.memory_fraction 0.1 leaves no memory for the KV cache once the weights are loaded: above 0.132 "
    )
    assert "the machine's free memory" in found and re.search(r"; \d+\.\d GiB are free now$", found)
    assert "mem-fraction-static" not in found
