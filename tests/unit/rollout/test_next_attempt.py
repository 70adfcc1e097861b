"""A server goes on into the next attempt: the orders it reads, what it lets SGLang forget, and what it says."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo_mega.base.errors import RolloutError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, read_json
from gspo_mega.config import load_config
from gspo_mega.rollout.registration import read_registrations
from gspo_mega.rollout.server import supervise
from gspo_mega.rollout.server.next_attempt import Order, Orders, differs, forget

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"
END, DESTROY, VERSION = "/end_weight_update", "/destroy_weights_update_group", "/update_weight_version"
ABORT, CONTINUE, FLUSH = "/abort_request", "/continue_generation", "/flush_cache"


@pytest.fixture
def sglang(tmp_path):
    """Stands in for a server: `posted` has (path, body) of each call with its key, `status` the answers by path, of
    which None is one that does not come."""
    (key := tmp_path / "key").write_text("secret")
    key.chmod(0o600)
    state = SimpleNamespace(posted=[], status={}, key=key, released=threading.Event())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.headers["Authorization"] == "Bearer secret"
            state.posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            statuses = state.status.get(self.path, [200])
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            if status is None:
                state.released.wait(60.0)
            else:
                self.send_response(status)
                self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    state.address = f"http://127.0.0.1:{server.server_port}"
    yield state
    state.released.set()
    server.shutdown()
    server.server_close()


def test_all_that_ranks_left_in_a_server_is_undone_and_the_cache_last(sglang):
    # No update is under way, the second group is not known, and a request ends a little later.
    sglang.status = {END: [400], DESTROY: [200, 400], FLUSH: [400, 400, 200]}
    forget(sglang.address, sglang.key, ["weights-1", "weights-2"], is_published_to=True)
    abort = (ABORT, {"rid": "", "abort_all": True})
    assert sglang.posted == [
        abort,
        (END, {}),
        (DESTROY, {"group_name": "weights-1"}),
        (DESTROY, {"group_name": "weights-2"}),
        (VERSION, {"new_version": "unpublished", "abort_all_requests": False}),
        (CONTINUE, {}),
        *[(FLUSH, {}), abort] * 2,
        (FLUSH, {}),
    ]


def test_the_weights_of_a_reward_models_server_stay_as_they_are(sglang):
    forget(sglang.address, sglang.key, [], is_published_to=False)
    assert [path for path, _ in sglang.posted] == [ABORT, FLUSH]


@pytest.mark.parametrize("path", [ABORT, END, CONTINUE, FLUSH])
def test_a_server_that_hangs_is_given_up_within_the_bound(sglang, path):
    sglang.status = {path: [None]}
    began = time.monotonic()
    with pytest.raises(RolloutError, match=f"its SGLang does not answer {path} within 1 s"):
        forget(sglang.address, sglang.key, [], is_published_to=True, seconds=1.0)
    assert time.monotonic() - began < 30.0, "the server hangs for longer"


@pytest.mark.parametrize("flushes", [[400], [400, None]], ids=["they go on", "the last answer is slow"])
def test_a_server_whose_requests_do_not_end_is_given_up(sglang, flushes):
    sglang.status = {FLUSH: flushes}
    with pytest.raises(RolloutError, match=r"its SGLang needs more than 1 s to forget what it did \(/"):
        forget(sglang.address, sglang.key, [], is_published_to=True, seconds=1.0)


def test_a_server_that_refuses_or_has_ended_is_given_up(sglang):
    sglang.status = {CONTINUE: [500]}
    with pytest.raises(RolloutError, match=f"its SGLang answers {CONTINUE} with status 500"):
        forget(sglang.address, sglang.key, [], is_published_to=True)
    with pytest.raises(RolloutError, match=f"its SGLang does not answer {ABORT}: ConnectionRefusedError"):
        forget("http://127.0.0.1:9", sglang.key, [], is_published_to=True)


def test_orders_come_line_by_line():
    there, here = os.pipe()
    orders = Orders(there)
    assert orders.wait(0.0) is None
    os.write(here, b'{"attempt": "runs/2", ')
    assert orders.wait(0.0) is None
    os.write(here, b'"config": "c.yaml"}\n')
    assert orders.wait(0.0) == Order("runs/2", "c.yaml")
    for nonsense in (b"hello\n", b"[1]\n", b'{"attempt": "runs/2"}\n', b"\xff\n"):
        os.write(here, nonsense)
        assert orders.wait(0.0) is None
    os.write(here, b'{"attempt": "runs/3", "config": "c.yaml"}\n')
    os.close(here)
    assert orders.wait(0.0) == Order("runs/3", "c.yaml")
    began = time.monotonic()
    assert orders.wait(0.05) is None and orders.wait(0.05) is None, "the input has ended"
    assert time.monotonic() - began >= 0.05, "and does not keep a processor busy"
    os.close(there)


@pytest.mark.parametrize(
    "override, does",
    [
        ("train.num_steps=99", False),
        ("server.drain_seconds=1", False),
        ("server.max_total_tokens=65536", True),
        ("rollout.max_new_tokens=50", True),
        ("publish.full_every=4", True),
        ("model.path=another", True),
    ],
)
def test_only_what_a_server_is_started_with_needs_another_start(override, does):
    now, then = (load_config(CONFIG, more).config for more in ([override], []))
    assert differs(now, then, "model") is does and not differs(then, then, "model")


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A supervisor whose server is ready in the first of two attempts; `forgot`: what SGLang was made to forget."""
    run = RunFolder(tmp_path / "run")
    first, second = run.new_attempt(), run.new_attempt()
    config = load_config(CONFIG).config
    server = supervise.ServerSupervisor(
        config, first, 0, orders=Orders(0), config_of=lambda file: load_config(file).config
    )
    monkeypatch.setattr(supervise, "replace", lambda one, **changes: _replaced(one, changes))
    server._running = SimpleNamespace(how_it_ended=None, log=first.server_log(0))
    server._num_failures = 2
    server._register(
        state="ready", address="http://127.0.0.1:20001", generation=3, weight_version=7, num_failures=2, error="once"
    )
    forgot: list[tuple] = []
    monkeypatch.setattr(supervise, "forget", lambda *given, **named: forgot.append((*given, named)))
    return SimpleNamespace(server=server, first=first, second=second, forgot=forgot)


