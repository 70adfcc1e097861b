"""The link to the servers on one rank: what follows a publish that fails, in part or on all servers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import FolderError, PublishError
from gspo_mega.config.schema import Rollout
from gspo_mega.sync.publish import PublishResult
from gspo_mega.train import servers as server_link
from gspo_mega.train.context import StopRequested
from gspo_mega.train.phases import Phases
from gspo_mega.train.servers import LiveServers, NoServers, OwnGpus, Pause


class Pool:
    def __init__(self):
        self.up, self.behind, self.committed, self.num_given_up = [("a", 1)], [], [], 0
        self.held = []

    def wait_ready(self, num_servers, deadline_seconds, on_wait=lambda: None):
        on_wait()

    def controls(self):
        return [SimpleNamespace(server_id=name, generation=generation) for name, generation in self.up]

    def servers_behind(self):
        return self.behind

    def ready_servers(self):
        return []  # so no request is open

    def hold(self, holds):
        self.held.append(holds)

    def commit(self, weight_version, verified):
        self.committed.append((weight_version, list(verified)))


class Publisher:
    """`outcomes`: of each publish, an error to raise, the servers that failed, or why all was sent."""

    def __init__(self, pool, outcomes):
        self.pool, self.outcomes, self.versions = pool, list(outcomes), []

    def check_servers(self, software_dir):
        pass

    def publish(self, weight_version, servers, announce=None, keeps_cache=False):
        self.versions.append(weight_version)
        outcome = self.outcomes.pop(0) if self.outcomes else {}
        if isinstance(outcome, Exception):
            self.pool.up = [("a", 2)]  # it died meanwhile, and is started again
            raise outcome
        verified = tuple((s.server_id, s.generation) for s in servers)
        failed, fallback = (outcome, None) if isinstance(outcome, dict) else ({}, outcome)
        return PublishResult(weight_version, None, verified, failed, 0, {}, 0.0, {}, fallback=fallback)

    publish_again = publish


@pytest.fixture
def link(monkeypatch):
    monkeypatch.setattr(server_link, "DEATH_NOTICE_SECONDS", 0.1)

    def make(*outcomes, check_stop=lambda: None):
        pool, said, requests = Pool(), [], []
        lead = SimpleNamespace(
            rollouts=SimpleNamespace(pool=pool),
            attempt=SimpleNamespace(software_dir=None),
            console=said.append,
            check_newest_attempt=lambda: None,
            check_stop=check_stop,
            stop_request=SimpleNamespace(check=lambda: None),
        )
        ranks = SimpleNamespace(agree=lambda value: value, request=requests.append, on_request=lambda name, act: None)
        publisher = Publisher(pool, outcomes)
        server = SimpleNamespace(num_servers=1, start_deadline_seconds=1.0, max_restarts=0)
        rollout = Rollout(max_new_tokens=8, no_server_deadline_seconds=1.0)
        made = LiveServers(server, rollout, publisher, ranks, lead, Phases(), OwnGpus())
        return SimpleNamespace(link=made, pool=pool, said=said, requests=requests, publisher=publisher, lead=lead)

    return make


def test_a_publish_commits_and_names_who_failed(link):
    one = link({"b": "it hung"})
    one.link.publish(3)
    assert one.pool.committed == [(3, [("a", 1)])]
    assert one.said == ["warning  b does not hold weight version 3 and gets no work until it does: it hung"]
    assert one.pool.held == [True, False], "no request begins while weights change"


def test_changes_that_no_server_took_are_named(link):
    one = link("a: the change is damaged")
    one.link.publish(3)
    assert one.pool.committed == [(3, [("a", 1)])]
    assert one.said == [
        "warning  weight version 3 was published in full, because no server took what changed (publish.full_every):"
        " a: the change is damaged"
    ]


def test_all_servers_that_died_meanwhile_are_waited_for(link):
    one = link(PublishError("no server holds it"))
    one.link.publish(3)
    assert one.publisher.versions == [3, 3] and one.pool.committed == [(3, [("a", 2)])]
    assert "published again as soon as a server is back" in one.said[0]


def test_a_publish_that_fails_on_a_living_server_ends_the_run(link, monkeypatch):
    one = link(PublishError("refused"))
    monkeypatch.setattr(one.pool, "controls", lambda: [SimpleNamespace(server_id="a", generation=1)])
    with pytest.raises(PublishError, match="refused"):
        one.link.publish(3)


def test_a_server_that_came_back_is_given_the_committed_version_and_rests_when_it_fails(link):
    one = link({}, {"b": "again"}, {})
    one.link.publish(3)
    one.link.catch_up()
    assert one.publisher.versions == [3] and one.requests == [], "no server is behind"
    one.pool.behind = [SimpleNamespace(server_id="b", generation=1)]
    one.link.catch_up()
    assert one.publisher.versions == [3, 3] and one.requests == ["publish_again"]
    one.link.catch_up()
    assert one.publisher.versions == [3, 3], "it is tried again only after a pause"


def test_a_publish_tells_what_it_waited_for_and_waits_no_longer_once_a_stop_is_asked_for(link, monkeypatch):
    one, heard = link(), []

    @contextlib.contextmanager
    def paused(pool, mode, on_wait):
        heard.append(on_wait())
        one.lead.stop_request.check = lambda: "SIGTERM"
        heard.append(on_wait())
        yield Pause(7, 2.5)

    monkeypatch.setattr(server_link, "paused", paused)
    one.link.publish(3)
    assert heard == [False, True]
    assert one.pool.committed == [(3, [("a", 1)])], "the step's weights are published, and checkpointed behind it"
    found = one.link.metrics()
    assert (found["publish/num_open_requests"], found["publish/pause_seconds"]) == (7, 2.5)


def test_a_stop_while_servers_start_is_a_reason_not_an_error(link):
    def stop():
        raise StopRequested("enough")

    assert link(check_stop=stop).link.wait() == "enough"
    assert link().link.wait() is None


def test_a_run_without_servers_still_respects_who_holds_its_folder():
    def taken():
        raise FolderError("taken over")

    assert NoServers(None).publish(1) is None and NoServers(None).wait() is None and NoServers(None).metrics() == {}
    with pytest.raises(FolderError):
        NoServers(SimpleNamespace(check_newest_attempt=taken)).publish(1)


def test_the_other_ranks_enter_the_publish_after_open_requests_have_ended(monkeypatch):
    """Long responses may take longer than a collective lets its ranks wait."""
    pool, acts = Pool(), []

    @contextlib.contextmanager
    def paused(pool, mode, on_wait):
        acts.append("paused")
        yield Pause()

    monkeypatch.setattr(server_link, "paused", paused)
    monkeypatch.setattr(server_link, "on_publish", lambda rollout: "wait")
    ranks = SimpleNamespace(agree=lambda value: acts.append("agree"), on_request=lambda name, act: None)
    publisher = Publisher(pool, [])
    monkeypatch.setattr(Publisher, "publish", lambda self, *a: acts.append("publish") or PublishResult(3, *[None] * 7))
    lead = SimpleNamespace(rollouts=SimpleNamespace(pool=pool), check_newest_attempt=lambda: None)
    rollout = SimpleNamespace(no_server_deadline_seconds=1.0)
    for one in (lead, None):
        link = LiveServers(None, rollout, publisher, ranks, one, Phases(), OwnGpus())
        monkeypatch.setattr(link, "_commit", lambda result: None)
        link.publish(3)
    assert acts == ["paused", "agree", "publish", "agree", "publish"]
