"""Rewards from an endpoint: what is sent, how it adds up with functions, and that a failure is never a 0."""

import asyncio
import json

import pytest
from reward_services import score_all, service
from scoring_support import score, trajectory

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import HttpReward, Reward, RewardFunction
from gspo_mega.rewards.pool import ScoringPool, check_reward


def reward_of(asked, *functions, **changes):
    entries = functions or (RewardFunction(function="quality"),)
    http = HttpReward(name="quality", **({"url": asked.url, "retries": 0} | changes))
    return Reward(functions=entries, http=(http,), num_workers=1)


def test_the_format_of_a_request_and_of_its_answer():
    with service(lambda body: {"rewards": [{"reward": 0.5, "correct": True, "fluency": 0.25}]}) as asked:
        entry = RewardFunction(function="quality", weight=2.0, options={"style": "brief"})
        [found], pool = score(reward_of(asked, entry), trajectory("abc", answer=[7], level=3))
    assert found.reward == 1.0 and found.correct is True
    assert found.reward_parts == {"quality": 0.5, "quality/fluency": 0.25}
    [(headers, body)] = asked.requests
    assert headers["Content-Type"] == "application/json" and "Authorization" not in headers
    one = {"prompt": "x", "response": "abc", "answer": [7], "metadata": {"level": 3}, "num_response_tokens": 1}
    assert body == {"responses": [one | {"options": {"style": "brief"}}]}
    assert sum(pool.failure_counts.values()) == 0


def test_it_is_weighed_and_gated_beside_functions():
    right = RewardFunction(function="exact_match", name="right")
    asks = RewardFunction(function="quality", name="long", weight=0.5, only_if=("right",))
    after = RewardFunction(function="exact_match", name="again", only_if=("long >= 2",))
    with service() as asked:
        found, _ = score(reward_of(asked, right, asks, after), *(trajectory(r, answer="aa") for r in ("aa", "b")))
    assert [episode.reward for episode in found] == [1 + 1 + 1, 0]
    assert found[1].reward_parts == {"right": 0, "long/counted": 0, "again/counted": 0}
    assert len(asked.requests) == 1
    assert [episode.correct for episode in found] == [True, False]


def test_responses_that_wait_share_a_request_and_no_more_are_open_than_allowed():
    responses = ["a" * n for n in range(1, 41)]
    with service() as asked:
        found, _ = score(reward_of(asked, batch_size=4, concurrency=2), *responses)
    assert [episode.reward for episode in found] == list(range(1, 41))
    sizes = [len(body["responses"]) for _, body in asked.requests]
    assert sum(sizes) == 40 and max(sizes) == 4 and asked.busiest <= 2


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((500, {}, "out of order"), "status", "status 500: out of order"),
        ((403, {}, ""), "status", "status 403: nothing"),
        ((302, {"Location": "http://127.0.0.1:9/"}, ""), "status", "status 302"),
        ("hang up", "connection", "Server disconnected"),
        ("stall", "deadline", "no answer within 0.2 s"),
        ("<html>hello", "malformed", "no JSON: <html>hello"),
        ("[" * 100_000, "malformed", "no JSON: [[["),
        ("[1.0, 1.0]", "malformed", "no object with a list `rewards`: [1.0, 1.0]"),
        ('{"rewards": 1.0}', "malformed", "no object with a list `rewards`"),
        ('{"rewards": [1.0]}', "malformed", "1 rewards for 2 responses"),
        ('{"rewards": [1, 1, 1]}', "malformed", "3 rewards for 2 responses"),
        ('{"rewards": [0.5, ' + "1" * 20_000_000 + "]}", "malformed", "an answer of more than"),
    ],
)
def test_a_request_that_fails_fails_all_its_responses(answer, kind, said):
    deadline = 0.2 if answer == "stall" else 60.0
    with service(answer) as asked:
        found, pool = score(reward_of(asked, deadline_seconds=deadline), "a", "b")
        host = asked.url.split("/")[2]
    for episode in found:
        assert episode.reward is None and episode.correct is None and episode.reward_parts == {}
        assert str(episode.reward_error).startswith("quality: ") and said in str(episode.reward_error)
        assert host in str(episode.reward_error) or kind == "malformed"
    assert pool.failure_counts == dict.fromkeys(pool.failure_counts, 0) | {kind: 2}
    assert len(asked.requests) == 1


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ("NaN", "not_finite", "the result is nan"),
        ("1e999", "not_finite", "the result is inf"),
        ('"1.0"', "wrong_type", "'1.0' (str); a number was expected"),
        ("null", "wrong_type", "None"),
        ('{"score": 1}', "wrong_type", "a dictionary without 'reward'"),
        ('{"error": "no such language"}', "exception", "the service says: no such language"),
    ],
)
def test_one_entry_that_is_no_reward_fails_its_response_alone(entry, kind, said):
    with service('{"rewards": [%s, 0.5]}' % entry) as asked:
        found, pool = score(reward_of(asked), "a", "b")
    assert found[0].reward is None and said in str(found[0].reward_error)
    assert found[1].reward == 0.5 and found[1].reward_error is None
    assert pool.failure_counts == dict.fromkeys(pool.failure_counts, 0) | {kind: 1}


