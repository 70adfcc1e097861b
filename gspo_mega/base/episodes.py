"""The record of one episode, the rows that are trained on, and the groups and batches of a step. Plain data.

An `Episode` is a tree of messages (`Node`), each with the tokens that it adds. `build_rows` makes the rows: every
sampled token is in exactly one row with mask 1. A `Group` has the episodes of one prompt, and a `RolloutBatch` the
groups of one step. Only episodes with a reward are trained on, in groups with enough of them. `check_episode`, at the
end, has the rules that every tree keeps; the journal checks what it writes and what it reads back with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from gspo_mega.base.records import Prompt, Trajectory, are_equal_rewards, constant_column, float_column, join_columns
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.base.served_scores import ServedScores

# The key in `Episode.reward_parts` of the reward that the episode gave itself. Its further numbers are `episode/NAME`.
OWN_REWARD = "episode"
# The key in `Episode.info` of the limit that ended it (`context_full`, `too_many_turns`).
ENDED_BY_LIMIT = "ended_by_limit"

FINISH_REASONS = ("stop", "length", "stop_string")


@dataclass
class Node:
    """A message of the tree with the tokens that it adds after those of its parent.

    A `context` node's tokens are the template's text from the parent's last token to the beginning of the next
    assistant message. They may contain several messages. A `sampled` node is one turn: its tokens as sampled, including
    the end token, and the one message that they make.

    `log_probs` (nats at the sampling temperature) and `weight_versions` have one entry per token of a sampled node, and
    none in a context node. `sampling_masks`, if a sampled node has them, are the tokens that each of its tokens was
    sampled from; `teacher`, if a teacher's server scored them, is what it said. `routed_experts` is [positions, layers,
    top_k] of `route_type`, or None. Its positions begin after those of the nearest sampled ancestor and end at this
    node's last token but one, so the positions of a path follow each other without a gap. `text` is a sampled node's
    text without its end token. `finish_reason` is `stop`, `length` or `stop_string` (the agent named a text that ends a
    turn). `reward` is the turn's own reward, if the episode gives one. `cause` says why a branch begins here (`edited`,
    `template`, `resampled` or `not_ours`), and is empty if none does.
    """

    node_id: int
    parent: int
    kind: Literal["context", "sampled"]
    messages: list[dict[str, Any]]
    token_ids: Sequence[int]
    log_probs: Sequence[float] = field(default_factory=list)
    weight_versions: Sequence[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    finish_reason: str = ""
    text: str = ""
    reward: float | None = None
    server_id: str = ""
    cause: str = ""
    sampling_masks: SamplingMasks | None = None
    teacher: ServedScores | None = None

    @property
    def is_sampled(self) -> bool:
        return self.kind == "sampled"


@dataclass
class ToolRecord:
    """One call of a tool.

    `turn` is the turn that asked for it, counted from 0 in the order of sampling, or -1 before the first turn. Either
    `result` or `error` is the text that the call gave.
    """

    turn: int
    name: str
    arguments: dict[str, Any]
    result: str | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass
class Episode:
    """What one run of an agent on one prompt sampled, as a tree: `nodes[i].node_id` is i and comes after its parent's.

    `prompt` is the task; an episode of one turn has the prompt's tokens in node 0. `tools` are the schemas of the tools
    that the agent could call. Rewards are as in `Trajectory`. `failure` says why the episode did not end by itself, or
    is None. `info` is what the episode's code wants recorded, in JSON types. `counts` are events that the tree does not
    show, by metric name.
    """

    episode_id: str
    group_id: int
    prompt: Prompt
    nodes: list[Node]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[ToolRecord] = field(default_factory=list)
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_error: str | None = None
    correct: bool | None = None
    failure: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    _rows: list[Trajectory] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_row(cls, row: Trajectory) -> Episode:
        """Return the episode whose only row is `row`. Its `rows()` returns that same object."""
        episode = one_turn_episode(
            row.trajectory_id,
            row.group_id,
            row.prompt,
            row.response_token_ids,
            row.rollout_log_probs,
            row.weight_versions,
            row.finish_reason,
            row.response_text,
            routed_experts=row.routed_experts,
            sampling_masks=row.sampling_masks,
        )
        if not all(row.response_mask):
            episode.nodes[1:] = _nodes_by_mask(row)
        episode.reward, episode.reward_parts = row.reward, row.reward_parts
        episode.reward_error, episode.correct = row.reward_error, row.correct
        episode._rows = [row]
        return episode

    def rows(self) -> list[Trajectory]:
        """Return the rows to train on, in the order in which their last turns were sampled; none if nothing was
        sampled.

        The rows are built once, when the episode has ended. They always carry the episode's present reward.
        """
        if self._rows is None:
            self._rows = build_rows(self)
        for row in self._rows:
            row.reward, row.reward_parts = self.reward, self.reward_parts
            row.reward_error, row.correct = self.reward_error, self.correct
        return self._rows

    def take_scores(self, scores: Mapping[int, ServedScores]) -> None:
        """Give turns what a teacher's server said of their tokens. `scores`: by node id."""
        for node_id, found in scores.items():
            self.nodes[node_id].teacher = found
        self._rows = None

    def by_turn(self) -> Episode:
        """Return the same record with one row per turn."""
        copy = replace(self)
        copy._rows = build_rows(copy, by_turn=True)
        return copy

    @property
    def is_scored(self) -> bool:
        """Whether the episode has a reward to learn from.

        A failure of the episode's code or of a scorer says nothing about what was sampled.
        """
        return self.reward is not None and self.reward_error is None and self.failure is None

    @property
    def turns(self) -> list[Node]:
        """The sampled nodes, in the order of sampling."""
        return [node for node in self.nodes if node.is_sampled]

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.turns)

    @property
    def num_branches(self) -> int:
        """The number of rows after the first."""
        return max(0, len(leaf_ids(self.nodes)) - 1)

    @property
    def branch_causes(self) -> list[str]:
        """Why each of the `num_branches` began, in the order in which their first nodes were added."""
        # Only nodes that are sampled or lead to a sampled one begin a branch.
        on_paths = {node.node_id for turn in self.turns for node in self.path(turn.node_id)}
        children: dict[int, list[Node]] = {}
        for node_id in sorted(on_paths):
            children.setdefault(self.nodes[node_id].parent, []).append(self.nodes[node_id])
        later = [node for siblings in children.values() for node in siblings[1:]]
        return [node.cause for node in sorted(later, key=lambda node: node.node_id)]

    @property
    def response_text(self) -> str:
        """The text of the first row's last turn, which rewards read."""
        leaves = leaf_ids(self.nodes)
        return self.nodes[leaves[0]].text if leaves else ""

    @property
    def is_truncated(self) -> bool:
        """Whether a row ended because there was no room for more tokens, or the episode ended at a limit."""
        last_turns = [self.nodes[leaf] for leaf in leaf_ids(self.nodes)]
        return ENDED_BY_LIMIT in self.info or any(node.finish_reason == "length" for node in last_turns)

    def path(self, node_id: int) -> list[Node]:
        """Return the nodes from the root to `node_id`."""
        path = []
        while node_id >= 0:
            path.append(self.nodes[node_id])
            node_id = self.nodes[node_id].parent
        return path[::-1]

    def tokens(self, node_id: int) -> list[int]:
        """Return all tokens from the root to the end of `node_id`: the input of a model that goes on from there."""
        return [token for node in self.path(node_id) for token in node.token_ids]


