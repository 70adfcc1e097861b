"""A language model as a judge: what it is told, what its answer says, and that a silent judge is no 0."""

import json

import pytest
from reward_services import service
from scoring_support import score, trajectory

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import JudgeReward, Reward, RewardFunction
from gspo_mega.rewards.pool import check_reward
from gspo_mega.rewards.services import number_in

NUMBER = r"Score:\s*(?P<reward>\S+)"


def judge(**changes):
    return JudgeReward(
        **({"name": "helpful", "url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{response}"} | changes)
    )


def says(text, end="stop"):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": end}]})


def judged(answer, *episodes, **changes):
    with service(answer) as asked:
        entry = RewardFunction(function="helpful", weight=0.5, options={"scale": "0 to 10"})
        one = judge(url=asked.url.replace("/score", "/v1"), retries=0, **({"regex": NUMBER} | changes))
        found, pool = score(Reward(functions=(entry,), judge=(one,), num_workers=1), *episodes or ("abc",))
    return found, pool, asked


def test_what_the_judge_is_told():
    prompt = '{"a": 1} {prompt} [{response}] {answer} {metadata.topic} {options.scale} {num_response_tokens} {other}'
    episode = trajectory("{answer} and {x}", answer=[1, "é"], topic="maths")
    [found], _, asked = judged(
        says("fine\nScore: 3\nScore: 7"),
        episode,
        prompt=prompt,
        system_prompt="Judge {metadata.topic}.",
        max_tokens=9,
        body={"seed": 1, "temperature": 0.5},
    )
    assert found.reward == 3.5 and found.reward_parts == {"helpful": 7} and found.correct is None
    [(_, body)] = asked.requests
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Judge maths."},
            {"role": "user", "content": '{"a": 1} x [{answer} and {x}] [1, "é"] maths 0 to 10 1 {other}'},
        ],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 1,
    }
    assert asked.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says("I like it"), "the judge's answer has nothing that `regex` finds: 'I like it'"),
        (says("Score: ten"), "says 'ten', which is no number"),
        (says("Score: nan"), "says 'nan', which is no number"),
        (says("Score: 11"), "says 11, which is not in 0 to 10"),
        (says("Let me think", "length"), "the judge's answer (it ends at max_tokens, 512) has nothing"),
        (says(None), "no choices with a message"),
        ('{"choices": []}', "no choices with a message"),
        ("[]", "no choices with a message"),
        ('{"error": "no such model"}', "no choices with a message: {'error': 'no such model'}"),
    ],
)
def test_an_answer_that_says_no_reward_is_a_failure(answer, said):
    [found], pool, _ = judged(answer, lowest=0, highest=10)
    assert found.reward is None and found.correct is None and said in str(found.reward_error)
    assert pool.failure_counts == dict.fromkeys(pool.failure_counts, 0) | {"malformed": 1}


def test_each_response_is_judged_alone():
    def answers(body):
        text = body["messages"][0]["content"]
        return json.loads(says("Score: 1" if text == "good" else "hm"))

    found, _, asked = judged(answers, "good", "bad", "good")
    assert [episode.reward for episode in found] == [0.5, None, 0.5] and len(asked.requests) == 3


def test_a_row_without_the_key_of_the_prompt_is_a_failure():
    [found], _, asked = judged(says("Score: 1"), prompt="{response} {metadata.topic}")
    assert "helpful: there is no metadata.topic to fill in" in str(found.reward_error)
    assert asked.requests == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"score": 0.25}', 0.25),
        ('{"score": "3"}', 3),
        ('Well:\n```json\n{"score": 2}\n```\nand so\n```\n{"score": 4, "why": "```"}', 2),
        ('```json\n{"score": 1}\n```\n```json\n{"score": 5}\n```', 5),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"points": 3}', None),
        ("[1]", None),
        ("```", None),
        ("[" * 60_000, None),
        ('{"score": 1e400}', None),
    ],
)
def test_a_key_of_json(text, found):
    if found is None:
        with pytest.raises(ValueError, match="is no JSON object with 'score'|which is no number"):
            number_in(text, judge(json_key="score"))
    else:
        assert number_in(text, judge(json_key="score")) == found


def test_words_that_stand_for_numbers():
    words = judge(regex="^(?P<reward>[A-Z]+)", values={"GOOD": 1.0, "BAD": -1.0})
    assert number_in("GOOD one", words) == 1 and number_in("BAD", words) == -1
    with pytest.raises(ValueError, match="says 'UGLY', which is none of `values`: GOOD, BAD"):
        number_in("UGLY", words)
    assert number_in('{"v": "GOOD"}', judge(json_key="v", values={"GOOD": 1.0})) == 1


@pytest.mark.parametrize(
    ("regex", "said"),
    [("(?=x)", "'(?=x)' is no pattern of RE2"), ("Score: (.*)", "regex: 'Score: (.*)' has no group (?P<reward>...)")],
)
def test_patterns_are_read_before_the_run(regex, said):
    one = judge(regex=regex)
    with pytest.raises(RewardError) as caught:
        check_reward(Reward(functions=(RewardFunction(function="helpful"),), judge=(one,)))
    assert said in str(caught.value) and "reward 'helpful'" in str(caught.value)
