"""Hugging Face -> Megatron -> Hugging Face in many layouts, bit for bit, by one pool of four gloo ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
import traceback
from pathlib import Path

import pytest
import torch
from run_configs import make_config
from safetensors.torch import load_file, save_file

from gspo_mega.algorithm.fp8 import dequantize_blocks, quantize_blocks
from gspo_mega.models.block_fp8 import is_quantizable, quantization_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import hf_tensors, padded_vocab_size

WORLD = 4
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# What is left of the four ranks is data parallel. Two key-value heads on tensor 4: shares end inside a group.
LAYOUTS = {
    "dense-data4": ("dense", {}),
    "dense-tensor2": ("dense", {"tensor": 2}),
    "dense-tensor4": ("dense", {"tensor": 4}),
    "dense-pipeline2": ("dense", {"pipeline": 2}),
    "dense-pipeline2-virtual2": ("dense", {"pipeline": 2, "virtual_pipeline": 2}),
    "dense-context2": ("dense", {"context": 2}),
    "dense-tensor2-pipeline2": ("dense", {"tensor": 2, "pipeline": 2}),
    "tied-data4": ("tied", {}),
    "tied-tensor2-pipeline2": ("tied", {"tensor": 2, "pipeline": 2}),
    "moe-data4": ("moe", {}),
    "moe-expert2": ("moe", {"expert": 2}),
    "moe-expert4": ("moe", {"expert": 4}),
    "moe-pipeline2-expert2": ("moe", {"pipeline": 2, "expert": 2}),
    "moe-context2-expert2": ("moe", {"context": 2, "expert": 2}),
    "moe-tensor2-expert2": ("moe", {"tensor": 2, "expert": 2}),
    "moe-tensor2-expert2-experttensor2": (
        "moe",
        {"tensor": 2, "expert": 2, "expert_tensor": 2, "expert_dispatcher": "allgather"},
    ),
    "bf16-tensor2-expert2": ("moe-bf16", {"tensor": 2, "expert": 2}),
    "bf16-pipeline2": ("dense-bf16", {"pipeline": 2}),
    "blocks-tensor2-expert2": ("moe-blocks", {"tensor": 2, "expert": 2}),
    "blocks-tensor4": ("moe-blocks", {"tensor": 4}),
}


def write_checkpoint(folder: Path, kind: str) -> None:
    """A random checkpoint with its tensors over two files, so that the index is read as well."""
    folder.mkdir()
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    moe = kind.startswith("moe")
    config = SHAPE | (MOE if moe else {}) | {"tie_word_embeddings": kind == "tied", "dtype": str(dtype).split(".")[1]}
    config |= {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    generator = torch.Generator().manual_seed(7)
    spec = read_model_spec(folder)
    tensors = {e.name: (torch.randn(e.shape, generator=generator) * 0.2).to(dtype) for e in hf_tensors(spec)}
    if kind.endswith("blocks"):
        tensors = in_blocks(folder, tensors)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_blocks(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in FP8 blocks, with which no rank's share ends; their values go to a plain file beside the folder."""
    stored, spec = BlockFp8((5, 12)), read_model_spec(folder)
    quantized, values = {}, {}
    for entry in hf_tensors(spec):
        quantized[entry.name] = values[entry.name] = tensors[entry.name]
        if is_quantizable(entry):
            data, scales = quantize_blocks(tensors[entry.name], stored.block)
            quantized |= {entry.name: data, f"{entry.name}_scale_inv": scales}
            values[entry.name] = dequantize_blocks(data, scales, stored.block)
    (folder / "config.json").write_text(json.dumps(spec.raw | {"quantization_config": quantization_config(stored)}))
    (plain := folder.with_name(f"{folder.name}-values")).mkdir()
    save_file(values, plain / "model.safetensors")
    return quantized


def run_rank(folder: str, layouts: dict) -> None:
    """One rank of the pool: every layout in turn; what it saw goes to <folder>/<layout>.<rank>.json."""
    import torch.distributed as dist

    root, rank = Path(folder), dist.get_rank()
    for name, (kind, parallel) in layouts.items():
        try:
            seen = run_layout(root, name, kind, parallel)
        except Exception:
            (root / f"{name}.{rank}.json").write_text(json.dumps({"failed": traceback.format_exc()}))
            raise
        (root / f"{name}.{rank}.json").write_text(json.dumps(seen))


