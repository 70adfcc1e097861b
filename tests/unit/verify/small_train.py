"""A `gspo-mega train` of a second: the run folder, the journal, checkpoints and points of a real one, without a model.

    small_train.py BUG CONFIG [run.dir=... train.from_rollouts=...]

Samples are random numbers, weights the hash of all that was trained on. It continues from its folder as a run does.
BUG: "" for none, or "forgets a step": after a start that is not its first its weights are wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
from pathlib import Path

from gspo_mega.base import atomic_io, failpoints
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.checkpoint import folders
from gspo_mega.config import load_config, render_config
from gspo_mega.data.journal.journal import Journal

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 4, 2, 8


def sample(step: int, number: int) -> Group:
    prompt = Prompt(f"train:{step}-{number}", "train", (1, 2), "1 + 1 =", answer="2")
    rows = [
        one_turn_row(
            f"step{step:06d}-g{number:05d}-s{one:03d}", number, prompt, list(secrets.token_bytes(2)), [1, 1],
            [-1.0, -0.5], [step] * 2, "stop", "two", reward=float(one),
        )
        for one in range(GROUP_SIZE)
    ]  # fmt: skip
    return Group.from_rows(number, prompt, rows)


def main(bug: str, config: str, *overrides: str) -> None:
    failpoints.arm(os.environ.get(failpoints.VARIABLE), rank=0)
    loaded = load_config(config, list(overrides), "train")
    run = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name)
    run.path.mkdir(parents=True, exist_ok=True)
    is_first = run.latest_attempt() is None
    bug = "" if is_first else bug
    atomic_write_text(run.config_file, render_config(loaded.config))
    run.new_attempt()
    recorded = loaded.config.train.from_rollouts
    state = {"step": 0, "weights": "", "summary": {}}
    if found := folders.candidates(run):
        state = folders.read_record(found[0])["state"]
    folders.remove_drafts(run)
    metrics = read_lines(run.metrics_file, state["step"])
    for step in range(state["step"], NUM_STEPS):
        groups = take(Journal(run.journal_dir), step, recorded)
        failpoints.reached("rollout.batch")
        tokens = [list(row.response_token_ids) for group in groups for row in group.trajectories]
        weights = hashlib.sha256((state["weights"] + json.dumps(tokens)).encode()).hexdigest()
        state = {**state, "step": step + 1, "weights": weights}
        if bug == "forgets a step":
            state["weights"] = weights[:-1]
        failpoints.reached("step.trained")
        metrics.append({"step": step + 1, "time": time.time(), "optimizer/grad_norm": int(weights[:4], 16)})
        atomic_io.write_whole(run.metrics_file, b"".join(json.dumps(line).encode() + b"\n" for line in metrics))
        save(run, state)
        time.sleep(0.02)
    run.huggingface_dir.mkdir(exist_ok=True)
    atomic_write_text(run.huggingface_dir / "weights", state["weights"])
    atomic_write_json(run.huggingface_dir / "manifest.json", {"tensors": {}})


def take(journal: Journal, step: int, recorded: str | None) -> list[Group]:
    """The step's groups: what the journal has of it, and the rest from a recording or sampled anew."""
    record = journal.read(step)
    if record is not None and record.batch is not None:
        return record.batch.groups
    known = record.groups if record is not None else {}
    if recorded is not None:
        wanted = Journal(RunFolder(recorded).journal_dir).read(step).batch.groups
    else:
        wanted = [sample(step, number) for number in range(NUM_GROUPS)]
    groups = []
    with journal.begin(step, step, GROUP_SIZE, known) as writer:
        for group in wanted:
            have = known[group.group_id].episodes if group.group_id in known else []
            names = {episode.episode_id for episode in have}
            new = [episode for episode in group.episodes if episode.episode_id not in names]
            for episode in new:
                writer.add(episode)
            groups.append(Group(group.group_id, group.prompt, sorted([*have, *new], key=lambda one: one.episode_id)))
        writer.finish(RolloutBatch(step, groups, {}, {}), {})
        writer.settle()
    return groups


def save(run: RunFolder, state: dict) -> None:
    final = run.checkpoint_dir(state["step"])
    draft = folders.draft_folder(final, secrets.token_hex(4))
    atomic_io.make_folder(draft, at="save.folder")
    weights = draft / "weights"
    with atomic_io.operation("save.tensors"):
        weights.write_text(state["weights"])
    record = {"format_version": 2, "state": state, "files": folders.checksums(draft, [weights])}
    atomic_io.atomic_write_json(draft / "state.json", record, at="save.state")
    atomic_io.sync_tree(draft, at="save.sync")
    folders.commit_draft(run, draft, final)
    folders.prune(run, state["step"], keep_last=2, keep_every=0)


def read_lines(file: Path, step: int) -> list[dict]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["step"] <= step]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, JournalError) as error:
        print(error, file=sys.stderr)
        sys.exit(6)
