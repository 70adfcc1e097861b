"""A sequence classifier behind SGLang's route: what is asked, which output counts, what fails alone and what together."""

import asyncio
import json

import pytest
from reward_services import service
from scoring_support import score, trajectory

from gspo_mega.config.schema import ModelReward, Reward, RewardFunction
from gspo_mega.rewards.pool import ScoringPool


def classified(answer, *episodes, **changes):
    with service(answer) as asked:
        url = asked.url.removesuffix("/score")
        one = ModelReward(**({"name": "preference", "url": url, "retries": 0} | changes))
        entry = RewardFunction(function="preference", weight=2.0, options={"mark": "!"})
        found, pool = score(Reward(functions=(entry,), model=(one,), num_workers=1), *episodes)
    return found, pool, asked


def lengths(body):
    return [{"embedding": [0.5, float(len(text))], "meta_info": {}} for text in body["text"]]


def test_what_the_model_reads_and_which_output_counts():
    text = "<{metadata.who}>{prompt}|{response}{options.mark}"
    found, _, asked = classified(lengths, *(trajectory(r, who="me") for r in ("ab", "{prompt}")), text=text, label=1)
    assert asked.paths == ["/classify"]
    assert asked.requests[0][1] == {"text": ["<me>x|ab!", "<me>x|{prompt}!"]}
    assert [episode.reward for episode in found] == [2 * 9, 2 * 15] and found[0].correct is None
    assert found[0].reward_parts == {"preference": 9}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("{}", "no list of embeddings: {}"),
        ('[{"embedding": [1.0]}]', "1 scores for 2 responses"),
    ],
)
def test_an_answer_that_is_none_fails_all(answer, said):
    found, pool, _ = classified(answer, "a", "b")
    assert all(episode.reward is None and said in str(episode.reward_error) for episode in found)
    assert pool.failure_counts["malformed"] == 2


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ('{"embedding": [NaN]}', "not_finite", "the score is nan"),
        ('{"embedding": [null]}', "wrong_type", "the score is None"),
        ('{"embedding": []}', "malformed", "no embedding with output 0 (`label`)"),
        ('{"score": 1}', "malformed", "no embedding with output 0 (`label`): {'score': 1}"),
    ],
)
def test_a_score_that_is_none_fails_its_response_alone(entry, kind, said):
    found, pool, _ = classified('[%s, {"embedding": [0.5]}]' % entry, "a", "b")
    assert found[0].reward is None and said in str(found[0].reward_error)
    assert found[1].reward == 1.0 and pool.failure_counts[kind] == 1


def test_a_response_that_the_server_refuses_fails_alone():
    def answer(body):
        return (400, {}, "too long") if any("long" in text for text in body["text"]) else lengths(body)

    found, pool, asked = classified(answer, "a", "long", "c", label=1)
    assert [episode.reward for episode in found] == [4, None, 4]
    assert "status 400: too long" in str(found[1].reward_error) and pool.failure_counts["status"] == 1
    assert [len(body["text"]) for _, body in asked.requests] == [3, 1, 1, 1]


def test_a_row_without_the_key_of_the_text_fails_alone():
    episodes = trajectory("a", who="me"), trajectory("b")
    found, pool, asked = classified(lengths, *episodes, text="{metadata.who}{response}")
    assert found[0].reward == 1.0 and "there is no metadata.who to fill in" in str(found[1].reward_error)
    assert pool.failure_counts["exception"] == 1 and len(asked.requests) == 1


def test_a_server_that_is_down_fails_all_at_once():
    found, pool, asked = classified((500, {}, json.dumps({"error": "no"})), "a", "b", batch_size=1)
    assert pool.failure_counts["status"] == 2 and len(asked.requests) == 2
    assert all(episode.reward is None for episode in found)


class Own:
    """Servers of the run's own, as the client asks for them; none is ready the first `late` times."""

    patience_seconds = 60.0

    def __init__(self, *addresses, late=0):
        self.addresses, self.late = list(addresses), late

    def ready(self):
        self.late -= 1
        return ([], "") if self.late >= 0 else (self.addresses, "own-key")


def scored_by(own, *responses):
    one = ModelReward(name="preference", path="/models/preference", retries=0, batch_size=1, concurrency=1)
    reward = Reward(functions=(RewardFunction(function="preference"),), model=(one,), num_workers=1)

    async def run():
        episodes = [trajectory(response) for response in responses]
        async with ScoringPool(reward, None, lambda name: own) as pool:
            for episode in episodes:
                await pool.score(episode)
        return episodes, pool

    return asyncio.run(run())


def test_own_servers_are_waited_for_and_asked_in_turn():
    with service(lengths) as first, service(lengths) as second:
        own = Own(first.url.removesuffix("/score"), second.url.removesuffix("/score"), late=2)
        found, _ = scored_by(own, "a", "b", "c", "d")
    assert [episode.reward for episode in found] == [0.5] * 4
    assert len(first.requests) == len(second.requests) == 2
    assert first.requests[0][0]["Authorization"] == "Bearer own-key"


def test_own_servers_that_are_never_ready_are_a_failure():
    own = Own()
    own.patience_seconds = 0.0
    [found], pool = scored_by(own, "a")
    assert "preference: no server of preference was ready for 0 s" in str(found.reward_error)
    assert pool.failure_counts["connection"] == 1


def test_an_own_server_that_is_started_again_fails_no_response():
    with service("hang up", "hang up", "hang up", lengths) as asked:
        [found], pool = scored_by(Own(asked.url.removesuffix("/score")), "a")
    assert found.reward == 0.5 and len(asked.requests) == 4 and sum(pool.failure_counts.values()) == 0