def run_layout(root: Path, name: str, kind: str, parallel: dict) -> dict:
    from gspo_mega.cpu import backend

    backend.install()
    from gspo_mega.base.errors import ModelError, PublishError
    from gspo_mega.checkpoint.gather import PolicyTensors, gather_stream
    from gspo_mega.checkpoint.hf_export import export_huggingface, tensor_digest
    from gspo_mega.checkpoint.hf_import import import_huggingface
    from gspo_mega.checkpoint.shard_check import ShardCheck
    from gspo_mega.engine.model import build_chunks, transformer_config
    from gspo_mega.engine.precision import DTYPES
    from gspo_mega.engine.process_groups import create_groups, destroy_groups

    source = root / kind
    spec = read_model_spec(source)
    config = make_config(
        model={"path": str(source)},
        parallel=parallel,
        precision="bf16" if kind.endswith("bf16") else "fp32",
    )
    sizes = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    groups = create_groups(**{size: getattr(config.parallel, size) for size in sizes})
    chunks = build_chunks(transformer_config(config, spec), spec, groups)
    import_huggingface(source, spec, groups, chunks)
    dtype = DTYPES[config.precision]
    seen: dict = {"padding_is_zero": padding_is_zero(spec, groups, chunks)}
    if kind == "tied" and groups.is_last_stage and not groups.is_first_stage:
        seen["head"] = hashlib.sha256(
            chunks[-1].head_weight()[: spec.vocab_size].detach().numpy().tobytes()
        ).hexdigest()

    manifest = export_huggingface(
        root / f"{name}.out", spec, groups, chunks, dtype, source, weight_version=3, max_file_bytes=40_000
    )
    seen["manifest"] = manifest
    policy = PolicyTensors(spec, groups, chunks)
    seen["checked"] = [e.name for e, _ in ShardCheck(policy, dtype).over(policy.owned(dtype))]  # raises what differs
    seen["stream"] = [[n, tensor_digest(t)] for n, t in gather_stream(spec, groups, chunks, dtype)]
    if kind in ("dense", "moe") and not parallel:
        seen["logits_difference"] = logits_difference(root, source, chunks[0], spec)
    if name in ("moe-tensor2-expert2", "dense-data4"):
        for fault in FAULTS:
            try:
                import_huggingface(root / f"{kind}-{fault}", spec, groups, chunks)
            except ModelError as error:
                seen[fault] = str(error)
        try:
            # A file where the folder should be: only the writing ranks meet it.
            export_huggingface(root / "blocked" / "v1", spec, groups, chunks, dtype, source, weight_version=4)
        except PublishError as error:
            seen["blocked"] = str(error)
    destroy_groups()
    return seen


def padding_is_zero(spec, groups, chunks) -> bool:
    rows = padded_vocab_size(spec.vocab_size, groups.tensor.size) // groups.tensor.size
    real = max(0, min(rows, spec.vocab_size - groups.tensor.rank * rows))
    tables = [p for chunk in chunks for n, p in chunk.named_parameters() if n.startswith(("embedding", "output_layer"))]
    return all(not table[real:].any() and bool((table[:real] != 0).any() or real == 0) for table in tables)


def logits_difference(root: Path, source: Path, chunk, spec) -> float:
    """Largest |logit - Hugging Face's| over a sequence: the conversion is right, not only reversible."""
    import numpy as np
    import transformers
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, spec.vocab_size, 24))
    offsets = torch.tensor([0, 24], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=24,
        max_seqlen_kv=24,
    )
    with torch.no_grad():
        hidden = chunk.eval()(tokens[None], torch.arange(24)[None], None, packed_seq_params=packed)
        logits = hidden[:, 0] @ chunk.head_weight()[: spec.vocab_size].T
        reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        return float((logits - reference(tokens[None]).logits[0]).abs().max())


# What a broken checkpoint's error says.
_FILE = "in model-00001-of-00002.safetensors holds values that are "
FAULTS = {
    "missing": ["missing: "],
    "unexpected": ["unexpected: model.layers.0.mlp.surprise"],
    "shape": ["wrong shape: "],
    "type": ["wrong type: ", "is I32; weights are one of BF16, F16, F32, F64"],
    "not finite": ["not finite: ", f"{_FILE}NaN", f"{_FILE}infinite"],
}


