"""A server that takes adapters and does not compute with them is found before it serves; one that does gets them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_mega.config import load_config
from gspo_mega.sync.adapters import AdapterPublisher, AdapterTransaction, publisher_class
from gspo_mega.sync.publish import Publisher
from gspo_mega.sync.servers import Deadline
from gspo_mega.sync.transaction import PublishContent, PublishMemory
from gspo_mega.sync.verify import ServerTensors

EXPECTED = {"w": "0"}


class Server:
    """Records its calls; `acts`: whether adapters change what it answers."""

    tensor_parallel, generation = 1, 1

    def __init__(self, server_id: str, acts: bool) -> None:
        self.server_id, self.acts, self.calls, self.adapter = server_id, acts, [], ""

    def __getattr__(self, name: str) -> Any:
        return lambda *_parts, **_options: self.calls.append(name)

    def load_adapter(self, path: str, *, deadline_seconds: float) -> None:
        self.calls.append("load_adapter")
        self.adapter = path

    def log_probs(self, token_ids, adapter, *, deadline_seconds: float) -> list[float]:
        return [-1.0 if adapter is None or not self.acts else -2.0] * len(token_ids)

    def weight_version(self, *, deadline_seconds: float) -> int:
        return 3

    def checksums(self, *, deadline_seconds: float) -> list[dict[str, str]]:
        return [EXPECTED]


@pytest.fixture
def publish(tmp_path):
    memory = PublishMemory()

    def run(*servers: Server):
        def send(fleet, targets):
            fleet.each(lambda s, left: s.load_adapter("v3", deadline_seconds=left), targets)

        content, tensors = PublishContent(3, expected=EXPECTED), ServerTensors({"w": "w"})
        transaction = AdapterTransaction(tensors, memory, content, Deadline(60), send, False, proof=tmp_path / "proof")
        return transaction.run(servers, lambda: None)

    return run


def test_a_server_whose_adapters_do_not_act_gets_no_version(publish):
    good, bad = Server("good", True), Server("bad", False)
    verified, failed = publish(good, bad)
    assert verified == (("good", 1),) and set(failed) == {"bad"}
    assert "bad: gives the same answers with adapters as without" in failed["bad"]
    assert good.adapter == "v3" and good.calls[-1] == "resume"
    assert bad.calls[-1] == "pause", "it stays paused"


def test_a_start_is_proved_once(publish):
    server = Server("one", True)
    publish(server)
    before = server.calls.count("load_adapter")
    publish(server)
    assert (before, server.calls.count("load_adapter")) == (3, 4), "version, proof, version; then the version alone"


def test_whole_weights_are_published_unless_adapters_are_asked_for():
    file = Path(__file__).parents[3] / "configs/quickstart_lora.yaml"
    assert publisher_class(load_config(file).config) is Publisher
    assert publisher_class(load_config(file, ["publish.lora=adapter"]).config) is AdapterPublisher
