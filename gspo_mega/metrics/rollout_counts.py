"""The counts and waits of a rollout batch, `rollout/<name>`: the unit of each, and what it counts."""

from __future__ import annotations

ROLLOUT_COUNTS = {
    "num_trajectories": ("trajectories", "episodes that ended, failed ones included; without branches each is a row"),
    "num_turns": ("turns", "turns sampled"),
    "num_branches": ("rows", "rows of episodes beyond their first: branches of their trees"),
    "num_branches_<cause>": (
        "branches",
        "branches begun: the agent edited its history (edited), the template rewrote it (template), it asked again for"
        " what it had (resampled), or the history holds answers of others (not_ours)",
    ),
    "num_tool_calls": ("calls", "calls of tools"),
    "num_tool_errors": ("calls", "calls of tools that were answered by an error"),
    "num_broken_calls": ("calls", "calls in sampled text that could not be read; they stay content"),
    "num_replayed_turns": ("turns", "turns answered from the record, to agents that began again"),
    "num_episode_failures": ("episodes", "episodes whose own code failed, which are not trained on; all kinds"),
    "num_episode_failures_<kind>": ("episodes", "episodes that failed, by kind"),
    "num_episodes_redrawn": (
        "episodes",
        "samples that the infrastructure lost before their first turn, in whose place another was drawn; all kinds",
    ),
    "num_episodes_redrawn_<kind>": ("episodes", "samples drawn again, by what lost them"),
    "num_endpoint_retries": (
        "requests",
        "requests of agents that joined the turn of an earlier one: nothing sampled twice",
    ),
    "num_endpoint_unheard": ("turns", "turns whose agent had gone before their end"),
    "num_endpoint_errors": ("requests", "requests of agents that were refused"),
    "num_ignored_sampling": ("requests", "requests of agents that asked for another distribution, and got the run's"),
    "num_workers_recycled": (
        "processes",
        "processes of episodes that were replaced since the last batch, whatever the reason",
    ),
    "num_processes_ended": (
        "processes",
        "processes that episodes had started and left, which ended with them; since the last batch",
    ),
    "num_episodes_restarted": ("episodes", "episodes that began again in another process, from their record"),
    "num_sessions_moved": ("turns", "turns sampled elsewhere than on the server that holds their context"),
    "num_prompts_sampled": ("prompts", "prompts asked for, refills included"),
    "num_groups_filtered": ("groups", "constant groups dropped by the filter"),
    "num_groups_unscored": ("groups", "groups left out because fewer than two of their responses could be scored"),
    "num_groups_missing": ("groups", "groups short of prompts_per_step: filtered or unscored and not replaced"),
    "num_truncated": ("trajectories", "episodes with a turn cut at max_new_tokens at their end, or ended by a limit"),
    "num_generated_tokens": ("tokens", "tokens in completed responses"),
    "num_retries": ("requests", "requests that were retried"),
    "num_request_failures": ("requests", "requests that failed, all kinds"),
    "num_request_failures_<kind>": ("requests", "requests that failed, by kind"),
    "num_aborted_requests": ("requests", "requests cut short by their server, continued from their tokens"),
    "num_moved_responses": (
        "responses",
        "times that a response left a slow server and continued, from its tokens, on another",
    ),
    "num_drained_responses": ("responses", "times that a response left a server that was asked to stop for another"),
    "num_paused_responses": ("responses", "times that a response was ended for a publish, and continued behind it"),
    "num_partial_episodes": ("episodes", "episodes of the batch whose tokens are of several weight versions"),
    "num_groups_in_flight": ("groups", "groups admitted for later steps when the batch was complete"),
    "trainer_wait_seconds": ("seconds", "time from asking for the batch until it was complete"),
    "straggler_wait_seconds": ("seconds", "part of it in which a single group was waited for"),
    "servers_idle_seconds": ("seconds", "time without any request since the last batch, the mean over servers"),
    "num_continued_requests": ("requests", "requests that continued a response from its tokens, for any reason"),
    "num_discarded_tokens": (
        "tokens",
        (
            "tokens of responses that could not be continued exactly: sampled with other weights, or without their"
            " experts"
        ),
    ),
    "num_registration_errors": ("readings", "reads of a server's registration that failed in the file system"),
    "num_reward_failures": (
        "trajectories",
        "trajectories whose scoring failed (exception, NaN, deadline, crash) and that are not trained on",
    ),
    "num_response_faults": (
        "scorings",
        "scorings that one of our own reward functions could not do because of the response, which has 0 for that: all"
        " causes",
    ),
    "num_response_faults_<cause>": (
        "scorings",
        "the same by cause: computed longer than its deadline (time), needed more memory than its bound (memory),"
        " crashed the process (crash), or was written so that it could not be read (exception)",
    ),
    "num_servers_given_up": (
        "servers",
        "servers that failed more often than server.max_restarts allows and are not started again",
    ),
}
