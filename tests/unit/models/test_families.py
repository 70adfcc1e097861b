"""The family tables against the real Hugging Face models, and the cutting of tensors over ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import ModelError
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.models.tensors import (
    TensorEntry,
    checkpoint_tensors,
    hf_tensors,
    is_ignored_tensor,
    padded_vocab_size,
    parameter_blocks,
    parameter_shape,
)


def make_spec(moe: bool, **changes) -> ModelSpec:
    spec = ModelSpec(
        family="qwen3_moe" if moe else "qwen3",
        num_layers=2,
        hidden_size=24,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        intermediate_size=40,
        vocab_size=300,
        max_position_embeddings=64,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        torch_dtype="float32",
        eos_token_ids=(1,),
        moe=MoeSpec(num_experts=4, experts_per_token=2, expert_intermediate_size=16) if moe else None,
    )
    return replace(spec, **changes)


SHARED_KEYS = dict(
    num_hidden_layers=2,
    hidden_size=24,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=40,
    vocab_size=300,
)
OWN_KEYS = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen2_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(
        num_key_value_heads=8,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "glm4_moe": dict(
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
}
_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24)
OWN_KEYS |= {"qwen3_next": _DELTA | _EXPERTS, "qwen3_5": _DELTA, "qwen3_5_moe": _DELTA | _EXPERTS}
OWN_KEYS |= {"qwen3_5_vl": _DELTA, "qwen3_5_moe_vl": _DELTA | _EXPERTS, "qwen3_vl_moe": OWN_KEYS["qwen3_moe"]}
_VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, num_position_embeddings=16, patch_size=4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_that_hugging_face_saves(family, tied, tmp_path):
    """The spec is read from what transformers wrote beside the tensors: facts and table of each family together."""
    import torch
    import transformers
    from family_models import proof_of, variant_config
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model_class = getattr(transformers, FAMILIES[family].architecture)
    if (proof := proof_of(family)) is None:
        keys = SHARED_KEYS | OWN_KEYS.get(family, {})
        if FAMILIES[family].text_part:
            keys = dict(text_config=keys, vision_config=_VISION | dict(out_hidden_size=keys["hidden_size"]))
        config = model_class.config_class(**keys, tie_word_embeddings=tied)
    else:
        config = variant_config(proof, tie_word_embeddings=tied)
    model_class(config).to(torch.float32).save_pretrained(tmp_path)
    if FAMILIES[family].may_stack == "transposed":  # as published, which transformers reads and does not write
        tensors = load_file(tmp_path / "model.safetensors")
        published = {name: t.mT.contiguous() if ".mlp.experts." in name else t for name, t in tensors.items()}
        save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
        read = model_class.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a mapping
    spec = read_model_spec(tmp_path)
    assert spec.family == family and spec.tie_word_embeddings == tied
    assert {entry.name: entry.shape for entry in checkpoint_tensors(spec)} == {
        name: shape for name, shape in saved.items() if not is_ignored_tensor(spec, name)
    }
    others = {name for name in saved if is_ignored_tensor(spec, name)}
    assert bool(others) == FAMILIES[family].text_part and all(name.startswith("model.visual.") for name in others)


def test_biases_of_query_key_and_value_lie_as_their_weights_do():
    spec = make_spec(False, family="qwen2", qk_norm=False, attention_bias=True)
    for rank in range(2):
        for role in "qkv":
            weight, bias = (
                next(e for e in hf_tensors(spec) if e.name == f"model.layers.1.self_attn.{role}_proj.{kind}")
                for kind in ("weight", "bias")
            )
            assert (
                bias.shape == weight.shape[:1] and bias.parameter == "decoder.layers.1.self_attention.linear_qkv.bias"
            )
            assert parameter_blocks(spec, bias, 2, rank) == parameter_blocks(spec, weight, 2, rank)
            assert parameter_shape(spec, bias, 2) == parameter_shape(spec, weight, 2)[:1]


def test_mixtral_experts_are_w1_beside_w3_and_w2():
    moe = MoeSpec(num_experts=4, experts_per_token=2, expert_intermediate_size=40)
    spec = replace(make_spec(True, family="mixtral", qk_norm=False), moe=moe)
    of_expert = [e for e in hf_tensors(spec) if e.layer == 1 and e.expert == 3]
    prefix = "model.layers.1.block_sparse_moe.experts.3."
    assert [(e.name.removeprefix(prefix), e.role) for e in of_expert] == [
        ("w1.weight", "gate"),
        ("w3.weight", "up"),
        ("w2.weight", "whole"),
    ]
    assert of_expert[0].parameter == of_expert[1].parameter == "decoder.layers.1.mlp.experts.3.linear_fc1.weight"


def test_order_is_embedding_layers_experts_norm_head():
    entries = hf_tensors(make_spec(True))
    assert entries[0].name == "model.embed_tokens.weight" and entries[-1].name == "lm_head.weight"
    layers = [e.layer for e in entries if e.layer is not None]
    assert layers == sorted(layers)
    experts = [e.expert for e in entries if e.layer == 1 and e.expert is not None]
    assert experts == sorted(experts) and set(experts) == {0, 1, 2, 3}


def test_tied_embedding_is_copied_to_the_output_layer_and_has_no_head():
    entries = hf_tensors(make_spec(False, tie_word_embeddings=True))
    assert entries[0].copies == ("output_layer.weight",)
    assert "lm_head.weight" not in {e.name for e in entries}


@pytest.mark.parametrize(
    "vocab_size, tensor_parallel, padded",
    [(151936, 8, 151936), (300, 1, 384), (300, 2, 384), (300, 3, 384), (300, 5, 640), (1, 1, 128)],
)
def test_padded_vocab_size(vocab_size, tensor_parallel, padded):
    assert padded_vocab_size(vocab_size, tensor_parallel) == padded


def _fill(
    spec: ModelSpec, tensors: dict[str, np.ndarray], entries: list[TensorEntry], parallel: int
) -> list[np.ndarray]:
    """One parameter's shares over all ranks, put together from its tensors by the blocks; -1 where nothing is
    written.
    """
    shares = []
    for rank in range(parallel):
        share = np.full(parameter_shape(spec, entries[0], parallel), -1)
        for entry in entries:
            for b in parameter_blocks(spec, entry, parallel, rank):
                source = np.take(tensors[entry.name], range(b.start, b.start + b.length), axis=b.dim)
                index = (slice(None),) * b.dim + (slice(b.local_start, b.local_start + b.length),)
                assert (share[index] == -1).all(), "two blocks overlap"
                share[index] = source
        shares.append(share)
    return shares


def _tensors(spec: ModelSpec) -> dict[str, np.ndarray]:
    tensors, start = {}, 0
    for entry in hf_tensors(spec):
        tensors[entry.name] = np.arange(start, start + entry.num_elements).reshape(entry.shape)
        start += entry.num_elements
    return tensors


@settings(deadline=None, max_examples=30)
@given(moe=st.booleans(), parallel=st.sampled_from([1, 2, 4, 8]), groups=st.sampled_from([1, 2, 4, 8]))
def test_blocks_fill_every_parameter_and_use_every_element(moe, parallel, groups):
    """Also with more ranks than key-value groups, where a rank's share ends inside a group."""
    spec = make_spec(moe, num_kv_heads=groups)
    tensors = _tensors(spec)
    by_parameter = defaultdict(list)
    for entry in hf_tensors(spec):
        by_parameter[entry.parameter].append(entry)
    for entries in by_parameter.values():
        shares = _fill(spec, tensors, entries, parallel)
        values = np.concatenate([s.ravel() for s in shares])
        expected = np.concatenate([tensors[e.name].ravel() for e in entries])
        if entries[0].sharding == "replicated":
            assert all((s == tensors[entries[0].name]).all() for s in shares)
        elif entries[0].sharding == "vocabulary":
            padding = padded_vocab_size(spec.vocab_size, parallel) - spec.vocab_size
            assert (values == -1).sum() == padding * spec.hidden_size
            assert (values[values >= 0] == expected).all()
        else:
            assert (np.sort(values) == np.sort(expected)).all()


