"""Small run folders by hand, for what reads a run's folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.config import load_config, render_config
from gspo_mega.data.held_out_responses import write_responses_of
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import write_token_gaps

# (step from 0, group): what a test changes in it.
Change = Callable[[int, Group], None] | None
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


def make_run(path: Path, num_groups: int = 1, *, settings: Sequence[str] = (), change: Change = None) -> Path:
    """Twelve steps of metrics, two steps of trajectories, an attempt that failed and one that finished. `settings`:
    overrides of the quickstart's configuration. `change`: done to each group before it is recorded.
    """
    folder = RunFolder(path)
    path.mkdir(parents=True)
    atomic_write_text(folder.config_file, render_config(load_config("configs/quickstart.yaml", settings).config))
    for step in range(1, 13):
        add_metrics(path, step)
    _attempts(folder)
    for step in range(2):
        add_trajectories(path, step, num_groups, change=change)
    return path


def add_metrics(path: Path, step: int, **more: float) -> None:
    line = {"step": step, "time": 1.7e9 + step, "reward/mean": 0.27 + 0.03 * step, "policy/clip_fraction": 0.1}
    line |= {"time/step_seconds": 3.0, "time/rollout_seconds": 2.0, "time/train_seconds": 1.0}
    with RunFolder(path).metrics_file.open("a") as file:
        file.write(json.dumps(line | more) + "\n")


def batch_of(num_groups: int, step: int = 0) -> RolloutBatch:
    return RolloutBatch(step, [_group(step, number) for number in range(num_groups)])


def add_gaps(path: Path, step: int, num_groups: int = 1) -> None:
    """What the trainer measured of the step's tokens: -0.2 nats at the first one of every response, 3e-6 at the other."""
    batch = batch_of(num_groups, step)
    rows = np.arange(len(batch.trajectories), dtype=np.int32)
    parts = [
        {"rows": rows, "places": np.full_like(rows, 2 + place), "gaps": np.full(len(rows), gap, np.float16)}
        for place, gap in enumerate((-0.2, 3e-6))
    ]
    write_token_gaps(RunFolder(path).journal_dir, batch, parts)


def add_trajectories(
    path: Path, step: int, num_groups: int = 1, *, consumed: bool = True, change: Change = None
) -> None:
    """The journal's record of a step; without its batch where the trainer has not `consumed` it."""
    groups = [_group(step, number) for number in range(num_groups)]
    for group in groups if change is not None else ():
        change(step, group)
    journal = Journal(RunFolder(path).journal_dir)
    with journal.begin(step, step, 2, {group.group_id: group for group in groups}) as writer:
        if consumed:
            writer.finish(RolloutBatch(step, groups, {}, {}), {})


def add_held_out(path: Path, step: int, marks: Sequence[bool | None], name: str = "gsm8k") -> None:
    """The responses of an evaluation, one of each prompt: whether it is correct."""
    rows = [
        {"set": name, "row": number, "prompt": f"{number} + 1 = <b>", "answer": str(number + 1), "correct": mark}
        | {"response": f"{HOSTILE} {step}", "reward": float(bool(mark)), "num_tokens": 5, "is_truncated": False}
        | {"failure": None, "num_scored": 1, "num_correct": int(bool(mark))}
        for number, mark in enumerate(marks, start=1)
    ]
    write_responses_of(RunFolder(path), step, rows)


def _group(step: int, number: int) -> Group:
    prompt = Prompt(f"train:{7 + number}", "train", (1, 2), "1 + 1 = <b>", answer="2")
    rows = [
        one_turn_row(
            *(f"step{step:06d}-g{number:05d}-s{sample:03d}", number, prompt, [5, 6], [1, 1], [-1.0, -0.5]),
            *([step] * 2, "stop" if sample else "length" if step else "stop", f"two {step}" if sample else HOSTILE),
            reward=float(sample),
        )
        for sample in range(2)
    ]
    return Group.from_rows(number, prompt, rows)


def _attempts(folder: RunFolder) -> None:
    for number, (state, error) in enumerate((("failed", "rank 0: lost"), ("finished", None)), start=1):
        attempt = folder.new_attempt()
        times = {"started": 1.7e9 + 100 * number, "heartbeat": 1.7e9 + 100 * number + 80}
        atomic_write_json(attempt.state_file, {"state": state, **times, "host": "here", "pid": 1, "error": error})
        atomic_write_text(attempt.versions_file, "torch 2.11\n")
        atomic_write_text(attempt.command_file, "train\n")
    record = {"again": True, "why": "starts again", "cause": "rank 0: lost", "restarted_at": [], "furthest": {}}
    atomic_write_json(folder.attempt(1).restart_file, record)
