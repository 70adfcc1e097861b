"""Show the recorded rollouts of a run: prompts, responses, rewards, advantages, log-probs of the server.

Without --step, one line per step. Steps count from 1, as in metrics.jsonl. A step that was cut short shows the
episodes it has. An episode of several turns is shown turn by turn: its messages, the tools that it called, and which of
its tokens are trained on in which row. A record of a newer version is an error (exit code 8). Of a damaged one, the
place of the damage and what is intact before and after it are shown, and the exit code is 8, too.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from gspo_mega.base import kill_points
from gspo_mega.base.errors import JournalError
from gspo_mega.base.records import Trajectory
from gspo_mega.base.rollout_batch import Group, RolloutBatch
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.cli.inspect_tree import describe_episode, is_plain, tree_text
from gspo_mega.config import load_config
from gspo_mega.config.critic_config import least_of_group
from gspo_mega.data.journal.frames import JournalDamage
from gspo_mega.data.journal.journal import Journal, PartGoneError
from gspo_mega.data.journal.step_record import StepRecord, well_formed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="show this step's episodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--kill-points", action="store_true", help="list the points at which tests kill a run")


def run(args: argparse.Namespace) -> int:
    if args.kill_points:
        width = max(map(len, kill_points.POINTS))
        print(
            json.dumps(kill_points.POINTS)
            if args.json
            else "\n".join(f"{name:<{width}}  {what}" for name, what in kill_points.POINTS.items())
        )
        return 0
    if args.run is None:
        raise JournalError("which run? gspo-mega inspect RUN [--step N]")
    folder = RunFolder(args.run)
    journal = Journal(folder.journal_dir)
    steps = journal.steps()
    if not steps:
        raise JournalError(f"{folder.path}: no rollouts are recorded")
    if args.step is None:
        rows, lines = [], []
        for step in steps:
            with well_formed(journal.file(step)):
                rows.append(_row(journal, step))
                lines.append(_overview_line(rows[-1]))
        print(json.dumps(rows) if args.json else "\n".join(lines))
        return JournalError.exit_code if any(row["damages"] for row in rows) else 0
    if args.step - 1 not in steps:
        raise JournalError(
            f"{folder.path}: step {args.step} is not recorded; recorded are steps {steps[0] + 1} to {steps[-1] + 1}"
        )
    record = _record(journal, args.step - 1)
    if record is None:
        raise JournalError(f"{journal.file(args.step - 1)}: was cut short before its first trajectory")
    with well_formed(journal.file(args.step - 1)):
        shown = describe(record, folder)
        text = json.dumps(shown) if args.json else _text(shown)
    print(text)
    return JournalError.exit_code if record.damages else 0


def _record(journal: Journal, step: int) -> StepRecord | None:
    """The record of a step; of a damaged one, what is intact. Raises as `Journal.read`."""
    try:
        return journal.read(step)
    except JournalDamage:
        try:
            return journal.read(step, past_damage=True)
        except PartGoneError:
            return journal.read_alone(step, past_damage=True)


def describe(record: StepRecord, folder: RunFolder) -> dict[str, Any]:
    """The step as JSON types. Where the step's batch is complete, it has the advantages that training computes from
    these rewards.
    """
    if record.batch is not None:
        # Imported here: it imports torch, which an unfinished step does not need.
        from gspo_mega.train.assemble import fill_advantages

        config = load_config(folder.config_file).config
        fill_advantages(record.batch.scored(least_of_group(config)), config, record.step)
    groups = record.batch.groups if record.batch is not None else [record.groups[n] for n in sorted(record.groups)]
    return {
        "step": record.step + 1,
        "weight_version": record.weight_version,
        "complete": record.batch is not None,
        "counts": {} if record.batch is None else record.batch.counts,
        "damages": [str(damage) for damage in record.damages],
        "lost": record.lost,
        "groups": [
            {
                "group_id": group.group_id,
                "prompt_id": group.prompt.prompt_id,
                "prompt": group.prompt.text,
                "answer": group.prompt.answer,
                "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
                **_trees(group),
            }
            for group in groups
        ],
    }


def _trees(group: Group) -> dict[str, Any]:
    """The episodes of a group that are more than one response, under `episodes`; nothing where there is none."""
    trees = [describe_episode(episode) for episode in group.episodes if not is_plain(episode)]
    return {"episodes": trees} if trees else {}


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    sampled = [p for p, active in zip(trajectory.rollout_log_probs, trajectory.response_mask, strict=True) if active]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "response": trajectory.response_text,
        "num_response_tokens": trajectory.num_response_tokens,
        "finish_reason": trajectory.finish_reason,
        "weight_versions": _versions(trajectory),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "reward_error": trajectory.reward_error,
        "advantage": trajectory.advantage,
        "log_prob_sum": math.fsum(sampled),
        "log_prob_mean": math.fsum(sampled) / len(sampled) if sampled else None,
        "log_prob_min": min(sampled, default=None),
    }


def _versions(trajectory: Trajectory) -> list[int]:
    """Those that sampled its tokens, in order."""
    pairs = zip(trajectory.weight_versions, trajectory.response_mask, strict=True)
    return sorted({version for version, active in pairs if active})


def _row(journal: Journal, step: int) -> dict[str, Any]:
    """The overview of a step. Where its groups were sampled ahead, `journal.keep_last` may have removed some."""
    try:
        return _overview(_record(journal, step), step) | {"part_removed": False}
    except PartGoneError:
        return _overview(journal.read_alone(step), step) | {"part_removed": True}


def _overview(record: StepRecord | None, step: int) -> dict[str, Any]:
    if record is None:
        return {
            "step": step + 1,
            "complete": False,
            "num_groups": 0,
            "num_trajectories": 0,
            "num_reward_failures": 0,
            "num_episode_failures": 0,
            "reward_mean": None,
            "damages": [],
        }
    batch = record.batch or RolloutBatch(step, list(record.groups.values()))
    rewards = [reward for group in batch.groups for reward in group.rewards]
    return {
        "step": step + 1,
        "complete": record.batch is not None,
        "num_groups": len(batch.groups),
        "num_trajectories": len(batch.episodes),
        "num_reward_failures": sum(not one.is_scored and one.failure is None for one in batch.episodes),
        "num_episode_failures": sum(one.failure is not None for one in batch.episodes),
        # Of all groups that were sampled for the step, where its record says it.
        "reward_mean": batch.sampled.get("reward/mean", math.fsum(rewards) / len(rewards) if rewards else None),
        "damages": [str(damage) for damage in record.damages],
    }


def _overview_line(row: dict[str, Any]) -> str:
    reward = "-" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
    state = f"  reward failures {row['num_reward_failures']}" if row["num_reward_failures"] else ""
    state += f"  failed episodes {row['num_episode_failures']}" if row["num_episode_failures"] else ""
    if row["part_removed"]:
        state += "  what earlier files had of it is removed"
    elif row["damages"]:
        state += f"  {'; '.join(row['damages'])}"
    elif not row["complete"]:
        state += "  cut short"
    return (
        f"step {row['step']:>6}  groups {row['num_groups']:>5}  trajectories {row['num_trajectories']:>6}  reward"
        f" {reward}{state}"
    )


def _text(shown: dict[str, Any]) -> str:
    lines = [
        f"step {shown['step']}, sampled from weight version {shown['weight_version']}"
        + ("" if shown["complete"] else "; what is intact" if shown["damages"] else "; cut short"),
        *shown["damages"],
    ]
    if shown["lost"]:
        lines.append(f"intact, but without their prompts or tools: {', '.join(shown['lost'])}")
    for group in shown["groups"]:
        lines += ["", f"=== {group['prompt_id']}   answer: {group['answer']!r}", group["prompt"]]
        trees = {tree["episode_id"]: tree for tree in group.get("episodes", ())}
        in_trees = {row["trajectory_id"] for tree in trees.values() for row in tree["rows"]}
        for tree in trees.values():
            lines += tree_text(tree)
        for one in group["trajectories"]:
            if one["trajectory_id"] in in_trees:
                continue
            advantage = "-" if one["advantage"] is None else f"{one['advantage']:+.3f}"
            mean = (
                "-"
                if one["log_prob_mean"] is None
                else f"{one['log_prob_mean']:.4f} (lowest {one['log_prob_min']:.2f})"
            )
            failed = f"  not trained on, its scoring failed: {one['reward_error']}" if one["reward_error"] else ""
            reward = "-" if one["reward"] is None else f"{one['reward']:g}"
            ahead = ""
            if one["weight_versions"] not in ([], [shown["weight_version"]]):
                ahead = f"  sampled from {', '.join(map(str, one['weight_versions']))}"
            lines += [
                (
                    f"--- {one['trajectory_id']}  reward {reward}  advantage {advantage}  {one['num_response_tokens']}"
                    f" tokens, {one['finish_reason']}  log-prob per token {mean}{ahead}{failed}"
                ),
                one["response"],
            ]
    return "\n".join(lines)