def one_turn_episode(
    episode_id: str,
    group_id: int,
    prompt: Prompt,
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    weight_versions: Sequence[int],
    finish_reason: str,
    text: str = "",
    *,
    routed_experts: np.ndarray | None = None,
    sampling_masks: SamplingMasks | None = None,
    server_id: str = "",
) -> Episode:
    """Return an episode of two nodes: the prompt and one response to it.

    The sequences have one entry per token of the response. `routed_experts` is [prompt + response - 1, layers, top_k]
    of `route_type`, or None. `sampling_masks`: the tokens that each was sampled from; None if from all.
    """
    context = Node(0, -1, "context", [{"role": "user", "content": prompt.text}], list(prompt.token_ids))
    response = Node(
        1,
        0,
        "sampled",
        [{"role": "assistant", "content": text}],
        token_ids,
        log_probs,
        weight_versions,
        routed_experts,
        finish_reason,
        text,
        server_id=server_id,
        sampling_masks=sampling_masks,
    )
    return Episode(episode_id, group_id, prompt, [context, response])


def one_turn_row(
    trajectory_id: str,
    group_id: int,
    prompt: Prompt,
    response_token_ids: Sequence[int],
    response_mask: Sequence[int],
    rollout_log_probs: Sequence[float],
    weight_versions: Sequence[int],
    finish_reason: str,
    response_text: str = "",
    **more: Any,
) -> Trajectory:
    """Return the only row of an episode of one turn. `more` are further fields of `Trajectory`."""
    row = Trajectory(
        trajectory_id,
        group_id,
        prompt,
        response_token_ids,
        response_mask,
        rollout_log_probs,
        weight_versions,
        finish_reason,
        response_text,
        **more,
    )
    row.episode_id = trajectory_id
    end = 0
    for node_id, (is_active, run) in enumerate(itertools.groupby(response_mask), 1):
        start, end = end, end + len(list(run))
        if is_active:
            row.turns.append((start, end))
            row.turn_nodes.append(node_id)
    return row


