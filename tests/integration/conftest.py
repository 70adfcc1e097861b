"""Real SGLang servers, shared by all integration tests of a session: one dense, one MoE, started when first asked for.

A test that changes a server's weights puts them back (`fresh_weights`), or starts a server of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gspo_mega.base.run_folder import Attempt
from gspo_mega.config import load_config
from gspo_mega.config.schema import Config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.rollout.pool import ServerPool

# As on most clusters: whatever speaks to the job's own addresses by way of these is refused there, and does not end.
for _name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ[_name] = os.environ[_name.upper()] = "http://127.0.0.1:9"
for _name in ("no_proxy", "NO_PROXY"):
    os.environ.pop(_name, None)


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("sglang") is not None:
        return
    if "sglang" in os.environ.get("GSPO_REQUIRE", "").split(","):
        pytest.exit("GSPO_REQUIRE asks for sglang, and it is not installed", returncode=1)
    for item in items:
        if {"dense_server", "moe_server", "dense_model", "moe_model"} & set(item.fixturenames):
            item.add_marker(pytest.mark.skip(reason="sglang is not installed"))


@dataclass(frozen=True)
class RunningServer:
    """A server of the session: the run it belongs to and what is needed to talk to it."""

    config: Config
    config_path: Path
    spec: ModelSpec
    model: Path
    attempt: Attempt
    serve: object

    def pool(self) -> ServerPool:
        """A new pool of this server's attempt; close it. The server holds `model`, as version 0: there is no trainer to
        publish it.
        """
        from servers import trust

        pool = ServerPool(self.config.rollout, self.spec, self.attempt)
        trust(pool)
        return pool

    def restore_weights(self) -> None:
        """Give the server the weights it was started with, and end whatever a failed test left open."""
        with self.pool() as pool:
            pool.wait_ready(1, deadline_seconds=120)
            (control,) = pool.controls()
            control.resume(deadline_seconds=60)
            control.update_from_disk(str(self.model), 0, deadline_seconds=60)


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory) -> Path:
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("models") / "dense", moe=False)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory) -> Path:
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("models") / "moe", moe=True)


def _running(folder: Path, model: Path, rollout: dict, forked: bool = False, **sections: dict) -> RunningServer:
    from servers import Serve, run_config

    # log_level info: SGLang then logs all its arguments, and a test looks for the API key there.
    config_path = run_config(
        folder, model, rollout=rollout, server={"log_level": "info", "start_deadline_seconds": 1200.0}, **sections
    )
    serve = Serve(config_path, folder / "run", forked=forked)
    try:
        serve.wait_for("ready")
    except BaseException:
        serve.stop()
        raise
    config = load_config(config_path).config
    return RunningServer(config, config_path, read_model_spec(model), model, serve.attempt, serve)


@pytest.fixture(scope="session")
def dense_server(tmp_path_factory, dense_model):
    server = _running(tmp_path_factory.mktemp("dense_run"), dense_model, {"max_new_tokens": 64})
    yield server
    server.serve.stop()


@pytest.fixture(scope="module")
def neighbour(dense_server):
    """A second real server of `dense_server`'s run, `server-1`, which a test may kill or send away: it leaves no
    registration behind for the pools of later tests.
    """
    from servers import Serve

    run = dense_server.attempt.run_folder.path
    joined = Serve(dense_server.config_path, run, index=1, attempt=dense_server.attempt, forked=True)
    try:
        joined.wait_for("ready")
        yield joined
    finally:
        joined.stop()
        (dense_server.attempt.servers_dir / f"{joined.server_id}.json").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def moe_server(tmp_path_factory, moe_model):
    rollout = {"max_new_tokens": 64, "return_routed_experts": True}
    server = _running(tmp_path_factory.mktemp("moe_run"), moe_model, rollout)
    yield server
    server.serve.stop()


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory) -> Path:
    """The quickstart's tiny Qwen3-MoE and a few of its problems, as tools/make_quickstart.py makes them."""
    from run_support import make_quickstart

    return make_quickstart(tmp_path_factory.mktemp("quickstart"))
