"""Show the recorded rollouts of a run: prompts, responses, rewards, advantages, and the server's log-probs.

    gspo-mega inspect runs/quickstart/train                   a line per step
    gspo-mega inspect runs/quickstart/train --step 3          its prompts and responses
    gspo-mega inspect runs/quickstart/train --verify          every file of the run, and what is damaged

Without --step, one line per step. Steps count from 1, as in metrics.jsonl. Of a step that was cut short, the episodes
that it has are shown. An episode of several turns is shown turn by turn: its messages, the tools that it called, and
which of its tokens each row trains. A record of a newer version is an error (exit code 8). If a record is damaged, the
command names the place of the damage, shows what is intact before and after it, and also exits with code 8.

With --verify, the whole folder is read as a continuation would read it: configuration, checkpoints with their
checksums, the journal, metrics, published and exported weights. Nothing is changed or repaired, and the run may be
running. Each finding names the file, the byte or line where it is known, what would be lost, and what to do. Exit code
0: nothing is damaged (notes of drafts, cut ends and foreign files do not count); 6: a checkpoint is; 8: the journal; 9:
another file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch
from gspo_mega.base.errors import JournalError
from gspo_mega.base.near_paths import missing_run_hint
from gspo_mega.base.records import Trajectory
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import printable
from gspo_mega.config import load_config
from gspo_mega.config.derived import least_of_group
from gspo_mega.data.journal.frames import JournalDamage
from gspo_mega.data.journal.journal import Journal, PartGoneError
from gspo_mega.data.journal.steps import StepRecord, well_formed
from gspo_mega.verify.run_folder_check import check_run_folder, exit_code

# The text of an episode's tree is wrapped for a terminal of this many columns.
WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="show this step's episodes")
    parser.add_argument(
        "--verify", action="store_true", help="read every file of the run, and say what is damaged; repairs nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    folder = RunFolder(args.run)
    if args.verify:
        return verify(folder, args.json)
    journal = Journal(folder.journal_dir)
    steps = journal.steps()
    if not steps:
        raise JournalError(f"{folder.path}: no rollouts are recorded{missing_run_hint(folder.path)}")
    if args.step is None:
        rows, lines = [], []
        for step in steps:
            with well_formed(journal.file(step)):
                rows.append(_overview_of_step(journal, step))
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
        text = json.dumps(shown) if args.json else _step_text(shown)
    print(text)
    return JournalError.exit_code if record.damages else 0


def verify(folder: RunFolder, as_json: bool) -> int:
    """Print what is wrong with the files of a run. Returns the exit code."""
    findings, read = check_run_folder(folder)
    if as_json:
        shown = [{**vars(finding), "path": str(finding.path)} for finding in findings]
        print(json.dumps({"run": str(folder.path), "read": read, "findings": shown}))
        return exit_code(findings)
    for line in (*read, *(line for finding in findings for line in finding.lines())):
        print(line)
    damaged = sum(not finding.is_note for finding in findings)
    notes = f", and notes: {len(findings) - damaged}" if len(findings) > damaged else ""
    print(f"{folder.path}: damaged: {damaged}{notes}" if findings else f"{folder.path}: nothing is damaged")
    return exit_code(findings)


def _record(journal: Journal, step: int) -> StepRecord | None:
    """The record of a step, or what is intact of a damaged one. Raises what `Journal.read` raises."""
    try:
        return journal.read(step)
    except JournalDamage:
        try:
            return journal.read(step, past_damage=True)
        except PartGoneError:
            return journal.read_alone(step, past_damage=True)


def describe(record: StepRecord, folder: RunFolder) -> dict[str, Any]:
    """The step as JSON types. If its batch is complete, its trajectories have the advantages that training computes
    from these rewards.
    """
    if record.batch is not None:
        # Imported here: it imports torch, which an unfinished step does not need.
        from gspo_mega.train.batches import fill_advantages

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


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    sampled = [p for p, active in zip(trajectory.rollout_log_probs, trajectory.response_mask, strict=True) if active]
    return {
        "trajectory_id": trajectory.trajectory_id,
        "response": trajectory.response_text,
        "num_response_tokens": trajectory.num_response_tokens,
        "finish_reason": trajectory.finish_reason,
        "weight_versions": _sampled_versions(trajectory),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "reward_error": trajectory.reward_error,
        "advantage": trajectory.advantage,
        "log_prob_sum": math.fsum(sampled),
        "log_prob_mean": math.fsum(sampled) / len(sampled) if sampled else None,
        "log_prob_min": min(sampled, default=None),
    }


def _sampled_versions(trajectory: Trajectory) -> list[int]:
    """The weight versions that sampled its tokens, in ascending order."""
    pairs = zip(trajectory.weight_versions, trajectory.response_mask, strict=True)
    return sorted({version for version, active in pairs if active})


def _trees(group: Group) -> dict[str, Any]:
    """The group's episodes that are more than one response, under the key `episodes`; empty if it has none."""
    trees = [describe_episode(episode) for episode in group.episodes if not _is_one_response(episode)]
    return {"episodes": trees} if trees else {}


