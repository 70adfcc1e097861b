"""Whole runs in tests: starting `gspo-mega`, watching and disturbing them, and the reward functions they use.

The scoring processes import the functions at the end, so this module imports the standard library alone at its top.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# A run of a few steps takes half a minute on a free machine. Waiting longer costs nothing where all is well.
PATIENCE_SECONDS = 1200.0
# What quickstart.yaml asks for, made small: 16 trajectories a step, two optimizer steps.
SMALL = (
    "batch.prompts_per_step=4",
    "batch.group_size=4",
    "batch.num_mini_batches=2",
    "rollout.max_new_tokens=16",
    "server.max_total_tokens=4096",
    "server.start_deadline_seconds=600",
    "rollout.no_server_deadline_seconds=900",
    "eval.num_prompts=8",
    "publish.keep_last=10",
    "reward.try_first=false",  # the tests' rewards keep count of their calls, and some fail on purpose
)


def environment(**more: str) -> dict[str, str]:
    """A user's, whose reward functions lie in this folder. The project itself is found as it is installed."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def make_quickstart(folder: Path, *words: str) -> Path:
    """The quickstart's tiny Qwen3-MoE and its data, few of them, in `folder`. `words`: further ones of the tool."""
    tool = [
        sys.executable,
        str(REPOSITORY / "tools/make_quickstart.py"),
        str(folder),
        "--num-train",
        "64",
        "--num-heldout",
        "16",
        *words,
    ]
    subprocess.run(tool, check=True, stdout=subprocess.DEVNULL, env=environment())
    return folder


def small_overrides(quickstart: Path, run_dir: Path, name: str) -> list[str]:
    """Overrides that make configs/quickstart.yaml a small run of the untrained model, in `run_dir`/`name`."""
    data = quickstart / "data"
    places = [f"run.dir={run_dir}", f"run.name={name}", f"model.path={quickstart / 'model'}"]
    return [*places, f"data.path={data / 'train.jsonl'}", f"eval.path={data / 'heldout.jsonl'}", *SMALL]


PASSES_MARKER = "reward.environment=[GSPO_TEST_MARKER]"


def forking(what: str = "all") -> list[str]:
    """What Python runs instead of `-m gspo_mega`. `what`: "all", or "trial" for the trial of inputs alone."""
    from forks import forked_ranks, forked_servers

    commands = {"trial": forked_ranks().command("forked_trial")}
    if what == "all":
        commands["rank"] = forked_ranks().command("gspo_mega.train.worker")
        commands["server"] = forked_servers().command("forked_serve")
    return [str(Path(__file__).with_name("forked_command.py")), json.dumps(commands)]


class Command:
    """One `gspo-mega` command as a process. All that it starts inherits `marker`, by which it is found again; scoring
    processes, which inherit nothing unasked, because it is asked for.
    """

    def __init__(self, folder: Path, *arguments: str, forked: bool = False, tried_in_fork: bool = False) -> None:
        """`tried_in_fork`: the trial of inputs is not started, but forked from a process that has imported what it
        needs. `forked`: ranks and servers, too, which saves most of a small run's work; they are not below the command,
        and have no marker.
        """
        if arguments[0] in ("train", "sft", "eval"):
            arguments = (*arguments[:2], PASSES_MARKER, *arguments[2:])
        program = forking() if forked else forking("trial") if tried_in_fork else ["-m", "gspo_mega"]
        self.marker = f"gspo-test-{uuid.uuid4()}"
        self._out, self._err = folder / f"{self.marker}.out", folder / f"{self.marker}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=out,
                stderr=err,
                cwd=folder,
                env=environment(GSPO_TEST_MARKER=self.marker),
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, what: str, happened: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        """Until `happened()`. The command ending before that, or `seconds`, fails the test."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode} before {what}\n{self.out}\n{self.err}"
            )
            assert time.monotonic() < deadline, f"{what}: not after {seconds:g} s\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def wait_for_line(self, beginning: str) -> None:
        self.wait_for(
            f"a line {beginning!r}", lambda: any(line.startswith(beginning) for line in self.out.splitlines())
        )

    def finish(self, seconds: float = PATIENCE_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds:g} s\n{self.out}\n{self.err}") from None

    def seconds_to_finish(self) -> float:
        started = time.monotonic()
        self.finish()
        return time.monotonic() - started

    def left_running(self, path: Path | None = None) -> list[int]:
        """Pids of what this command started and of what has `path` in its command line or environment."""
        signs = [self.marker.encode(), *([bytes(path)] if path is not None else [])]
        left = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if any(sign in words for sign in signs):
                left.append(int(entry.name))
        return left

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        for pid in self.left_running():
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if f"RANK={number}".encode() in words and b"gspo_mega.train.worker" in command:
                return pid
        raise AssertionError(f"rank {number} does not run\n{self.out}\n{self.err}")

    def waits_for_another_rank(self, number: int, log: Path) -> bool:
        """Whether the main thread of a rank waits for another one, in torch.distributed or for a transfer of the
        hand-out: the rank writes its stacks to `log` when asked.
        """
        before = log.stat().st_size
        os.kill(self.rank(number), signal.SIGUSR2)
        time.sleep(0.2)
        main_thread = log.read_bytes()[before:].rpartition(b"most recent call first")[2]
        return b"torch/distributed" in main_thread or b"train/scatter.py" in main_thread

    def end(self) -> list[int]:
        """Kill whatever still runs, at the end of a test; returns what was left although the command had ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            left: list[int] = []
        else:
            left = self.left_running()
        while running := self.left_running():
            for pid in running:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        return left


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, rest = [], [pid]
    while rest:
        below = children.get(rest.pop(0), [])
        found += below
        rest += below
    return found