def test_what_may_pass_is_tried_again():
    with service((503, {"Retry-After": "0"}, "busy"), "hang up", score_all) as asked:
        [found], _ = score(reward_of(asked, retries=2), "abc")
    assert found.reward == 3 and len(asked.requests) == 3
    with service((503, {}, "busy"), (400, {}, "what?")) as asked:
        [found], _ = score(reward_of(asked, retries=5), "abc")
    assert "status 400: what?" in str(found.reward_error) and len(asked.requests) == 2


def test_retries_have_a_budget():
    with service((500, {}, "")) as asked:
        reward = reward_of(asked, retries=1, batch_size=1, concurrency=64)
        found, pool = score(reward, *("a" for _ in range(40)))
    assert pool.failure_counts["status"] == 40 and all(episode.reward is None for episode in found)
    assert 40 < len(asked.requests) <= 40 + 10 + 40 // 5


def test_a_source_may_have_it_as_its_own_reward():
    with service() as asked:
        function = RewardFunction(function="exact_match")
        http = (HttpReward(name="quality", url=asked.url),)
        reward = Reward(functions=(function,), http=http, num_workers=1)
        found, _ = score(
            reward,
            trajectory("abc", source="poems"),
            trajectory("abc", answer="abc"),
            source_rewards={"poems": (RewardFunction(function="quality"),)},
        )
    assert [episode.reward for episode in found] == [3, 1]


def test_the_key_comes_from_the_environment_and_is_in_no_failure(monkeypatch):
    monkeypatch.setenv("QUALITY_KEY", "sk-very-secret")
    with service((401, {}, 'no such key: "Bearer sk-very-secret"')) as asked:
        monkeypatch.setenv("QUALITY_URL", asked.url)
        [found], _ = score(reward_of(asked, url="$QUALITY_URL", api_key_variable="QUALITY_KEY"), "abc")
    assert asked.requests[0][0]["Authorization"] == "Bearer sk-very-secret"
    assert 'no such key: "Bearer ***"' in str(found.reward_error) and "secret" not in str(found.reward_error)


def test_a_closed_pool_waits_for_no_service():
    async def run(reward):
        pool = ScoringPool(reward)
        await pool.start()
        waiting = [asyncio.ensure_future(pool.score(trajectory("abc"))) for _ in range(3)]
        while not asked.requests:
            await asyncio.sleep(0.01)
        await pool.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    with service("stall") as asked:
        errors = asyncio.run(run(reward_of(asked, batch_size=1, concurrency=1, deadline_seconds=600.0)))
    assert [str(error) for error in errors] == ["the scoring pool is closed"] * 3


@pytest.mark.parametrize(
    ("changes", "environment", "said"),
    [
        ({"api_key_variable": "NO_KEY"}, {}, "the environment variable NO_KEY (api_key_variable) is not set"),
        ({"api_key_variable": "NO_KEY"}, {"NO_KEY": " \n"}, "NO_KEY (api_key_variable) is not set"),
        ({"api_key_variable": "NO_KEY"}, {"NO_KEY": "two\nlines"}, "NO_KEY holds no key"),
        ({"url": "$NO_URL"}, {}, "the environment variable NO_URL (url) is not set"),
        ({"url": "$NO_URL"}, {"NO_URL": "judge:8000"}, "the environment variable NO_URL (url) holds no address"),
    ],
)
def test_what_is_missing_is_said_before_the_run(changes, environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    http = HttpReward(**({"name": "quality", "url": "http://127.0.0.1:9/"} | changes))
    with pytest.raises(RewardError) as caught:
        check_reward(Reward(functions=(RewardFunction(function="quality"),), http=(http,)))
    assert said in str(caught.value) and "reward 'quality'" in str(caught.value)
    assert not any(value.strip() and value in str(caught.value) for value in environment.values())


def test_a_service_may_not_have_the_name_of_a_built_in():
    http = HttpReward(name="math", url="http://127.0.0.1:9/")
    with pytest.raises(RewardError, match="reward 'math' is a built-in; give the service of that name another one"):
        check_reward(Reward(functions=(RewardFunction(function="math"),), http=(http,)))


def test_what_is_sent_is_json():
    with service() as asked:
        score(reward_of(asked), trajectory("\ud800 é\n", answer=None))
    assert json.loads(json.dumps(asked.requests[0][1]))["responses"][0]["response"] == "\ud800 é\n"


@pytest.mark.parametrize("where", ["outside", "here"])
def test_a_service_outside_is_asked_through_the_proxy_and_one_here_is_not(monkeypatch, where):
    with service() as asked:
        monkeypatch.setenv("http_proxy", asked.url if where == "outside" else "http://127.0.0.1:9")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        url = "http://judge.example/score" if where == "outside" else asked.url
        [found], _ = score(reward_of(asked, url=url), "abc")
    assert found.reward == 3
    assert asked.paths == ["http://judge.example/score" if where == "outside" else asked.paths[0]]
