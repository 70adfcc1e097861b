"""The checksums that a server must report: of its own fused tensors, in the dtype that it holds them in."""

import hashlib
from dataclasses import replace

import torch
from test_publish_parts import NAMES, SPEC

from gspo_mega.models.spec import MoeSpec
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.sync.verify import ExpectedChecksums, differences


def test_expected_checksums_are_of_the_fused_tensors():
    generator = torch.Generator().manual_seed(1)
    tensors = {e.name: torch.randn(e.shape, generator=generator) for e in hf_tensors(SPEC)}
    expected = ExpectedChecksums(SPEC)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    found = expected.checksums()
    assert sorted(found) == NAMES

    def sha(*parts: torch.Tensor) -> str:
        return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()[:16]

    attention = [tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == sha(*attention)
    experts = [tensors[f"model.layers.0.mlp.experts.{e}.{n}_proj.weight"] for e in (0, 1) for n in ("gate", "up")]
    assert found["model.layers.0.mlp.experts.w13_weight"] == sha(*experts)
    assert found["lm_head.weight"] == sha(tensors["lm_head.weight"], torch.zeros(128 - 70, 8))


def test_what_a_server_holds_in_fp32_counts_with_those_bytes():
    """The router of GLM-4.x MoE on a bf16 server: sent in bf16, held wider, the same values."""
    moe = MoeSpec(2, 1, 4, score_function="sigmoid", expert_bias=True, shared_intermediate_size=4)
    spec = replace(SPEC, family="glm4_moe", qk_norm=False, rotary_share=0.5, moe=moe)
    expected, gate = ExpectedChecksums(spec), torch.randn(2, 8).bfloat16()
    for entry in hf_tensors(spec):
        expected.add(entry.name, gate if entry.name.endswith("mlp.gate.weight") else torch.zeros(entry.shape))
    held = hashlib.sha256(gate.float().numpy().tobytes()).hexdigest()[:16]
    assert expected.checksums()["model.layers.0.mlp.gate.weight"] == held


def test_differences_are_in_words():
    expected = {"a": "1", "b": "2", "c": "3"}
    assert differences(expected, dict(expected)) is None
    text = differences({"a": "1", "b": "x", "d": "4"}, expected)
    assert text == "the server lacks: c; the server has besides: d; differ in value: b"
    assert "publish.verify: replicas" in differences(dict.fromkeys(expected, "gpu"), expected)
