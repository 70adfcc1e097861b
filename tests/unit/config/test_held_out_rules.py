"""What of `eval` and its sets cannot be meant."""

import pytest
from config_refusals import refused


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["eval={path: x, blocking: false}"],
            "eval.blocking: false with `server.num_servers: 1`: the only server samples for training; valid: true,"
            " or 2",
        ),
        (
            ["eval={path: x, blocking: false, servers: 3}", "server.num_servers=3"],
            "eval.servers: 3 of server.num_servers 3 would leave none for training; valid: 1 to 2",
        ),
        (
            ["eval={path: x, blocking: false}", "server.num_servers=2", "cluster.colocated=true"],
            "eval.blocking: false with `cluster.colocated`: servers and ranks take turns on the same GPUs, so nothing",
        ),
        (
            ["eval={sets: [{name: a, path: a, reward: [{function: code, options: {total_seconds: 20}}]}]}"],
            "eval.sets.0.reward.0.options: total_seconds is 20, and after reward.deadline_seconds (10) a scoring has",
        ),
        (
            ["eval={path: a, reward: [gsm8k, {function: length, only_if: math}]}"],
            "eval.reward.1.only_if: 'math' is no function above this one; valid: gsm8k",
        ),
        (
            ["data={sources: [{name: a, path: a, reward: [gsm8k, gsm8k]}], max_prompt_tokens: 8}"],
            "data.sources.0.reward: 'gsm8k' is listed 2 times; list it once, with the summed weight, or give each a",
        ),
        (["eval={path: a, reward: {function: gsm8k, weigth: 2}}"], "eval.reward.0.weigth: unknown key"),
        (["eval={}"], "eval.path: missing; the JSONL file of held-out prompts"),
        (
            ["eval={path: x, sets: [{name: a, path: a}]}"],
            "eval.path: both `path` and `sets` are given; make the file an entry of `sets`, or leave those out",
        ),
        (
            ["eval={sets: [{name: a, path: a}, {name: a, path: b}]}"],
            "eval.sets: 2 sets are named 'a'; names must differ",
        ),
        (
            ["rollout.max_new_tokens=32", "eval={sets: [{name: a, path: a, max_new_tokens: 33}]}"],
            "eval.sets.0.max_new_tokens: 33 is above rollout.max_new_tokens (32), from which the servers' context",
        ),
        (
            ["rollout.max_new_tokens=32", "eval={path: x, max_new_tokens: 64}"],
            "eval.max_new_tokens: 64 is above rollout.max_new_tokens (32)",
        ),
        (
            ["eval={sets: [{name: a, path: a, template: 'Q: {problem}'}]}"],
            "eval.sets.0.template: lacks {prompt}, which stands for the row's prompt; put it where the prompt belongs",
        ),
        (
            ["eval={sets: [{name: a, path: a, template_keys: [b]}]}"],
            "eval.sets.0.template_keys: 'b' is not in `template`; put {b} where it belongs",
        ),
        (
            [
                "data.chat_template=true",
                "eval={sets: [{name: a, path: a, system_prompt: s, chat_template: false}]}",
            ],
            "eval.sets.0.chat_template: false with a system prompt (of the set, or data.system_prompt); without a",
        ),
    ],
)
def test_contradictions_are_refused_by_key(write, overrides, said):
    assert said in refused(write(), *overrides)
