"""The doctor's findings, on a Python without packages too."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from gspo_mega.base.versions import Finding, render
from gspo_mega.launcher import doctor
from gspo_mega.launcher.doctor import AnswerDeadline

REPOSITORY = Path(__file__).parents[3]


def test_it_starts_on_the_standard_library_alone(tmp_path):
    python = shutil.which("python3.11") or sys.executable
    # -S: no site-packages, so nothing that is installed can be imported.
    command = [python, "-S", "-m", "gspo_mega", "doctor", "--folder", str(tmp_path), "--gpus", "0"]
    ended = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert ended.returncode in (0, 1) and ended.stderr == "", ended.stderr
    assert " wrong packages  a trainer needs torch, megatron-core" in ended.stdout
    assert " ok    python " in ended.stdout


def test_an_import_that_fails_or_hangs_is_a_finding():
    deadline = AnswerDeadline()
    assert doctor._imports("x", "raise OSError('libcudart.so.12: cannot open')", deadline) == Finding(
        "wrong", "x", "OSError: libcudart.so.12: cannot open"
    )
    assert doctor._imports("x", "import os; os.abort()", deadline).level == "wrong"
    assert doctor._imports("x", "print('1.2 sees', 8)", deadline) == Finding("ok", "x", "1.2 sees 8")
    assert (
        "did not end within 1 s (of --patience 0)"
        in doctor._imports("x", "import time; time.sleep(60)", AnswerDeadline(0.3)).text
    )


def test_a_torchvision_of_another_pytorch_is_a_finding(tmp_path, monkeypatch):
    """transformers imports it wherever it is installed, for Llama, too."""
    code = doctor._TORCHVISION
    (tmp_path / "torchvision.py").write_text("__version__ = '0.28.0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._imports("torchvision", code, AnswerDeadline()) == Finding("ok", "torchvision", "0.28.0")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    found = doctor._imports("torchvision", code, AnswerDeadline())
    assert found.level == "wrong" and "torchvision::nms does not exist; it is built for another PyTorch" in found.text
    monkeypatch.syspath_prepend(tmp_path)
    findings = doctor.check_machine((), tmp_path, 0, False, None, AnswerDeadline())
    assert found in list(findings)


def test_an_import_that_takes_minutes_is_told_and_is_nothing_wrong(monkeypatch):
    """Many nodes that read torch from one shared folder for the first time need minutes; ranks wait ten for each other
    then.
    """
    assert AnswerDeadline().left > 590
    monkeypatch.setattr(doctor, "SLOW_SECONDS", 0.2)
    found = doctor._imports("torch", "import time; time.sleep(0.3); print('2.0')", AnswerDeadline())
    assert found.level == "note"
    assert re.match(r"2\.0; its import took \d+ s, as every start of a rank or server will", found.text)


def test_all_checks_share_one_patience():
    """What a slow import took is not there for the meeting; and a check whose answer is there at once is made all the
    same.
    """
    deadline = AnswerDeadline(0.5)
    doctor._imports("x", "import time; time.sleep(0.6)", deadline)
    assert deadline.left == 1.0
    assert doctor._imports("x", "print(1)", deadline).level == "ok"


def test_gpus_that_are_missing(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor n in 0 1; do echo "GPU $n: NVIDIA H100 (UUID: GPU-$n)"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor._gpus(2, AnswerDeadline()) == Finding("ok", "GPUs", "2: NVIDIA H100")
    assert doctor._gpus(8, AnswerDeadline()).text == "8 expected, 2 found: GPU 0: NVIDIA H100; GPU 1: NVIDIA H100"


def test_folders_and_addresses(tmp_path):
    (tmp_path / "file").touch()
    assert doctor._disk("folder", tmp_path / "new").level in ("ok", "note")
    assert doctor._disk("folder", tmp_path / "file" / "below").level == "wrong"
    assert doctor._address("127.0.0.1").level == "ok"
    assert doctor._address("192.0.2.1").text.startswith("192.0.2.1 cannot be bound: ")


def test_what_cannot_be_bound_or_locked_is_said():
    assert (doctor._network("127.0.0.1").level, doctor._network("::1").level) == ("ok", "ok")
    for private in ("10.1.2.3", "fd00::2", "node7"):
        found = doctor._network(private)
        assert found.level == "ok" and f"anyone who reaches {private} can disturb or steer the ranks" in found.text
    for public in ("8.8.8.8", "2606:4700::1"):
        assert doctor._network(public).level == "note" and "is a public address" in doctor._network(public).text
    said = [finding.what for finding in doctor.check_machine((), Path("."), 0, False, "127.0.0.1", AnswerDeadline())]
    assert said[-2:] == ["address", "network"]


def test_a_limit_of_open_files_below_what_the_run_needs_is_wrong(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert doctor._descriptors(1024).level == "ok"
    finding = doctor._descriptors(64 * 256)
    assert finding.level == "wrong" and finding.text.endswith(
        "one process may open 4096 files (ulimit -Hn); 16384 concurrent requests need 16896"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    assert doctor._descriptors(10**6) == Finding("ok", "files", "one process may open any number of files")


def test_a_process_takes_the_limit_it_may_have():
    """In a process of its own, whose soft limit is the usual 1024 or less."""
    code = (
        "import resource; from gspo_mega.base import processes;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); processes.raise_open_file_limit();"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_a_machine_that_does_not_see_the_folder_is_named(tmp_path):
    place = doctor.MachinePlace(0, 3, ("127.0.0.1", 1))
    (tmp_path / "meet").mkdir()
    (tmp_path / "meet" / "machine-2").touch()
    (finding,) = doctor.check_together(place, tmp_path / "meet", 0, AnswerDeadline(0.3))
    assert finding.level == "wrong" and finding.text.endswith("does not show the files of machine 1 of 3")


def test_an_all_reduce_between_two(tmp_path):
    from gspo_mega.launcher.prepare import free_port

    port, found = free_port(), {}

    def one(index):
        found[index] = doctor.check_together(
            doctor.MachinePlace(index, 2, ("127.0.0.1", port)), tmp_path / "meet", 0, AnswerDeadline()
        )

    threads = [threading.Thread(target=one, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[f.level for f in found[index]] for index in (0, 1)] == [["ok", "ok"]] * 2, found
    assert found[0][1].text.startswith("gloo all-reduce of 4 MiB over 2 machines in ")


def test_what_is_wrong_comes_first():
    lines = render(
        [Finding("ok", "a", "1"), Finding("wrong", "b", "2"), Finding("note", "c", "3")], "node7"
    ).splitlines()
    assert lines == ["node7: wrong b         2", "node7: note  c         3", "node7: ok    a         1"]
