"""Keys about episodes that contradict each other are refused by name; those that fit are taken, and told about."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.derived import episode_lengths

AGENT = ("rollout.episode=my.agents:play", "episodes.max_tokens=64")
FOREIGN = ["rollout.episode={function: foreign, options: {command: [x]}}", "episodes.max_tokens=64"]


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["rollout.episode=two_turns", AGENT[1]],
            "rollout.episode",
            "valid: one_turn, tool_loop, foreign, gym_text, openenv, or package",
        ),
        (["rollout.episode=a.b:c d", "episodes.max_tokens=64"], "rollout.episode", "'a.b:c d' is no episode"),
        (["rollout.episode={options: {a: 1}}"], "rollout.episode.options", "one_turn takes no options"),
        ([*AGENT, "data.chat_template=false"], "data.chat_template", "by the tokenizer's chat template; valid: true"),
        ([*AGENT, "rollout.tools=[calculator]"], "rollout.tools.0", "valid: package.module:function"),
        ([*AGENT, "rollout.tools=[a:f, b.c:f]"], "rollout.tools", "2 tools are named 'f'"),
        (["reward.functions=[]"], "reward.functions", "missing; `rollout.episode: one_turn` returns no reward here"),
        (
            [*FOREIGN, "reward.functions=[]"],
            "reward.functions",
            "missing; `rollout.episode: foreign` returns no reward",
        ),
        (["rollout.tools=[a:f]"], "rollout.tools", "`rollout.episode: one_turn` calls none of them: it has one turn"),
        (
            [*FOREIGN, "rollout.tools=[a:f]"],
            "rollout.tools",
            "the agent or the environment has its own",
        ),
        (["rollout.episode=tool_loop", AGENT[1]], "rollout.tools", "missing; `rollout.episode: tool_loop` calls tools"),
        (
            ["rollout.episode=tool_loop", "rollout.tools=[a:f]", "episodes={max_tokens: 64, max_turns: 1}"],
            "episodes.max_turns",
            "after a call no turn is left for an answer; at least 2",
        ),
        ([*AGENT, "rollout.tools=[a:f]", "episodes.tool_format=none"], "episodes.tool_format", "valid: auto, hermes"),
        (
            [*AGENT, "rollout.tools=[a:f, a:g]", "episodes.tool_format=brackets"],
            "episodes.tool_format",
            "brackets names no tool and `rollout.tools` has 2",
        ),
        (["rollout.episode=my.agents:play"], "episodes.max_tokens", "missing; the longest episode of my.agents:play"),
        (
            ["rollout.episode=my.agents:play", "episodes.max_tokens=47"],
            "episodes.max_tokens",
            "no room for a first turn after a longest prompt (max_prompt_tokens + max_new_tokens = 48)",
        ),
        (["episodes.max_tokens=47"], "episodes.max_tokens", "47 leaves no room"),
        (["episodes.endpoint.host=0.0.0.0"], "episodes.endpoint.host", "opens the server to every network"),
        (
            [*FOREIGN, "episodes.network=false"],
            "episodes.network",
            "reached through the network; valid: true",
        ),
        (
            ["rollout.episode=foreign", "episodes.max_tokens=64"],
            "rollout.episode.options.command",
            "missing; the agent's program",
        ),
        ([*FOREIGN, "rollout.episode.options.command=agent.py"], "rollout.episode.options.command", "a list of texts"),
        ([*FOREIGN, "rollout.episode.options.reward=file2"], "rollout.episode.options.reward", "functions, exit_code"),
        ([*FOREIGN, "rollout.episode.options.processes=0"], "rollout.episode.options.processes", "integer >= 1"),
        ([*FOREIGN, "rollout.episode.options.model=''"], "rollout.episode.options.model", "a name"),
        ([*FOREIGN, "rollout.episode.options.cmd=[x]"], "rollout.episode.options.cmd", "valid: command, reward, model"),
        ([*AGENT, "episodes.blocked_seconds=60"], "episodes.blocked_seconds", "below 60"),
        ([*AGENT, "episodes.turn_deadline_seconds=700"], "episodes.turn_deadline_seconds", "below 600"),
        (
            [
                *AGENT,
                "watchdog.rollout_seconds=2000",
                "episodes={max_tokens: 64, turn_deadline_seconds: 2000, deadline_seconds: 3000}",
            ],
            "watchdog.rollout_seconds",
            "above 2000",
        ),
        (["advantage.turns=return_to_go"], "advantage.turns", "a term of the whole sequence has one advantage"),
        (
            ["algorithm=custom", "objective.ratio=sequence", "advantage.turns=return_to_go"],
            "advantage.turns",
            "`algorithm: gspo_token`",
        ),
        (["advantage.turn_discount=0.9"], "advantage.turn_discount", "has no effect with `turns: episode`"),
        (
            ["data.reasoning_gym={tasks: [{name: a}], num_rows: 1, num_held_out: 1}"],
            "data.reasoning_gym",
            "given together with `path`; keep one of them",
        ),
        (
            [
                "data.path=null",
                "data.sources=[{name: a, path: b}]",
                "data.reasoning_gym={tasks: [{name: a}], num_rows: 1, num_held_out: 1}",
            ],
            "data.reasoning_gym",
            "given together with `sources`",
        ),
        (
            ["data.path=null", "data.reasoning_gym={tasks: [{name: a}, {name: a}], num_rows: 1, num_held_out: 1}"],
            "data.reasoning_gym.tasks",
            "'a' occurs 2 times",
        ),
    ],
)
def test_contradictions_are_refused_by_key(write, overrides, key, said):
    text = refused(write(), *overrides)
    assert f": {key}: " in text and said in text, text
    assert len(text.splitlines()) == 1, text


@pytest.mark.parametrize(
    "overrides",
    [
        AGENT,
        [*AGENT, "rollout.tools=[a:f, a:g]", "episodes.tool_format=hermes"],
        [*AGENT, "algorithm=gspo_token", "advantage={turns: return_to_go, turn_discount: 0.5}"],
        [*AGENT, "algorithm=grpo", "advantage.turns=return_to_go"],
        [*AGENT, "objective.scope=turn", "algorithm=grpo", "advantage.turns=return_to_go"],
        [*AGENT, "reward={functions: []}"],
        [*AGENT, "reward={}"],
        FOREIGN,
        [*FOREIGN, "rollout.episode.options.reward=exit_code", "reward.functions=[]"],
        ["data={sources: [{name: s, path: x.jsonl, reward: gsm8k}], max_prompt_tokens: 16}", "reward.functions=[]"],
        [*FOREIGN, "rollout.episode.options.reward=exit_code", "rollout.episode.options.model=gpt-4o"],
        ["episodes.max_tokens=48"],
        # What bounds agents says nothing about a run without any.
        ["watchdog.rollout_seconds=2000", "episodes.turn_deadline_seconds=2000"],
    ],
)
def test_what_fits_together_is_taken(write, overrides):
    load_config(write(), overrides)


def test_a_name_alone_is_an_episode_without_options(write):
    short = load_config(write(), AGENT)
    long = load_config(write(), [*AGENT[1:], "rollout.episode={function: 'my.agents:play'}"])
    assert short.config == long.config
    assert short.config.rollout.episode.function == "my.agents:play"
    assert load_config(write()).config.rollout.episode.function == "one_turn"
    options = load_config(write(), [*AGENT, "rollout.episode.options={depth: 2}"]).config.rollout.episode
    assert (options.function, options.options) == ("my.agents:play", {"depth": 2})


def test_a_name_in_the_file_is_named_with_its_line(write):
    path = write(text=write().read_text().replace("{max_new_tokens: 32}", "{max_new_tokens: 32, episode: nothing}"))
    assert f"{path}:7:" in refused(path) and "rollout.episode: 'nothing' is no episode" in refused(path)


def test_lengths_follow_from_the_episode(write):
    one = episode_lengths(load_config(write()).config)
    assert one[:3] == (48, 1, 32) and one.spelled == "max_prompt_tokens 16 + max_new_tokens 32 = 48"
    many = episode_lengths(load_config(write(), [*AGENT, "episodes.max_turns=3"]).config)
    # Three turns of 32 tokens do not fit 64: at most all but the first.
    assert many == (64, 3, 63, "episodes.max_tokens 64")
    roomy = episode_lengths(load_config(write(), [AGENT[0], "episodes={max_tokens: 1000, max_turns: 3}"]).config)
    assert roomy[:3] == (1000, 3, 96)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["episodes.max_turns=3"], "`episodes` has no effect with `rollout.episode: one_turn`"),
        ([*AGENT, "objective.scope=turn"], "objective.scope turn: each turn has an importance ratio"),
        (
            [*AGENT, "algorithm=gspo_token", "advantage={turns: return_to_go, turn_discount: 0.5}"],
            "advantage.turns return_to_go: tokens of a turn have the advantage of the rewards from this turn on,"
            " discounted by"
            " 0.5 per turn",
        ),
        (
            [FOREIGN[0], "episodes={max_tokens: 64, endpoint: {ignore_sampling: true}}"],
            "episodes.endpoint.ignore_sampling",
        ),
        (
            [*AGENT, "batch.prompts_per_step=16", "batch.group_size=40", "server.num_servers=8"],
            "episodes.num_workers x episodes_per_worker: 512 episodes run at a time, fewer than the servers take (",
        ),
        (
            [*FOREIGN, "batch={prompts_per_step: 5, group_size: 4, micro_batch_tokens: 64}", "rollout.max_staleness=1"],
            "rollout.episode.options.processes: 32 episodes run at a time, fewer than the servers take (",
        ),
    ],
)
def test_what_changes_the_numbers_is_told(write, overrides, said):
    notices = load_config(write(), overrides).notices
    assert any(notice.startswith(said) for notice in notices), notices
    plain = load_config(write()).notices + load_config(write(), AGENT).notices
    assert not any(notice.startswith(said) for notice in plain)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["old_log_probs=rollout"],
            "no pass measures the gap that it splits; valid: false, or `old_log_probs: trainer`",
        ),
        (["batch.num_mini_batches=1", "mismatch.correction=none"], "no pass measures the gap"),
        (["precision=fp8"], "earlier weights are kept in bf16 or fp32 only; valid: false"),
    ],
)
def test_exact_staleness_needs_a_pass_and_weights_to_keep(write, overrides, said):
    path = write()
    load_config(path, ["diagnostics.exact_staleness=true"])
    message = refused(path, "diagnostics.exact_staleness=true", *overrides)
    assert "diagnostics.exact_staleness: true" in message and said in message
