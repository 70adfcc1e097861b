"""Publishing FP8 blocks from two Megatron ranks to a real SGLang server that holds them: what it reports is what was
sent, fused as SGLang fuses it, and a wrong scale is caught by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from quantized_models import make_blocks_model
from rank_pool import RankPools
from safetensors.torch import load_file
from servers import Serve, run_config
from test_publish_servers import Side

from gspo_mega.checkpoint.hf_export import tensor_digest
from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec, read_stored
from gspo_mega.models.spec import BlockFp8
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.sync.verify import server_tensor_names

SCALES = "layers.1.self_attn.o_proj.weight_scale_inv"
EXPERT = "layers.1.mlp.experts.3.down_proj.weight"
FUSED = "model.layers.1.self_attn.o_proj.weight"
PROMPT = [5, 17, 203, 44, 91, 8]


@pytest.fixture(scope="module")
def ranks():
    pools = RankPools()
    yield pools(2)
    pools.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks_run")
    config_path = run_config(folder, make_blocks_model(folder / "model"), server={"quantization": "fp8_block"})
    serve = Serve(config_path, folder / "run", forked=True)
    try:
        serve.wait_for("ready")
        yield config_path, serve
    finally:
        serve.stop()


class Published(Side):
    """The two ranks before the server, and what the server itself says."""

    def __init__(self, ranks, server, weights_dir: Path, **publish) -> None:
        config_path, self._serve = server
        super().__init__(ranks, config_path, self._serve.attempt.path, weights_dir, {"expert": 2}, **publish)
        self._config = load_config(config_path).config
        self.spec = read_model_spec(self._config.model.path)

    def ask(self, what: str, *arguments):
        with ServerPool(self._config.rollout, self.spec, self._serve.attempt) as pool:
            pool.wait_ready(1, deadline_seconds=60)
            (control,) = pool.controls()
            return getattr(control, what)(*arguments, deadline_seconds=60)

    def reported(self) -> dict[str, str]:
        return self.ask("checksums")[0]

    def written(self, version: int) -> dict[str, str]:
        """The SHA-256 of each tensor in a version's files, which its manifest lists."""
        folder = self.weights_dir / f"v{version:08d}"
        noted = json.loads((folder / "manifest.json").read_text())["tensors"]
        held = {n: t for file in {one["file"] for one in noted.values()} for n, t in load_file(folder / file).items()}
        assert held.keys() == noted.keys()
        return {name: tensor_digest(tensor) for name, tensor in held.items()}


@pytest.fixture
def side(ranks, server, tmp_path):
    opened = []

    def open_side(**publish) -> Published:
        opened.append(Published(ranks, server, tmp_path / "weights", **publish))
        return opened[-1]

    yield open_side
    for one in opened:
        one._run("close_trainer")


def test_the_server_started_from_blocks_made_in_the_run_folder(server):
    _, serve = server
    (start,) = (serve.attempt.run_folder.weights_dir).glob("start-*")
    assert start.name.startswith("start-blocks-float32-fp32-fp32-")  # and which weights it was made of
    assert read_stored(start) == BlockFp8()


@pytest.mark.parametrize("method", ["disk", "distributed"])
def test_what_changed_in_the_trainer_changed_there_with_its_scales(side, method):
    """Every tensor is checked by its foretold checksum (verify: tensors); here also which ones change."""
    one = side(method=method)
    assert one.publish(1, change="weight")["verified"] == [["server-0", 1]]
    before = one.reported()
    assert {before[f"{FUSED}_scale_inv"] != "", "model.layers.0.mlp.experts.w13_weight_scale_inv" in before} == {True}
    assert before.keys() == set(server_tensor_names(one.spec, BlockFp8()).values())
    assert one.publish(2, change="layers.1.self_attention.linear_proj")["verified"]
    after = one.reported()
    changed = {name for name in after if after[name] != before[name]}
    assert f"{FUSED}_scale_inv" in changed and changed <= {FUSED, f"{FUSED}_scale_inv"}
    if method == "disk":
        old, new = one.written(1), one.written(2)
        names = server_tensor_names(one.spec, BlockFp8())
        assert changed == {names[name] for name in new if new[name] != old[name]}


W2_SCALES = "model.layers.1.mlp.experts.w2_weight_scale_inv"


@pytest.mark.parametrize(
    "method, kind, names, named",
    [
        ("disk", "stale", SCALES, f"{FUSED}_scale_inv"),
        ("disk", "missing", f"{EXPERT}_scale_inv", W2_SCALES),
        ("disk", "rule", "layers.1.self_attn.o_proj.weight", f"{FUSED}_scale_inv"),
        ("distributed", "stale", SCALES, f"{FUSED}_scale_inv"),
        ("distributed", "missing", f"{EXPERT}_scale_inv", W2_SCALES),
        ("distributed", "shape", SCALES, f"{FUSED}_scale_inv"),
    ],
)
def test_a_wrong_scale_fails_the_publish_and_is_named(side, method, kind, names, named):
    one = side(method=method)
    assert one.publish(1, change="weight")["verified"]
    fault = {"servers": ["server-0"], "kind": kind, "names": names, "old": str(one.weights_dir / "v00000001")}
    result = one.publish(2, change="weight", fault=fault)
    assert "no server holds weight version 2" in result["error"] and named in result["error"], result
    assert one.publish(3, change="weight")["verified"] == [["server-0", 1]]


def test_replicas_are_checked_by_what_changed_as_well(side):
    one = side(method="distributed", verify="replicas")
    assert one.publish(1, change="weight")["verified"]
    assert one.publish(2, change="experts")["verified"]
    result = one.publish(3, change="weight", fault={"servers": ["server-0"], "kind": "stale", "names": SCALES})
    assert "changed in the trainer and not there" in result["error"] and f"{FUSED}_scale_inv" in result["error"]
