"""A teacher (`teacher`): what contradicts it, what is said of it, and what follows from it."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.derived import (
    compares_within_groups,
    has_served_teacher,
    least_of_group,
    taught_tokens,
    teacher_config,
    teacher_folders,
    teachers,
)

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
        (
            ["algorithm=clip_cov"],
            "teacher: with `algorithm: clip_cov`, which chooses tokens by the advantages of rewards",
        ),
        (["teacher.path=null"], "teacher: needs one of `path`, `url`, `policy` and `by_source`, and has none of them"),
        (["teacher.url=http://h:1"], "needs one of `path`, `url`, `policy` and `by_source`, and has path and url"),
        (["teacher.api_key_variable=K"], "teacher.api_key_variable: has no effect without `url`"),
    ],
)
def test_what_contradicts_a_teacher_is_refused(write, overrides, said):
    assert said in refused(write(), TEACHER, *overrides)


URL = "teacher={url: 'http://teacher:30000'}"
SDFT = "teacher={policy: true, context: '{metadata.worked} {prompt}', max_prompt_tokens: 64}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["teacher.context=null"], "teacher.context: missing; with `policy` the teacher would be the policy itself"),
        (["teacher.context=no task"], "teacher.context: has no {prompt}, so the teacher would not see the task"),
        (["teacher.max_prompt_tokens=null"], "teacher.max_prompt_tokens: missing; `context` needs it"),
        (["teacher.policy=false", "teacher.path=there"], "teacher.context: with `path`: the ranks' packs have the"),
        (["teacher.url=http://h:1"], "and has url and policy; valid: exactly one"),
        (
            ["rollout.episode=examples.episode:run"],
            "teacher.context: with `rollout.episode: examples.episode:run`: only",
        ),
        (
            ["rollout.on_publish=continue_with_cache", "rollout.max_staleness=1"],
            "rollout.on_publish: continue_with_cache with `teacher.policy`: the cache of earlier weights would score",
        ),
        (["rollout.temperature=0.7"], "rollout.temperature: 0.7 with `teacher.url`"),
    ],
)
def test_what_contradicts_a_teacher_with_a_prompt_of_its_own_is_refused(write, overrides, said):
    assert said in refused(write(), SDFT, *overrides)


def test_the_policy_as_a_teacher_is_said_and_its_servers_have_room(write):
    loaded = load_config(write(), [SDFT])
    assert any(
        notice.startswith("teacher the policy itself, which reads teacher.context: ") for notice in loaded.notices
    )
    assert taught_tokens(loaded.config.teacher, loaded.config.rollout.max_new_tokens) == 64 + 32 and has_served_teacher(
        loaded.config.teacher
    )
    assert taught_tokens(load_config(write(), [TEACHER]).config.teacher, 64) == 0
    assert "teacher.max_prompt_tokens: has no effect without `context`" in refused(
        write(), URL, "teacher.max_prompt_tokens=64"
    )


TWO = "data={sources: [{name: math, path: a.jsonl}, {name: code, path: b.jsonl}], max_prompt_tokens: 16}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["teacher.divergence=full"],
            "teacher.divergence: full with `url` or `policy`: a server returns its most likely",
        ),
        (
            ["teacher.divergence=top_k", "teacher.top_k=4", "teacher.top_k_of=policy"],
            "teacher.top_k_of: policy with `url` or `policy`: a server returns its own most likely",
        ),
        (
            ["rollout.temperature=0.7"],
            "rollout.temperature: 0.7 with `teacher.url`: SGLang's log-probs of given tokens",
        ),
        (["rollout.top_k=20"], "rollout.top_k: 20 with `teacher.url`: a server's log-probs of given tokens are over"),
        (["teacher.url=teacher:30000"], "teacher.url: must begin with http:// or https:// and a host"),
        (["teacher.url=http://me:pw@teacher:1"], "teacher.url: holds a user or a password"),
        (["teacher.api_key_variable='my key'"], "teacher.api_key_variable: is no name of an environment variable"),
        (["algorithm=ppo"], "teacher: with `algorithm: ppo`"),
    ],
)
def test_what_a_server_cannot_tell_is_refused(write, overrides, said):
    assert said in refused(write(), URL, *overrides)


@pytest.mark.parametrize(
    ("by_source", "said"),
    [
        (
            "[{source: maths, path: A}]",
            "teacher.by_source.0.source: no source of the data is named 'maths', so nothing",
        ),
        ("[{source: math, path: A}, {source: math, path: B}]", "teacher.by_source.1.source: 'math' is listed twice"),
        ("[{source: math}]", "teacher.by_source.0: needs one of `path`, `url` and `policy`"),
        (
            "[{source: math, path: A, url: 'http://h:1'}]",
            "teacher.by_source.0: needs one of `path`, `url` and `policy`",
        ),
        ("[{source: math, url: here}]", "teacher.by_source.0.url: must begin with http://"),
        ("[{source: math, path: A, api_key_variable: K}]", "teacher.by_source.0.api_key_variable: has no effect"),
        ("[{path: A}]", "source: missing"),
    ],
)
def test_teachers_by_source_that_are_refused(write, by_source, said):
    assert said in refused(write(), TWO, f"teacher={{by_source: {by_source}}}")


def test_teachers_by_source_and_who_has_none(write):
    keys = "teacher={by_source: [{source: math, path: A}], reward_weight: 0}"
    loaded = load_config(write(), [TWO, keys, "batch.group_size=1"])
    assert any(
        "teacher.by_source: rows of code have no teacher; with reward_weight 0 nothing teaches them" in notice
        for notice in loaded.notices
    )
    assert any(notice.startswith("teacher A (rows of math): ") for notice in loaded.notices)
    both = load_config(
        write(), [TWO, "teacher={by_source: [{source: code, url: 'http://h:1'}, {source: math, path: A}]}"]
    )
    (said,) = [notice for notice in both.notices if notice.startswith("teachers ")]
    assert "http://h:1 (rows of code), A (rows of math)" in said and "a server reads each response once" in said
    assert not any("have no teacher" in notice for notice in both.notices)
    assert [(one.key, one.source) for one in teachers(both.config.teacher)] == [
        ("teacher.by_source.0", "code"),
        ("teacher.by_source.1", "math"),
    ]
    assert teacher_folders(both.config.teacher) == ("A",) and has_served_teacher(both.config.teacher)


def test_a_folder_that_teaches_two_sources_is_loaded_once(write):
    keys = "teacher={by_source: [{source: code, path: A}, {source: math, path: A}]}"
    assert teacher_folders(load_config(write(), [TWO, keys]).config.teacher) == ("A",)


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
