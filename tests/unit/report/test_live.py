"""What `gspo-mega watch` answers: only with its token, by its own name, and only what the page lacks."""

import http.client
import json
import threading
from urllib.parse import urlsplit

import pytest
from report_runs import add_held_out, add_metrics, add_trajectories, make_run

from gspo_mega.base.errors import ConfigError
from gspo_mega.cli.main import main
from gspo_mega.report.live_page import LiveReport, LiveServer


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture
def server(run):
    with LiveServer(LiveReport([run])) as started:
        thread = threading.Thread(target=started.serve_forever)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def ask(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_only_the_token_opens_it(server):
    path = urlsplit(server.url)
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    status, text, headers = ask(server, f"/?{path.query}")
    assert status == 200 and "connect-src 'self'" in text and "live.js" not in text
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    for other in ("/", "/?token=", "/?token=" + "a" * len(server.token), "/changes?after=0", "/%2e%2e/metrics.jsonl"):
        assert ask(server, other)[:2] == (
            403,
            "the token is missing or wrong: open the address that was printed\n",
        )
    assert ask(server, f"/elsewhere?{path.query}")[0] == 404


def test_another_name_for_this_address_is_refused(server):
    query = urlsplit(server.url).query
    assert ask(server, f"/?{query}", host=f"localhost:{server.port}")[0] == 200
    status, text, _ = ask(server, f"/?{query}", host=f"evil.example:{server.port}")
    assert status == 403 and "not asked by that name" in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_written(server, method):
    assert ask(server, f"/?{urlsplit(server.url).query}", method)[0] == 501


def test_changes_are_what_the_page_lacks(server, run):
    query = urlsplit(server.url).query
    stamp = server.report.stamp()
    assert ask(server, f"/changes?{query}&stamp={stamp}&after=2")[:2] == (204, "")
    add_metrics(run, 13)
    status, text, _ = ask(server, f"/changes?{query}&stamp={stamp}&after=2")
    found = json.loads(text)
    assert status == 200 and found["episodes"] is None and found["data"]["runs"][0]["steps"][-1] == 13
    assert found["data"]["live"] == {"stamp": server.report.stamp(), "after": [2]}
    add_trajectories(run, 2)
    found = json.loads(ask(server, f"/changes?{query}&stamp={found['data']['live']['stamp']}&after=2")[1])
    assert found["episodes"] and found["data"]["live"]["after"] == [3]
    add_held_out(run, 3, [True])
    found = json.loads(ask(server, f"/changes?{query}&stamp={found['data']['live']['stamp']}&after=3")[1])
    assert found["data"]["runs"][0]["answers"][0]["last_step"] == 3 and found["episodes"] is None
    status, text, _ = ask(server, f"/changes?{query}&stamp=0&after=x")
    assert status == 400 and "one whole number per run" in text
    assert ask(server, f"/changes?{query}&stamp=0&after=1,2")[0] == 400


def test_a_damaged_line_is_told_of_and_the_next_look_is_well(server, run):
    query = urlsplit(server.url).query
    metrics = run / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + "{torn\n")
    status, text, _ = ask(server, f"/changes?{query}&stamp=0&after=2")
    assert status == 503 and "metrics.jsonl:13" in text
    metrics.write_text(whole)
    assert ask(server, f"/changes?{query}&stamp=0&after=2")[0] == 200


def test_what_is_no_run_and_where_nobody_can_listen(run, tmp_path, capsys):
    with pytest.raises(ConfigError, match="is not a run folder"):
        LiveReport([tmp_path / "nothing"])
    assert main(["watch", str(run), "--address", "192.0.2.1"]) == ConfigError.exit_code
    text = capsys.readouterr().err
    assert "cannot listen on 192.0.2.1 port 0" in text and "a free port, or neither option" in text
    assert main(["watch", str(run), "--port", "70000"]) == ConfigError.exit_code