def _is_one_response(episode: Episode) -> bool:
    """Whether the episode is one response to one prompt, so that it has no tree to show."""
    return episode.failure is None and len(episode.nodes) == 2 and not episode.tool_calls


def describe_episode(episode: Episode) -> dict[str, Any]:
    """The episode as JSON types: its nodes with all tokens, its tool calls, and the rows that are trained on."""
    return {
        "episode_id": episode.episode_id,
        "failure": episode.failure,
        "reward": episode.reward,
        "reward_parts": episode.reward_parts,
        "reward_error": episode.reward_error,
        "correct": episode.correct,
        "info": episode.info,
        "tools": [_tool_name(tool) for tool in episode.tools],
        "nodes": [_describe_node(episode, node) for node in episode.nodes],
        "tool_calls": [vars(call) for call in episode.tool_calls],
        "rows": [_describe_row(row, episode) for row in episode.rows()],
    }


def _describe_node(episode: Episode, node: Node) -> dict[str, Any]:
    shown = {
        "node_id": node.node_id,
        "parent": node.parent,
        "kind": node.kind,
        "messages": node.messages,
        "token_ids": list(node.token_ids),
    }
    if node.cause:
        shown["cause"] = node.cause
    if node.is_sampled:
        shown |= {
            "turn": episode.turns.index(node),
            "text": node.text,
            "finish_reason": node.finish_reason,
            "reward": node.reward,
            "server_id": node.server_id,
            "log_probs": list(node.log_probs),
            "weight_versions": list(node.weight_versions),
        }
    return shown


def _describe_row(row: Trajectory, episode: Episode) -> dict[str, Any]:
    leaf = row.turn_nodes[-1] if row.turn_nodes else -1
    return {
        "trajectory_id": row.trajectory_id,
        "nodes": [node.node_id for node in episode.path(leaf)],
        "turn_nodes": row.turn_nodes,
        "weight": row.weight,
        "mask": [[value, count] for value, count in _runs(row.response_mask)],
        "num_context_tokens": len(row.prompt.token_ids),
        "advantage": row.advantage,
        "turn_advantages": (
            None if row.token_advantages is None else [row.token_advantages[start] for start, _ in row.turns]
        ),
    }


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """(value, count) of each run of equal values."""
    return [(value, len(list(run))) for value, run in itertools.groupby(values)]


def _tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", "?"))


def _overview_of_step(journal: Journal, step: int) -> dict[str, Any]:
    """The overview of a step. If its groups were sampled ahead, `journal.keep_last` may have removed some of them."""
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
        # The mean over all groups that were sampled for the step, if the record has it; else over the groups shown.
        "reward_mean": batch.sampled.get("reward/mean", math.fsum(rewards) / len(rewards) if rewards else None),
        "damages": [str(damage) for damage in record.damages],
    }


def _overview_line(row: dict[str, Any]) -> str:
    reward = "-" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
    state = f"  reward failures {row['num_reward_failures']}" if row["num_reward_failures"] else ""
    state += f"  failed episodes {row['num_episode_failures']}" if row["num_episode_failures"] else ""
    if row["part_removed"]:
        state += "  its groups in earlier files were removed"
    elif row["damages"]:
        state += f"  {'; '.join(row['damages'])}"
    elif not row["complete"]:
        state += "  cut short"
    return (
        f"step {row['step']:>6}  groups {row['num_groups']:>5}  trajectories {row['num_trajectories']:>6}  reward"
        f" {reward}{state}"
    )


def _step_text(shown: dict[str, Any]) -> str:
    """The lines of what `describe` returned."""
    lines = [
        f"step {shown['step']}, sampled from weight version {shown['weight_version']}"
        + ("" if shown["complete"] else "; the intact part" if shown["damages"] else "; cut short"),
        *shown["damages"],
    ]
    if shown["lost"]:
        lines.append(f"intact, but their prompts or tools are lost: {', '.join(shown['lost'])}")
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
            failed = (
                f"  not trained on, because its scoring failed: {one['reward_error']}" if one["reward_error"] else ""
            )
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


