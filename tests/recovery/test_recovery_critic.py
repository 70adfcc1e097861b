"""PPO in whole replayed runs: killed and continued it ends as if it had not been, critic included; the policy waits for
the critic's warm-up; two ranks and a KL penalty.
"""

from __future__ import annotations

import json

from recovery_support import KILLED, NUM_STEPS, outcome

PPO = (
    "algorithm=ppo",
    "critic={optimizer: {lr: 3e-3, schedule: linear}, warmup_steps: 1, kl_coefficient: 0.01, bootstrap_truncated: true}",
)


def lines_of(ranks, name: str) -> list[dict]:
    return [json.loads(line) for line in ranks.folder(name).metrics_file.read_text().splitlines()]


def test_a_run_with_a_critic_that_is_killed_ends_as_if_it_had_not_been(ranks):
    assert ranks.train("ppo", "", *PPO) == [0], ranks.log("ppo")
    want = outcome(ranks.folder("ppo"))
    assert any(name.startswith("checkpoint/critic/__0") for name in want), sorted(want)
    assert want["state"]["num_critic_steps"] == 2 * NUM_STEPS and want["state"]["num_optimizer_steps"] == 4

    # In the save behind the first trained step, then behind it: continued from a policy that is not trained yet, and
    # from one that is.
    for point, hit, resumed in (("save.tensors.after", 2, ""), ("save.latest.rename.after", 1, "step_00000001")):
        assert ranks.train("ppo-killed", f"point={point},hit={hit}", *PPO) == [KILLED], ranks.log("ppo-killed")
        assert f"resumed from {resumed}" in ranks.console("ppo-killed") or not resumed
    assert ranks.train("ppo-killed", "", *PPO) == [0], ranks.log("ppo-killed")
    assert "resumed from step_00000002" in ranks.console("ppo-killed")
    got = outcome(ranks.folder("ppo-killed"))
    assert want.keys() == got.keys()
    for name in want:
        assert want[name] == got[name], name

    first, second, third = lines_of(ranks, "ppo")
    assert "groups/constant_fraction" not in first, "for a critic they are a signal, too"
    assert "optimizer/lr" not in first and "policy/objective" not in first, "the policy was left alone"
    assert first["critic/value_mean"] == 0.0 and third["critic/value_mean"] != 0.0, "the head begins at zero"
    assert first["critic/kl_reference"] == 0.0 == second["critic/kl_reference"] and third["critic/kl_reference"] != 0.0
    assert first["critic/lr"] == 3e-3 * (1 - 1 / 6) > second["critic/lr"]
    assert all(line["critic/num_optimizer_steps"] == 2 * (n + 1) for n, line in enumerate((first, second, third)))
    assert all(line["critic/value_loss"] > 0 and line["critic/grad_norm"] > 0 for line in (first, second, third))


def test_two_ranks_train_the_critic_and_the_policy_as_one_does(ranks):
    assert ranks.train("ppo-two", "", *PPO, num_ranks=2) == [0, 0], ranks.log("ppo-two")
    for one, two in zip(lines_of(ranks, "ppo"), lines_of(ranks, "ppo-two"), strict=True):
        compared = {name for name in one if name.startswith(("critic/", "policy/", "response/", "optimizer/"))}
        assert compared == {n for n in two if n.startswith(("critic/", "policy/", "response/", "optimizer/"))}
        for name in compared:
            assert abs(one[name] - two[name]) <= 1e-5 * max(1.0, abs(one[name])), (name, one[name], two[name])