def test_qkv_is_interleaved_by_group_as_megatron_splits_it():
    """Megatron views the rows as [groups, (q heads of the group + k + v) x head_dim] and cuts them there."""
    spec = make_spec(False)
    tensors = _tensors(spec)
    entries = [e for e in hf_tensors(spec) if e.parameter == "decoder.layers.1.self_attention.linear_qkv.weight"]
    shares = _fill(spec, tensors, entries, 2)
    q, k, v = (tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    for rank, share in enumerate(shares):
        grouped = share.reshape(2, 4 * spec.head_dim, spec.hidden_size)
        heads = slice(rank * 4 * spec.head_dim, (rank + 1) * 4 * spec.head_dim)
        groups = slice(rank * 2 * spec.head_dim, (rank + 1) * 2 * spec.head_dim)
        assert (grouped[:, : 2 * spec.head_dim].reshape(-1, spec.hidden_size) == q[heads]).all()
        assert (grouped[:, 2 * spec.head_dim : 3 * spec.head_dim].reshape(-1, spec.hidden_size) == k[groups]).all()
        assert (grouped[:, 3 * spec.head_dim :].reshape(-1, spec.hidden_size) == v[groups]).all()


def test_fc1_share_is_gate_then_up():
    spec = make_spec(True)
    tensors = _tensors(spec)
    entries = [e for e in hf_tensors(spec) if e.parameter == "decoder.layers.0.mlp.experts.3.linear_fc1.weight"]
    first, second = _fill(spec, tensors, entries, 2)
    gate, up = (tensors[f"model.layers.0.mlp.experts.3.{n}_proj.weight"] for n in ("gate", "up"))
    assert (first == np.concatenate([gate[:8], up[:8]])).all()
    assert (second == np.concatenate([gate[8:], up[8:]])).all()


def test_what_has_no_table_is_refused():
    known = f"known: {', '.join(sorted(FAMILIES))}"
    with pytest.raises(ModelError, match=known):
        hf_tensors(make_spec(False, family="gemma"))
    with pytest.raises(ModelError, match="attention_bias=True"):
        hf_tensors(make_spec(False, attention_bias=True))
    with pytest.raises(ModelError, match="qk_norm=True: the tensor table is for attention_bias=False, qk_norm=False"):
        hf_tensors(make_spec(False, family="llama"))
    with pytest.raises(ModelError, match="disagree"):
        hf_tensors(make_spec(True, family="qwen3"))


def test_an_impossible_cut_names_the_tensor():
    entry = next(e for e in hf_tensors(make_spec(False)) if e.role == "gate")
    with pytest.raises(ModelError, match="mlp.gate_proj.weight: 40 rows"):
        parameter_blocks(make_spec(False), entry, 3, 0)