def _nodes_by_mask(row: Trajectory) -> list[Node]:
    """Return a row's response as nodes: turns where the mask is 1, with context between them."""
    nodes: list[Node] = []
    start = end = routed = 0
    for is_active, run in itertools.groupby(row.response_mask):
        start, end = end, end + len(list(run))
        node = Node(len(nodes) + 1, len(nodes), "context", [], row.response_token_ids[start:end])
        if is_active:
            node.kind, node.messages, node.finish_reason = "sampled", [{"role": "assistant", "content": ""}], "stop"
            node.log_probs, node.weight_versions = row.rollout_log_probs[start:end], row.weight_versions[start:end]
            if row.routed_experts is not None:
                routed, first = len(row.prompt.token_ids) + end - 1, routed
                node.routed_experts = row.routed_experts[first:routed]
            if row.sampling_masks is not None:
                node.sampling_masks = row.sampling_masks.between(start, end)
            if row.teacher is not None:
                node.teacher = row.teacher.between(start, end)
        nodes.append(node)
    if row.response_mask and row.response_mask[-1]:
        nodes[-1].finish_reason, nodes[-1].text = row.finish_reason, row.response_text
    return nodes


def leaf_ids(nodes: Sequence[Node]) -> list[int]:
    """Return the turns after which nothing more was sampled (the ends of the rows), in the order of sampling."""
    continued: set[int] = set()
    for node in nodes:
        parent = node.parent if node.is_sampled else -1
        while parent >= 0 and parent not in continued:
            continued.add(parent)
            parent = nodes[parent].parent
    return [node.node_id for node in nodes if node.is_sampled and node.node_id not in continued]