def kill_server(serve_pid: int) -> None:
    """kill -9 of an SGLang server with all its processes; `gspo-mega serve`, their parent, lives on."""
    pids = descendants(serve_pid)
    commands = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    assert any(b"scheduler" in command for command in commands), f"no scheduler among {commands}"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with its parent
            os.kill(pid, signal.SIGKILL)


# --- reward functions ----------------------------------------------------------------------------------------


def score(*, prompt: str, response: str, answer: object, metadata: dict, log: str) -> dict[str, float]:
    """As `distinct`, and a coin thrown by the response: whether it is correct. Adds a line to `log`: what was scored."""
    _note(log, prompt, response, "scored")
    reward = distinct(prompt=prompt, response=response, answer=answer, metadata=metadata)
    correct = bool(zlib.crc32(response.encode()) & 1)
    return {"reward": reward, "correct": correct, "num_characters": float(len(response))}


def gated(*, prompt: str, response: str, answer: object, metadata: dict) -> dict[str, float]:
    """Stands still until the file that GSPO_TEST_GATE names is there."""
    while not os.path.exists(os.environ["GSPO_TEST_GATE"]):
        time.sleep(0.02)
    return {"reward": 0.0, "correct": False}


def distinct(*, prompt: str, response: str, answer: object, metadata: dict) -> float:
    """Another number for nearly every response: no group is constant, so every step changes the weights."""
    return zlib.crc32(response.encode()) % 1000 / 1000


def held(*, prompt: str, response: str, answer: object, metadata: dict, hold: str) -> float:
    """As `distinct`. While there is a file `hold`, all scorings but the first wait."""
    if os.path.exists(hold):
        try:
            os.close(os.open(f"{hold}.first", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            while os.path.exists(hold):
                time.sleep(0.02)
    return distinct(prompt=prompt, response=response, answer=answer, metadata=metadata)


def unreliable(*, prompt: str, response: str, answer: object, metadata: dict, log: str) -> float:
    """Every other prompt is a constant group of ones. Of the other prompts' samples, in the order of scoring, the first
    of eight raises, the second is NaN, and for the rest the response throws a coin.
    """
    if is_constant_prompt(prompt):
        _note(log, prompt, response, "scored")
        return 1.0
    kind = _next_number(log) % 8
    _note(log, prompt, response, {0: "raised", 1: "nan"}.get(kind, "scored"))
    if kind == 0:
        raise ValueError("a reward function of a test")
    return float("nan") if kind == 1 else float(zlib.crc32(response.encode()) & 1)


def is_constant_prompt(prompt: str) -> bool:
    return bool(zlib.crc32(prompt.encode()) & 1)


def freeze_at(log: Path, prompts: set[str], pids: list[int]) -> Callable[[], bool]:
    """Have the processes stopped (SIGSTOP) at once when the next response to one of `prompts` is scored and noted in `log`.
    Returns what says whether that has happened.
    """
    order = Path(f"{log}.freeze")
    draft = order.with_suffix(".draft")
    draft.write_text(json.dumps({"prompts": sorted(prompts), "pids": pids}))
    draft.rename(order)
    return lambda: not order.exists()


def _freeze(log: str, prompt: str) -> None:
    order = Path(f"{log}.freeze")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # another process that scores was faster
        wanted = json.loads(order.read_text())
        if prompt in wanted["prompts"]:
            for pid in wanted["pids"]:
                os.kill(pid, signal.SIGSTOP)
            order.unlink()


def _next_number(log: str) -> int:
    """0, 1, 2, ... over all processes that score."""
    with open(f"{log}.number", "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = file.seek(0, os.SEEK_END)
        file.write(b".")
    return number


def _note(log: str, prompt: str, response: str, outcome: str) -> None:
    line = json.dumps({"prompt": prompt, "response": response, "outcome": outcome}) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())  # one write: lines of several processes do not mix
    os.close(descriptor)
    _freeze(log, prompt)


class ScoreLog:
    """What `score` and `unreliable` noted, read on from where it was last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_read = 0

    def all(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def __len__(self) -> int:
        return len(self.all())

    def new(self) -> list[dict[str, str]]:
        """Notes since the last call."""
        notes = self.all()[self._num_read :]
        self._num_read += len(notes)
        return notes
