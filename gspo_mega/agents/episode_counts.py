"""What the record of an episode adds to the counts of its batch, by metric name."""

from __future__ import annotations

import collections

from gspo_mega.base.episode_records import Episode

# Every name of a count that is shown although it is 0; those by cause and by kind are shown where they are not.
EPISODE_COUNTS = (
    "num_turns",
    "num_branches",
    "num_tool_calls",
    "num_tool_errors",
    "num_broken_calls",
    "num_replayed_turns",
    "num_workers_recycled",
    "num_processes_ended",
    "num_episode_failures",
    "num_episodes_redrawn",
    "num_response_faults",
)


def counts_of(episode: Episode) -> collections.Counter[str]:
    """The counts that follow from the record, whether the episode ended now or earlier."""
    counts = collections.Counter(f"num_branches_{cause}" for cause in episode.branch_causes)
    counts.update(episode.counts)
    counts["num_turns"] = episode.num_turns
    counts["num_branches"] = episode.num_branches
    counts["num_tool_calls"] = len(episode.tool_calls)
    counts["num_tool_errors"] = sum(call.error is not None for call in episode.tool_calls)
    if episode.failure is not None:
        counts["num_episode_failures"] += 1
        counts[f"num_episode_failures_{episode.failure.partition(':')[0]}"] += 1
    return counts