def build_rows(episode: Episode, by_turn: bool = False) -> list[Trajectory]:
    """Return the rows of a tree, without a reward. A token that several paths share is trained in the first of them.

    `by_turn`: each turn is a row, in the order of sampling. Its response is the turn, and all that precedes is its
    prompt.
    """
    trained: set[int] = set()
    rows = []
    ends = [node.node_id for node in episode.turns] if by_turn else leaf_ids(episode.nodes)
    for branch, end in enumerate(ends):
        path = episode.path(end)
        first = len(path) - 1 if by_turn else next(place for place, node in enumerate(path) if node.is_sampled)
        context = tuple(token for node in path[:first] for token in node.token_ids)
        prompt = episode.prompt if context == episode.prompt.token_ids else replace(episode.prompt, token_ids=context)
        row = Trajectory(
            trajectory_id=episode.episode_id if branch == 0 else f"{episode.episode_id}-b{branch:03d}",
            group_id=episode.group_id,
            prompt=prompt,
            response_token_ids=join_columns([node.token_ids for node in path[first:]]),
            response_mask=[],
            rollout_log_probs=[],
            weight_versions=[],
            finish_reason=path[-1].finish_reason,
            response_text=path[-1].text,
            routed_experts=_routes_of(path),
            episode_id=episode.episode_id,
            branch=branch,
        )
        start = 0
        columns: list[tuple[Sequence[int], Sequence[float], Sequence[int]]] = []
        masks: list[SamplingMasks | None] = []
        taught: list[ServedScores | None] = []
        num_top = next((node.teacher.num_top for node in path[first:] if node.teacher is not None), 0)
        for node in path[first:]:
            length, is_active = len(node.token_ids), node.is_sampled and node.node_id not in trained
            log_probs = node.log_probs if is_active else float_column([0.0] * length)
            versions = node.weight_versions if node.is_sampled else constant_column(0, length)
            columns.append((constant_column(int(is_active), length), log_probs, versions))
            masks.append(node.sampling_masks if is_active else SamplingMasks.none(length))
            taught.append(node.teacher if is_active else ServedScores.none(length, num_top))
            if is_active:
                trained.add(node.node_id)
                row.turns.append((start, start + length))
                row.turn_nodes.append(node.node_id)
            start += length
        row.response_mask, row.rollout_log_probs, row.weight_versions = map(join_columns, zip(*columns, strict=True))
        if any(len(mask.codes) for mask in masks if mask is not None):
            row.sampling_masks = _joined_masks(episode.episode_id, masks)
        scores = [part for part in taught if part is not None]
        if row.turns and len(scores) == len(taught):  # a teacher scores all turns of an episode or none
            row.teacher = ServedScores.join(scores)
        row.weight = sum(end - start for start, end in row.turns) / episode.num_sampled_tokens
        rows.append(row)
    return rows


def _joined_masks(name: str, masks: Sequence[SamplingMasks | None]) -> SamplingMasks:
    """Return the masks of a row's nodes. Raises ValueError if one of them has none although its tokens are trained."""
    known = [mask for mask in masks if mask is not None]
    if len(known) < len(masks):
        raise ValueError(f"episode {name}: only some of its turns have sampling masks")
    return SamplingMasks.join(known)


def _routes_of(path: Sequence[Node]) -> np.ndarray | None:
    """Return the experts of a path's tokens, [tokens - 1, layers, top_k], or None if those of a turn are not known."""
    routes = [node.routed_experts for node in path if node.is_sampled]
    known = [part for part in routes if part is not None]
    if len(known) < len(routes):
        return None
    return known[0] if len(known) == 1 else np.concatenate(known)


@dataclass
class Group:
    """The episodes of one prompt in one rollout batch. Groups of different sizes are normal: samples may be dropped."""

    group_id: int
    prompt: Prompt
    episodes: list[Episode]

    @classmethod
    def from_rows(cls, group_id: int, prompt: Prompt, rows: Iterable[Trajectory]) -> Group:
        """Return a group of episodes with one row each, whose rows are these same objects."""
        return cls(group_id, prompt, [Episode.from_row(row) for row in rows])

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rows of all episodes, episode by episode."""
        return [row for episode in self.episodes for row in episode.rows()]

    @property
    def scored(self) -> list[Episode]:
        """The episodes that have a reward."""
        return [episode for episode in self.episodes if episode.is_scored]

    @property
    def rewards(self) -> list[float]:
        """The reward of every episode that has one."""
        return [float(episode.reward or 0.0) for episode in self.scored]

    @property
    def is_constant(self) -> bool:
        """Whether the group carries no signal, because the rewards of its episodes are all equal or fewer than two."""
        rewards = self.rewards
        return len(rewards) < 2 or are_equal_rewards(rewards)

    @property
    def is_constant_by_turn(self) -> bool:
        """The same question if each turn is credited with the rewards that follow it. Rewards within an episode are
        then a signal too, even if the sums of the episodes are equal.
        """
        return self.is_constant and not any(turn.reward for episode in self.scored for turn in episode.turns)


@dataclass
class RolloutBatch:
    """What `source.take(step)` returns: the complete, scored groups of one step, and how they were sampled.

    `counts` holds the collector's own numbers for metrics (`num_*`), and `phase_seconds` its times. `sampled` holds
    metrics of all groups that were sampled for the step, including those that a filter left out; it is empty if they
    are not known.
    """

    step: int
    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    sampled: dict[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rows of all episodes, group by group."""
        return [row for group in self.groups for row in group.trajectories]

    def by_turn(self) -> RolloutBatch:
        """Return the same episodes with a row for each turn."""
        groups = [replace(group, episodes=[episode.by_turn() for episode in group.episodes]) for group in self.groups]
        return replace(self, groups=groups)

    def drop_routes(self) -> None:
        """Forget the routed experts, the sampling masks and a teacher's scores. They are nearly all of the memory of a
        batch that has them.
        """
        for episode in self.episodes:
            for owner in (*episode.nodes, *episode.rows()):
                owner.routed_experts = owner.sampling_masks = owner.teacher = None

    def scored(self, least_of_group: int = 2) -> RolloutBatch:
        """Return what to train on: episodes with a reward, in groups of at least `least_of_group` such episodes."""
        groups = [replace(group, episodes=group.scored) for group in self.groups]
        return replace(self, groups=[group for group in groups if len(group.episodes) >= least_of_group])


