"""What of the services that give rewards cannot be meant."""

import pytest
from config_refusals import refused

from gspo_mega.config import load_config
from gspo_mega.config.validate_rewards import services_by_name, total_service_seconds
from gspo_mega.plan.watchdog_bounds import patience

QUALITY = "{name: quality, url: 'http://judge:8000/score'%s}"


def reward(*services, function="quality"):
    return "reward={functions: [{function: %s}], http: [%s]}" % (function, ", ".join(services))


def judge(**changes):
    keys = {"name": "good", "url": "'http://judge/v1'", "model": "m", "prompt": "'{response}'"} | changes
    return "reward={functions: [{function: good}], judge: [{%s}]}" % ", ".join(f"{k}: {v}" for k, v in keys.items())


def model(**changes):
    keys = {"name": "good"} | changes
    return "reward={functions: [{function: good}], model: [{%s}]}" % ", ".join(f"{k}: {v}" for k, v in keys.items())


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        (model(), "reward.model.0.url", "must begin with http:// or https://"),
        (
            model(path="m", url="http://h/"),
            "reward.model.0.url",
            "contradicts `path`, for which the run starts servers",
        ),
        (
            model(path="m", api_key_variable="K"),
            "reward.model.0.api_key_variable",
            "the run gives its own servers a key",
        ),
        (
            model(path="m", text="'{prompt}'"),
            "reward.model.0.text",
            "has no {response}, so the model would see no",
        ),
        (
            judge(regex="x", prompt="'{prompt} {responses}'"),
            "reward.judge.0.prompt",
            "has no {response}, so the judge",
        ),
        (
            judge(),
            "reward.judge.0",
            "needs one of `regex` and `json_key`, which say how the reward is read from the judge's",
        ),
        (judge(regex="x", json_key="y"), "reward.judge.0", "it has both"),
        (judge(regex="x", lowest=1, highest=1), "reward.judge.0.lowest", "is 1; must be < highest (1)"),
        (judge(regex="x", lowest=1, values="{A: 1}"), "reward.judge.0.values", "contradicts `lowest` and `highest`"),
        (reward(QUALITY % "", QUALITY % ""), "reward.http.0.name", "'quality' is listed 2 times; list it once"),
        (
            reward(QUALITY % "", function="qualty"),
            "reward.http.0.name",
            "no function is 'quality', so nothing would ask it; name it in reward.functions (`function: quality`)",
        ),
        (
            reward("{name: quality, url: judge:8000}"),
            "reward.http.0.url",
            "must begin with http:// or https:// and a host",
        ),
        (reward("{name: quality, url: 'http://[x/'}"), "reward.http.0.url", "must begin with http:// or https://"),
        (
            reward("{name: quality, url: $A-B}"),
            "reward.http.0.url",
            "must be $NAME of an environment variable, or a URL",
        ),
        (reward("{name: quality, url: 'http://me:pw@judge/'}"), "reward.http.0.url", "holds a user or a password"),
        (
            reward(QUALITY % ", api_key_variable: sk-123"),
            "reward.http.0.api_key_variable",
            "is no name of an environment variable; valid: letters, digits and `_`",
        ),
    ],
)
def test_contradictions_are_refused_by_key(write, override, key, said):
    text = refused(write(), override)
    problems = [line.partition(f": {key}: ")[2] for line in text.splitlines() if f": {key}: " in line]
    assert problems and all(problem.startswith(said) or said in problem for problem in problems)
    assert not any("pw" in problem or "sk-123" in problem for problem in problems)


def test_the_watchdog_waits_for_a_service(write):
    text = refused(write(), reward(QUALITY % ", deadline_seconds: 900"), "watchdog.rollout_seconds=600")
    assert "reward.http.0.deadline_seconds: is 900; must be < watchdog.rollout_seconds (600)" in text
    plain = load_config(write()).config
    asks = load_config(write(), [reward(QUALITY % ", deadline_seconds: 900")]).config
    assert total_service_seconds(plain.reward) == 0 and total_service_seconds(asks.reward) == 900
    before, after = patience(plain), patience(asks)
    assert before is not None and after is not None
    assert after.bounds["rollout"] == before.bounds["rollout"] + 900
    assert list(services_by_name(asks.reward)) == ["quality"]


def test_servers_of_its_own_are_for_any_number_of_nodes(write):
    loaded = load_config(write(), [model(path="m"), "cluster.num_nodes=2", "publish.verify=replicas"])
    assert loaded.config.reward.model[0].path == "m"
