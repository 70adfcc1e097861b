"""A teacher (`teacher`): what contradicts it, what is said of it, and what follows from it."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.derived import compares_within_groups, least_of_group, teacher_config

TEACHER = "teacher={path: there}"
ALONE = "teacher={path: there, reward_weight: 0}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm=ppo"], "teacher: with `algorithm: ppo`: advantages from a critic's values and from a teacher"),
        (["algorithm=gmpo"], "teacher: with `algorithm: gmpo`, whose term of a whole sequence takes no advantage"),
        (["algorithm=vespo"], "teacher: with `algorithm: vespo`"),
        (
            ["algorithm=custom", "objective={ratio: sequence, function: 'examples.hooks:sspo'}"],
            "teacher: with `objective.function` of whole sequences, which takes no advantage of a token",
        ),
        (["old_log_probs=rollout"], "old_log_probs: rollout with `teacher`: the servers' log-probs differ from"),
        (["rollout.filter_constant_groups=true"], "true with `teacher`, which teaches on groups whose rewards are all"),
        (["precision=fp8", "fp8.recipe=delayed"], "fp8.recipe: delayed with a teacher: the scales of the frozen"),
        (["teacher.coefficient=0"], "teacher.coefficient"),
        (["teacher.divergence=top_k"], "teacher.top_k: missing; `divergence: top_k` needs it"),
        (["teacher.top_k=4"], "teacher.top_k: has no effect with `divergence: sampled_token`"),
        (["teacher.top_k_of=policy"], "teacher.top_k_of: has no effect with `divergence: sampled_token`"),
        (["teacher.divergence=full", "rollout.top_p=0.9"], "teacher.divergence: full with rollout.top_p 0.9"),
        (["batch.group_size=1"], "batch.group_size: 1 with `algorithm: gspo`"),
    ],
)
def test_what_contradicts_a_teacher_is_refused(write, overrides, said):
    assert said in refused(write(), TEACHER, *overrides)


def test_a_teacher_alone_needs_no_group(write):
    config = load_config(write(), [ALONE, "batch.group_size=1"]).config
    assert not compares_within_groups(config) and least_of_group(config) == 1
    assert least_of_group(load_config(write(), [TEACHER]).config) == 2
    said = refused(write(), ALONE, "batch.group_size=1", "advantage={baseline: leave_one_out, divide_by_std: false}")
    assert "batch.group_size: 1 with `advantage.baseline: leave_one_out`" in said


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("gspo", "is added to the objective as the term of GSPO-token"),
        ("gspo_token", "is added to each token's advantage"),
        ("grpo", "is added to each token's advantage"),
    ],
)
def test_which_way_the_teacher_takes_is_said(write, algorithm, said):
    notices = load_config(write(), [ALONE, f"algorithm={algorithm}"]).notices
    assert any(said in notice for notice in notices)
    assert any("rewards are measured and not trained on" in notice for notice in notices)


def test_whole_distributions_go_with_every_term_and_say_what_is_compared(write):
    for algorithm in ("gmpo", "vespo", "gspo"):
        load_config(write(), [TEACHER, f"algorithm={algorithm}", "teacher.divergence=full"])
    own = ["algorithm=custom", "objective={ratio: sequence, function: 'examples.hooks:sspo'}"]
    load_config(write(), [TEACHER, *own, "teacher.divergence=full"])
    full = load_config(write(), [TEACHER, "teacher.divergence=full"]).notices
    top = load_config(write(), ["teacher={path: there, divergence: top_k, top_k: 20, top_k_of: policy}"]).notices
    assert any("KL(policy || teacher) over the whole vocabulary is added to the loss" in notice for notice in full)
    assert any("over the policy's 20 most likely tokens, the others as one is added" in notice for notice in top)


def test_what_only_training_needs_is_not_the_teachers(write):
    config = load_config(
        write(), [TEACHER, "parallel={expert: 2, expert_dispatcher: allgather}", "lora={rank: 4, alpha: 8}"]
    ).config
    dense, experts = teacher_config(config, False), teacher_config(config, True)
    assert (dense.parallel.expert, dense.parallel.expert_dispatcher, dense.lora) == (1, "alltoall", None)
    assert (experts.parallel.expert, experts.parallel.expert_dispatcher) == (2, "allgather")