def num_routed_rows(episode: Episode, node_id: int) -> int:
    """Return how many positions `routed_experts` of a sampled node has: those after its nearest sampled ancestor's."""
    ancestor = next((node for node in reversed(episode.path(node_id)[:-1]) if node.is_sampled), None)
    num_positions = len(episode.tokens(node_id)) - 1
    return num_positions if ancestor is None else num_positions - (len(episode.tokens(ancestor.node_id)) - 1)


def check_episode(episode: Episode) -> None:
    """Check that a recorder can have made this tree. Raises ValueError, naming the node, if not."""
    name = episode.episode_id
    for place, node in enumerate(episode.nodes):
        where = f"episode {name}, node {place}"
        if node.node_id != place:
            raise ValueError(f"{where}: its node_id is {node.node_id}")
        if not -1 <= node.parent < place:
            raise ValueError(f"{where}: its parent {node.parent} does not precede it")
        per_token = {"log_probs": len(node.log_probs), "weight_versions": len(node.weight_versions)}
        if node.kind == "sampled":
            _check_turn(episode, node, where, per_token)
        elif node.kind == "context":
            recorded = any(part is not None for part in (node.routed_experts, node.sampling_masks, node.teacher))
            if any(per_token.values()) or recorded or node.finish_reason:
                raise ValueError(
                    f"{where}: a context node has no log-probs, versions, routes, scores, masks or finish reason"
                )
            parent = episode.nodes[node.parent] if node.parent >= 0 else None
            ended = "" if parent is None else parent.finish_reason
            if ended in ("length", "stop_string") and not node.token_ids:
                raise ValueError(f"{where}: follows a turn that ended by {ended} without the tokens that close it")
        else:
            raise ValueError(f"{where}: kind is {node.kind!r}, not 'context' or 'sampled'")
    if episode.is_scored and not episode.turns:
        raise ValueError(f"episode {name}: has a reward and no sampled turn, so there is nothing to train on")


def _check_turn(episode: Episode, node: Node, where: str, per_token: dict[str, int]) -> None:
    if not node.token_ids:
        raise ValueError(f"{where}: a sampled turn has at least one token")
    for name, length in per_token.items():
        if length != len(node.token_ids):
            raise ValueError(f"{where}: {length} {name} for {len(node.token_ids)} tokens")
    if node.parent < 0:
        raise ValueError(f"{where}: a sampled turn has a context before it")
    if node.finish_reason not in FINISH_REASONS:
        raise ValueError(f"{where}: finish_reason is {node.finish_reason!r}, not one of {', '.join(FINISH_REASONS)}")
    if len(node.messages) != 1:
        raise ValueError(f"{where}: a sampled turn is one message, not {len(node.messages)}")
    if node.sampling_masks is not None and len(node.sampling_masks) != len(node.token_ids):
        raise ValueError(f"{where}: {len(node.sampling_masks)} sampling masks for {len(node.token_ids)} tokens")
    if node.teacher is not None and len(node.teacher) != len(node.token_ids):
        raise ValueError(f"{where}: a teacher's scores of {len(node.teacher)} tokens for {len(node.token_ids)}")
    if node.routed_experts is not None:
        rows, expected = node.routed_experts.shape[0], num_routed_rows(episode, node.node_id)
        if rows != expected:
            raise ValueError(f"{where}: routes of {rows} positions; {expected} come after the turn before it")
