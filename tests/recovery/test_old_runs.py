"""Runs of an older commit, continued and replayed by today's commands: the same numbers to the last bit.

`make_old_run.py` made them, and says what they are. The configurations avoid what has deliberately changed since (the
learning rate in a warm-up, the gradient norm of gpt-oss, end tokens), and nothing is filtered or dropped, so that
metrics of what was sampled equal those of what was trained on.

Sums differ in their last bits between processors and versions of PyTorch. Where the machine is not the one that made
the runs, the numbers are compared within a tolerance, and the weights are not. What involves no arithmetic is compared
exactly everywhere: what the journal holds, and the conversion of a checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from make_old_run import CHECKPOINT, READ_JOURNAL, RUNS, machine, tensor_digests
from recovery_support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests/integration"))

from run_support import forking

from gspo_mega.cli.main import main

ARCHIVE = Path(__file__).parent / "data/old_runs_201f4514.tar.xz"
NEEDS_SGLANG = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
PATIENCE_SECONDS = 1200.0
# Times, and what depends on how long something took.
NOT_COMPARED = ("time", "time/", "speed/", "publish/pause_seconds", "publish/num_open_requests")
# A run without servers has none of these.
OF_SERVERS = ("publish/", "rollout/num_servers_given_up")
# Its definition has changed since: it was the mean of |log s| in units of clip_low + clip_high for all algorithms. Now
# GSPO's unit is the range in log s, log(1 + clip_high) - log(1 - clip_low), and PPO's is of each token's ratio.
CHANGED = "budget_share"
# Compared on another machine: means over many tokens, which rounding moves little.
SMOOTH = (
    "reward/mean",
    "response/length_mean",
    "policy/objective",
    "policy/entropy",
    "policy/log_ratio/sd",
    "optimizer/grad_norm",
    "optimizer/lr",
    "critic/value_loss",
    "critic/grad_norm",
)
# What is done with a run of then: the arguments of today's `gspo-mega train`.
COMMANDS = {
    "gspo continued": ["gspo.yaml"],
    "ahead continued": ["ahead.yaml"],
    "ppo continued": ["ppo.yaml"],
    "gspo replayed": ["gspo.yaml", "run.name=replay", "--from-rollouts", "runs/gspo"],
    "ahead replayed": ["ahead.yaml", "run.name=replay", "--from-rollouts", "runs/ahead"],
}


@pytest.fixture(scope="module")
def then(tmp_path_factory) -> Path:
    """The working folder as the older commit left it. Nothing writes here."""
    folder = tmp_path_factory.mktemp("then")
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11.4 and later ask for a filter, and earlier ones have none.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


@pytest.fixture(scope="module")
def expected(then) -> dict:
    return json.loads((then / "expected.json").read_text())


@dataclass
class Ended:
    folder: Path  # of the run
    out: str
    code: int


@pytest.fixture(scope="module")
def ended(then, tmp_path_factory):
    """Today's `gspo-mega train` by name, each in a copy of the working folder; its ranks and servers are forked. Two run
    at a time, because each waits for its server and its ranks in turn.
    """
    root, processes = tmp_path_factory.mktemp("now"), []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    has_server = importlib.util.find_spec("sglang") is not None
    start = forking() if has_server else ["-m", "gspo_mega"]

    def train(name: str) -> Ended:
        place = root / name.replace(" ", "-")
        shutil.copytree(then, place, symlinks=True)
        command = [sys.executable, *start, "train", *COMMANDS[name]]
        with (place / "out").open("w") as out:
            process = subprocess.Popen(command, cwd=place, env=environment, stdout=out, stderr=subprocess.STDOUT)
            processes.append(process)
            code = process.wait(PATIENCE_SECONDS)
        run = "replay" if "replayed" in name else name.split()[0]
        return Ended(place / "runs" / run, (place / "out").read_text(), code)

    pool = ThreadPoolExecutor(max_workers=2)
    without_server = ("ppo continued", "gspo replayed", "ahead replayed")
    futures: dict[str, Future[Ended]] = {
        name: pool.submit(train, name) for name in COMMANDS if has_server or name in without_server
    }
    yield lambda name: futures[name].result()
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    pool.shutdown()


def check_numbers(ended: Ended, expected: dict, run: str, first: int, without: tuple[str, ...] = ()) -> None:
    """The steps from `first` on, and the weights at the end, are those that the older commit reached."""
    wanted = expected["runs"][run]
    lines = [json.loads(line) for line in (ended.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    is_same_machine = {**machine(), "commit": expected["made_by"]["commit"]} == expected["made_by"]
    for then, now in list(zip(wanted["metrics"], lines, strict=True))[first - 1 :]:
        assert now["time"] > then["time"], "a line of today's"
        names = {name for name in then if not name.startswith((*NOT_COMPARED, *without))}
        assert names <= now.keys(), f"metrics that are gone: {sorted(names - now.keys())}"
        if is_same_machine:
            same = {name for name in names if not name.endswith(CHANGED)}
            different = {name: (then[name], now[name]) for name in same if then[name] != now[name]}
        else:
            same = {name for name in names if name in SMOOTH}
            close = {name: math.isclose(then[name], now[name], rel_tol=1e-3, abs_tol=1e-6) for name in same}
            different = {name: (then[name], now[name]) for name in same if not close[name]}
        assert len(same) >= 5 and not different, f"step {now['step']} of {ended.folder.name}"
    exported = tensor_digests(ended.folder / "hf")
    assert exported.keys() == wanted["exported"].keys()
    assert exported == wanted["exported"] or not is_same_machine


def check_continued(ended: Ended, expected: dict, run: str) -> None:
    assert ended.code == 0, ended.out
    for step in (3, 4):
        assert f"step {step}: its 16 trajectories are in the journal and are not sampled again" in ended.out, ended.out
    assert not list((ended.folder / "journal").glob("*.old-*")), "today's fingerprints are those of then"
    kept = (ended.folder / "metrics.jsonl").read_text().splitlines()[:2]
    assert [json.loads(line) for line in kept] == expected["runs"][run]["metrics"][:2]
    assert "resumed from step_00000002: step 2, weight version 2" in "".join(
        path.read_text() for path in (ended.folder / "attempts/0002").rglob("*.log")
    )
    check_numbers(ended, expected, run, first=3)


@NEEDS_SGLANG
@pytest.mark.parametrize("run", ["gspo", "ahead"])
def test_a_run_goes_on_from_its_old_checkpoint_and_journal_with_a_server(ended, expected, run):
    check_continued(ended(f"{run} continued"), expected, run)


def test_a_run_with_a_critic_goes_on_from_its_old_checkpoint_on_recorded_rollouts(ended, expected):
    check_continued(ended("ppo continued"), expected, "ppo")


@pytest.mark.parametrize("run", ["gspo", "ahead"])
def test_an_old_journal_replays_to_the_same_numbers(ended, expected, run):
    replayed = ended(f"{run} replayed")
    assert replayed.code == 0, replayed.out
    check_numbers(replayed, expected, run, first=1, without=OF_SERVERS)


@pytest.mark.parametrize("run", RUNS)
def test_today_reads_in_an_old_journal_what_was_read_then(then, expected, run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", str(then / "runs" / run / "journal")])
    program = READ_JOURNAL.replace("gspo_mega.journal.journal", "gspo_mega.data.journal.journal")
    exec(compile(program, "READ_JOURNAL", "exec"), {})
    assert json.loads(capsys.readouterr().out) == expected["runs"][run]["journal"]


@pytest.mark.parametrize("run", RUNS)
def test_commands_read_an_old_run_folder(then, expected, run, tmp_path, capsys, monkeypatch):
    shutil.copytree(then, tmp_path / "now", symlinks=True)
    monkeypatch.chdir(tmp_path / "now")

    def said(*arguments: str) -> str:
        assert main(list(arguments)) == 0, capsys.readouterr()
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    steps = said("inspect", f"runs/{run}").splitlines()
    assert len(steps) == 4
    for line, wanted in zip(steps, expected["runs"][run]["metrics"], strict=True):
        assert line.split()[-4:] == ["trajectories", "16", "reward", f"{wanted['reward/mean']:.3f}"], line
    assert said("inspect", f"runs/{run}", "--step", "3").count("\n--- step") == 16
    text = said("status", f"runs/{run}")
    assert "state      finished" in text and f"checkpoint {CHECKPOINT}" in text, text
    assert json.loads(said("status", f"runs/{run}", "--json"))["state"] == "finished"
    said("report", f"runs/{run}")
    assert "</html>" in Path(f"runs/{run}/report.html").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_an_old_checkpoint_is_converted_to_the_tensors_of_then(then, expected, run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    import megatron_to_hf

    checkpoint, model = (
        then / "runs" / run / "checkpoints" / CHECKPOINT,
        then / "files" / ("moe" if run == "gspo" else "dense"),
    )
    assert megatron_to_hf.main([str(checkpoint), str(tmp_path / "hf"), "--described-by", str(model)]) == 0
    assert tensor_digests(tmp_path / "hf") == expected["runs"][run]["converted"]
