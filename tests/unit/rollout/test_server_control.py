"""The control of a server against the protocol that publishing declares: the same operations, called the same way."""

from __future__ import annotations

import contextlib
import inspect

import pytest
from aiohttp import web

from gspo_mega.base.errors import PublishError
from gspo_mega.rollout.client import server_control
from gspo_mega.rollout.client.server_control import HttpServerControl
from gspo_mega.sync.servers import ServerControl


def operations(kind: type) -> dict[str, object]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", sorted(operations(ServerControl)))
def test_every_operation_of_the_protocol_is_there_with_its_arguments(name):
    wanted, found = operations(ServerControl)[name], operations(HttpServerControl)[name]
    if isinstance(wanted, property):
        assert isinstance(found, property)
    else:
        assert inspect.signature(found) == inspect.signature(wanted)


@pytest.mark.parametrize(
    "name",
    [
        "update_from_disk",
        "begin_update",
        "end_update",
        "update_from_distributed",
        "set_weight_version",
        "reset_tensors",
    ],
)
def test_a_server_whose_weights_change_is_reported_before_the_call(fakes, pools, name):
    fakes("server-0")
    pool = pools()
    (control,) = pool.controls()
    arguments = {
        "update_from_disk": ("/weights/v1", 1),
        "update_from_distributed": (["w"], ["float32"], [(2, 3)], "g"),
        "set_weight_version": (1,),
    }.get(name, ())
    assert pool.servers_behind() == []
    with contextlib.suppress(PublishError):  # whatever becomes of the call: the weights may have been touched
        getattr(control, name)(*arguments, deadline_seconds=2)
    assert [server.server_id for server in pool.servers_behind()] == ["server-0"]


def test_checksums_of_layers_beside_adapters_have_the_layers_own_names(fakes, pools):
    server = fakes("server-0")
    server.control = lambda _path, _body: web.json_response(
        {"success": True, "ranks": [{"checksums": {"mlp.experts.base_layer.w2_weight": "1", "norm.weight": "2"}}]}
    )
    (control,) = pools().controls()
    assert control.checksums(deadline_seconds=2) == [{"mlp.experts.w2_weight": "1", "norm.weight": "2"}]


def test_a_server_is_told_which_checksums_to_leave_out(fakes, pools):
    server = fakes("server-0")
    (control,) = pools().controls()
    control.checksums(deadline_seconds=2, skip=["model.layers.0.", "lm_head.weight"])
    control.checksums(deadline_seconds=2)
    bodies = [body for path, body in server.calls if path == "/weights_checker"]
    plain = {"action": "checksum", "selector": "target"}
    assert bodies == [plain | {"skip_tensor_list": ["model.layers.0.", "lm_head.weight"]}, plain]


def test_a_cache_is_flushed_when_the_last_request_is_put_away(fakes, pools, monkeypatch):
    """As SGLang does: it refuses while it has a request whose answer has come already."""
    server, refusals = fakes("server-0"), [400, 400]
    usual = server.control

    def busy(path, body):
        if path == "/flush_cache" and refusals:
            return web.Response(text="Flush cache failed.", status=refusals.pop())
        return usual(path, body)

    server.control = busy
    (control,) = pools().controls()
    control.flush_cache(deadline_seconds=60)
    assert refusals == []
    control.update_from_disk("/w/1", 1, deadline_seconds=60)  # an update from disk is not refused for such a request
    refusals += [400, 400]
    control.update_from_disk("/w/2", 2, deadline_seconds=60)
    assert refusals == []
    assert [body["flush_cache"] for path, body in server.calls if path == "/update_weights_from_disk"] == [False, False]
    refusals += [400] * 3
    control.update_from_disk("/w/3", 3, deadline_seconds=60, keeps_cache=True)
    assert len(refusals) == 3, "the cache was left"
    refusals += [400] * 10_000
    monkeypatch.setattr(server_control, "SETTLE_SECONDS", 0.2)
    with pytest.raises(PublishError, match="server-0: /flush_cache: HTTP 400: Flush cache failed"):
        control.flush_cache(deadline_seconds=60)
