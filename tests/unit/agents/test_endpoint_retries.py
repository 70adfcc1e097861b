"""The same request again: after a broken connection, after a client's own deadline, after the agent began again."""

import http.client
import threading
import time
import urllib.parse

import pytest
from endpoint_support import Served, client_of, post_body, raw, wait_until

from gspo_mega.agents.protocol import ContextFull, TooManyTurns

ASK = [{"role": "user", "content": "two and three?"}]


@pytest.fixture(scope="module")
def served():
    made = Served()
    yield made
    made.close()


def broken_off(served, session, visit, body):
    """Send a request and break the connection off while the turn waits at the gate."""
    place = urllib.parse.urlsplit(visit.base_url)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    before = len(session.asked)
    connection.request("POST", f"{place.path}/chat/completions", body, {"Authorization": f"Bearer {visit.api_key}"})
    wait_until(lambda: len(session.asked) > before)
    connection.close()


def test_a_turn_whose_client_has_gone_is_sampled_to_its_end(served):
    with served.visit(["one"]) as (session, visit):
        session.gate.clear()
        broken_off(served, session, visit, post_body())
        served.set(session)
    assert session.finished == [0]
    assert visit.counts["num_endpoint_unheard"] == 1


def test_the_same_request_after_a_broken_connection_joins_its_turn(served):
    """Without any header: the endpoint saw that nobody had heard the first answer."""
    with served.visit(["one", "two"]) as (session, visit):
        session.gate.clear()
        broken_off(served, session, visit, post_body())
        time.sleep(0.2)  # the loop sees the end of the connection
        answers = []
        second = threading.Thread(target=lambda: answers.append(raw(visit, post_body())))
        second.start()
        wait_until(lambda: visit.counts["num_endpoint_retries"] == 1)
        served.set(session)
        second.join()
        assert answers[0][2]["choices"][0]["message"]["content"] == "one"
    assert len(session.asked) == 1
    assert visit.counts["num_endpoint_unheard"] == 0


def test_openais_client_that_gives_up_waiting_gets_the_turn_that_it_asked_for(served):
    with served.visit(["one", "two"]) as (session, visit):
        session.gate.clear()
        client = client_of(visit, timeout=0.3).with_options(max_retries=5)

        def open_the_gate():  # not after a fixed time: the client may take long to send its first request
            wait_until(lambda: visit.counts["num_endpoint_retries"] >= 1)
            served.set(session)

        opening = threading.Thread(target=open_the_gate)
        opening.start()
        answer = client.chat.completions.create(model="policy", messages=ASK)
        opening.join()
    assert answer.choices[0].message.content == "one"
    assert len(session.asked) == 1
    assert visit.counts["num_endpoint_retries"] >= 1


def test_an_equal_request_is_another_sample_and_a_marked_one_is_not(served):
    with served.visit(["one", "two", "three"]) as (session, visit):
        texts = [
            raw(visit, post_body(), headers)[2]["choices"][0]["message"]["content"]
            for headers in (
                {},
                {},
                {"x-stainless-retry-count": "1"},
                {"Idempotency-Key": "k"},
                {"Idempotency-Key": "k"},
            )
        ]
        assert texts == ["one", "two", "two", "three", "three"]
        status, _, body = raw(visit, post_body(max_tokens=3), {"Idempotency-Key": "k"})
        assert (status, body["error"]["code"]) == (400, "idempotency_key")
    assert len(session.asked) == 3


def test_after_a_restart_of_the_agent_its_requests_are_the_sessions_to_answer(served):
    """The session answers from its record, in order; the endpoint does not match them with those before."""
    with served.visit(["one", "one"]) as (session, visit):
        raw(visit, post_body())
        session.num_restarts = 1
        assert raw(visit, post_body(), {"x-stainless-retry-count": "1"})[0] == 200
    assert len(session.asked) == 2


def test_a_turn_keeps_no_copy_of_the_history_that_it_was_asked_with(served):
    """Each request holds the whole history: kept for every turn, an episode of n turns would hold n of them."""
    with served.visit(["one"]) as (_, visit):
        raw(visit, post_body())
        (call,) = visit._calls
        assert call.answer.done() and "two and three?" not in repr(vars(call))


def test_refused_turns_are_neither_unheard_nor_kept(served):
    """An agent that goes on asking once it has had its turns would fill the memory of the run."""
    refusals = [TooManyTurns("8 turns")] * 20
    with served.visit(["one", ContextFull("full"), *refusals]) as (_, visit):
        statuses = [raw(visit, post_body(max_tokens=1 + n))[0] for n in range(2 + len(refusals))]
        assert statuses == [200] + [400] * (1 + len(refusals))
        assert len(visit._calls) == 2
    assert visit.counts["num_endpoint_unheard"] == 0
    assert visit.counts["num_endpoint_errors"] == 1 + len(refusals)