def tree_text(shown: dict[str, Any]) -> list[str]:
    """The lines of what `describe_episode` returned."""
    turns = [node for node in shown["nodes"] if node["kind"] == "sampled"]
    num_sampled = sum(len(turn["token_ids"]) for turn in turns)
    lines = [f"--- {shown['episode_id']}"]
    facts = [f"reward {_number(shown['reward'])}", _count(len(turns), "turn"), _count(num_sampled, "sampled token")]
    if len(shown["rows"]) > 1:
        facts.append(f"{len(shown['rows'])} rows")
    if shown["correct"] is not None:
        facts.append("correct" if shown["correct"] else "not correct")
    if shown["tools"]:
        facts.append("tools " + ", ".join(shown["tools"]))
    lines += _wrapped("  ".join(facts), 4)
    for name, what in (
        ("failure", "not trained on, because it failed"),
        ("reward_error", "not trained on, because its scoring failed"),
    ):
        if shown[name] is not None:
            lines += _wrapped(f"{what}: {shown[name]}", 4)
    if shown["info"]:
        lines += _wrapped(f"info {json.dumps(shown['info'], ensure_ascii=False)}", 4)
    calls = {turn: list(found) for turn, found in itertools.groupby(shown["tool_calls"], lambda call: call["turn"])}
    lines += [line for call in calls.get(-1, ()) for line in _call_text(call)]
    for node in shown["nodes"]:
        lines += _node_text(node)
        if node["kind"] == "sampled":
            lines += [line for call in calls.get(node["turn"], ()) for line in _call_text(call)]
    return lines + [line for number, row in enumerate(shown["rows"]) for line in _row_text(number, row)]


def _node_text(node: dict[str, Any]) -> Iterator[str]:
    number = f"#{node['node_id']}"
    is_successor = node["parent"] in (-1, node["node_id"] - 1)
    after = "" if is_successor else f"  after #{node['parent']}"
    branch = f"  branch: {node['cause']}" if node.get("cause") else ""
    if node["kind"] == "context":
        roles = ", ".join(str(message.get("role", "?")) for message in node["messages"]) or "template"
        yield f"{number:<4}{roles}: {_count(len(node['token_ids']), 'token')}, mask 0{after}{branch}"
        for message in node["messages"]:
            yield from _message_text(message)
        return
    mean = math.fsum(node["log_probs"]) / max(1, len(node["log_probs"]))
    yield from _wrapped(
        f"turn {node['turn']}: {_count(len(node['token_ids']), 'token')}, mask 1, {node['finish_reason']},"
        f" {_versions_text(node['weight_versions'])}, log-prob per token {mean:.4f} (lowest"
        f" {min(node['log_probs'], default=0.0):.2f})"
        + (f", reward {node['reward']:g}" if node["reward"] is not None else "")
        + (f", {node['server_id']}" if node["server_id"] else "")
        + after
        + branch,
        4,
        first=f"{number:<4}",
    )
    yield from _wrapped(node["text"], 4)


def _message_text(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if content is not None:
        yield from _wrapped(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), 4)
    for call in message.get("tool_calls") or ():
        yield from _wrapped(f"calls {json.dumps(call.get('function', call), ensure_ascii=False)}", 4)


def _call_text(call: dict[str, Any]) -> Iterator[str]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    answer = f"error: {call['error']}" if call["error"] is not None else str(call["result"])
    yield from _wrapped(f"tool {call['name']} {arguments} -> {answer} ({call['seconds']:.3g} s)", 4)


def _row_text(number: int, row: dict[str, Any]) -> Iterator[str]:
    mask = " ".join(f"{value}x{count}" for value, count in row["mask"])
    advantage = f"advantage {_number(row['advantage'], '+.3f')}"
    if row["turn_advantages"] is not None:
        advantage = "advantages of its turns " + ", ".join(f"{value:+.3f}" for value in row["turn_advantages"])
    path = " ".join(f"#{node}" for node in row["nodes"])
    yield from _wrapped(
        f"row {number}: {path}; {advantage}; weight {row['weight']:.3g}; mask after the first"
        f" {row['num_context_tokens']} tokens: {mask}",
        4,
    )


def _versions_text(versions: Sequence[int]) -> str:
    runs = _runs(versions)
    if len(runs) == 1:
        return f"version {runs[0][0]}"
    return "versions " + ", ".join(f"{version} ({_count(count, 'token')})" for version, count in runs)


def _number(value: float | None, form: str = "g") -> str:
    return "-" if value is None else format(value, form)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrapped(text: str, indent: int, first: str = "") -> Iterator[str]:
    """The printable text in lines of at most `WIDTH` columns. `first` replaces the indentation of the first line."""
    safe = printable(text)
    margin = " " * indent
    for number, line in enumerate(safe.split("\n")):
        start = first if first and number == 0 else margin
        yield from textwrap.wrap(
            line, WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
        ) or [start.rstrip()]