_of_dataclasses = supervise.replace


def _replaced(one, changes):
    if isinstance(one, SimpleNamespace):
        return SimpleNamespace(**{**vars(one), **changes})
    return _of_dataclasses(one, **changes)


def test_a_server_that_goes_on_is_one_that_has_just_become_ready_with_unknown_weights(serving):
    first, second, server = serving.first, serving.second, serving.server
    first.weight_groups_file.write_text("weights-1\nweights-2\n")
    first.software_dir.mkdir()
    atomic_write_json(first.software_dir / "server-0.json", {"torch": "2.9"})
    server._go_on(Order(str(second.path), str(CONFIG)))
    groups = ["weights-1", "weights-2"]
    assert serving.forgot == [("http://127.0.0.1:20001", first.api_key_file, groups, {"is_published_to": True})]
    (left,), (now,) = (read_registrations(one.servers_dir) for one in (first, second))
    assert (left.state, left.generation) == ("stopped", 3)
    assert (now.state, now.generation, now.weight_version, now.address) == ("ready", 4, None, "http://127.0.0.1:20001")
    assert (now.error, now.num_failures, now.recent_failures, now.retry) == (None, 0, [], None)
    assert read_json(second.kept_server_file("server-0"))["is_kept"] is True and second.num_kept_servers() == 1
    assert read_json(second.software_dir / "server-0.json") == {"torch": "2.9"}
    assert server._log == server._running.log == second.server_log(0)
    server._register()  # its heart beats on only in the new folder
    assert read_registrations(first.servers_dir) == [left]


def refusal(serving, config: Path = CONFIG) -> str:
    with pytest.raises(supervise._Stop):
        serving.server._go_on(Order(str(serving.second.path), str(config)))
    assert not read_registrations(serving.second.servers_dir), "no rank finds it"
    assert serving.server._registration.state != "ready", "it has nothing to drain"
    said = read_json(serving.second.kept_server_file("server-0"))
    assert said["is_kept"] is False and serving.second.num_kept_servers() == 0
    return said["why"]


def test_a_server_that_is_not_ready_or_has_died_says_so(serving):
    serving.server._running.how_it_ended = "SGLang killed by SIGKILL"
    assert refusal(serving) == "SGLang killed by SIGKILL"
    serving.server._register(state="starting")
    assert refusal(serving) == "it is starting" and not serving.forgot


def test_a_server_that_cannot_forget_or_has_other_settings_now_says_so(serving, tmp_path, monkeypatch):
    changed = tmp_path / "changed.yaml"
    changed.write_text(CONFIG.read_text().replace("max_new_tokens: 48", "max_new_tokens: 50"))
    assert refusal(serving, changed) == "it would be started with other settings now" and not serving.forgot
    serving.server._register(state="ready")

    def hangs(*_, **__):
        raise RolloutError("its SGLang does not answer")

    monkeypatch.setattr(supervise, "forget", hangs)
    assert refusal(serving) == "its SGLang does not answer"