def break_checkpoint(source: Path, target: Path, fault: str) -> None:
    shutil.copytree(source, target)
    file = target / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    victim = sorted(tensors)[3]
    if fault == "not finite":
        tensors[victim].view(-1)[-1] = float("nan")  # which one rank of several reads
        tensors[sorted(tensors)[0]].view(-1)[0] = float("-inf")
    elif fault == "type":
        tensors[victim] = tensors[victim].to(torch.int32)
    elif fault == "shape":
        tensors[victim] = tensors[victim][:-1].clone()
    elif fault == "missing":
        del tensors[victim], index["weight_map"][victim]
    else:
        tensors["model.layers.0.mlp.surprise.weight"] = tensors[victim].clone()
        index["weight_map"]["model.layers.0.mlp.surprise.weight"] = file.name
    save_file(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def pool(tmp_path_factory, rank_pools) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for kind in ("dense", "tied", "moe", "dense-bf16", "moe-bf16", "moe-blocks"):
        write_checkpoint(root / kind, kind)
    for kind in ("dense", "moe"):
        for fault in FAULTS:
            break_checkpoint(root / kind, root / f"{kind}-{fault}", fault)
    (root / "blocked").write_text("")
    rank_pools(WORLD).run("test_weights_layouts:run_rank", timeout=600, folder=str(root), layouts=LAYOUTS)
    return root


def seen_by_ranks(pool: Path, layout: str) -> list[dict]:
    seen = [json.loads((pool / f"{layout}.{rank}.json").read_text()) for rank in range(WORLD)]
    assert not any("failed" in s for s in seen), next(s["failed"] for s in seen if "failed" in s)
    return seen


def source_tensors(pool: Path, layout: str) -> dict[str, torch.Tensor]:
    kind = LAYOUTS[layout][0]
    folder = pool / (f"{kind}-values" if kind.endswith("blocks") else kind)
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_equals_the_checkpoint_that_was_imported(pool, layout):
    seen = seen_by_ranks(pool, layout)
    assert all(s["padding_is_zero"] for s in seen)
    out = pool / f"{layout}.out"
    expected = source_tensors(pool, layout)
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(out.glob("*.safetensors")):
        tensors = load_file(file)
        assert {weight_map[name] for name in tensors} == {file.name}
        found |= tensors
    assert found.keys() == expected.keys() == weight_map.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert (out / "tokenizer.json").read_bytes() == (pool / LAYOUTS[layout][0] / "tokenizer.json").read_bytes()
    assert not list(pool.glob(f"{layout}.out.*")), "no half-written folder is left"
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manifest_says_what_the_trainer_held(pool, layout):
    seen = seen_by_ranks(pool, layout)
    manifest = json.loads((pool / f"{layout}.out" / "manifest.json").read_text())
    assert all(s["manifest"] == manifest for s in seen)
    assert manifest["weight_version"] == 3
    expected = source_tensors(pool, layout)
    spec = read_model_spec(pool / LAYOUTS[layout][0])
    assert list(manifest["tensors"]) == [e.name for e in hf_tensors(spec)]
    for name, said in manifest["tensors"].items():
        assert said["shape"] == list(expected[name].shape)
        assert (
            said["sha256"]
            == hashlib.sha256(expected[name].contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stream_brings_every_tensor_to_rank_0_in_order(pool, layout):
    first, *others = seen_by_ranks(pool, layout)
    assert first["stream"] == [[n, t["sha256"]] for n, t in first["manifest"]["tensors"].items()]
    assert all(other["stream"] == [] for other in others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_gathered_is_what_the_ranks_hold(pool, layout):
    checked = [name for seen in seen_by_ranks(pool, layout) for name in seen["checked"]]
    assert sorted(checked) == sorted(seen_by_ranks(pool, layout)[0]["manifest"]["tensors"])


def test_work_is_spread_over_the_ranks_that_own_tensors(pool):
    manifest = seen_by_ranks(pool, "moe-pipeline2-expert2")[0]["manifest"]
    by_file: dict[str, set[str]] = {}
    for name, tensor in manifest["tensors"].items():
        by_file.setdefault(tensor["file"], set()).add(name)
    assert len(by_file) > 4
    for names in by_file.values():
        layers = {int(n.split(".")[2]) for n in names if ".layers." in n}
        experts = {int(n.split(".")[5]) for n in names if ".experts." in n}
        assert layers <= {0, 1} or layers <= {2, 3}
        assert experts <= {0, 1} or experts <= {2, 3}


def test_tied_embedding_reaches_the_last_stage(pool):
    expected = hashlib.sha256(
        source_tensors(pool, "tied-data4")["model.embed_tokens.weight"][:128].numpy().tobytes()
    ).hexdigest()
    heads = [s["head"] for s in seen_by_ranks(pool, "tied-tensor2-pipeline2") if "head" in s]
    assert len(heads) == 2 and expected in heads


@pytest.mark.parametrize("layout", ["dense-data4", "moe-data4"])
def test_logits_equal_hugging_face(pool, layout):
    assert max(s["logits_difference"] for s in seen_by_ranks(pool, layout)) < 2e-5


@pytest.mark.parametrize("layout", ["dense-data4", "moe-tensor2-expert2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_checkpoint_is_refused_by_all_ranks(pool, layout, fault):
    messages = {s[fault] for s in seen_by_ranks(pool, layout)}
    assert len(messages) == 1
    message = messages.pop()
    assert all(words in message for words in FAULTS[fault]), message


@pytest.mark.parametrize("layout", ["dense-data4", "moe-tensor2-expert2"])
def test_a_folder_that_cannot_be_written_fails_on_all_ranks(pool, layout):
    messages = {s["blocked"] for s in seen_by_ranks(pool, layout)}
    assert len(messages) == 1 and "cannot be written" in messages.pop()
