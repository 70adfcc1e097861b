"""A GGUF file becomes a Hugging Face folder, whole or not at all."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import gguf_to_hf  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2


def byte_tokens() -> list[str]:
    """The 256 characters by which byte-level tokenizers write bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + place) for place in range(len(others))]


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A random Llama; the weights by GGUF's names, float32."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "ab"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    random = np.random.default_rng(0)
    narrow = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (narrow, HIDDEN),
                "attn_v": (narrow, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INNER, HIDDEN),
                "ffn_up": (INNER, HIDDEN),
                "ffn_down": (HIDDEN, INNER),
            }.items()
        }
    weights = {}
    for name, shape in shapes.items():
        weights[name] = random.standard_normal(shape).astype(np.float32)
        if name.endswith("ffn_up.weight"):
            packed = gguf.quants.quantize(weights[name], gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weights[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, weights[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def convert(*words: object) -> SimpleNamespace:
    """The tool in this process, which has imported what it needs already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = gguf_to_hf.main([str(word) for word in words])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def test_the_weights_are_those_of_the_file(tmp_path):
    weights = write_gguf(tmp_path / "model.gguf")
    done = convert(tmp_path / "model.gguf", tmp_path / "deep/hf")
    assert done.returncode == 0, done.stderr
    assert "tensors in the file: F32 (18), Q8_0 (2)" in done.stdout and "a run can train it: llama" in done.stdout
    folder = tmp_path / "deep/hf"
    found = load_file(folder / "model.safetensors")
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
    }
    for theirs, ours in names.items():
        assert np.array_equal(found[f"{ours}.weight"].numpy(), weights[f"{theirs}.weight"]), theirs
    # llama.cpp stores the halves of a head's rotation one next to the other.
    query = torch.from_numpy(weights["blk.0.attn_q.weight"]).view(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], query.transpose(1, 2).reshape(HIDDEN, HIDDEN))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama" and "quantization_config" not in config
    assert json.loads((folder / "gguf.json").read_text())["tensors"] == {"F32": 18, "Q8_0": 2}
    assert (folder / "tokenizer.json").is_file() and "im_end" in (folder / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("text", "does not begin with GGUF"),
        ("cut", "is damaged or cut short"),
        ("absent", "cannot be read: No such file"),
        ("architecture", "cannot read it: GGUF model with architecture rwkv6 is not supported"),
    ],
)
def test_what_cannot_be_read_is_named_and_leaves_nothing(tmp_path, damage, message):
    file = tmp_path / "model.gguf"
    if damage == "text":
        file.write_text("not a model")
    elif damage != "absent":
        write_gguf(file, "rwkv6" if damage == "architecture" else "llama")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    done = convert(file, tmp_path / "out/hf")
    assert done.returncode == 2
    assert message in done.stderr and str(file) in done.stderr and "Traceback" not in done.stderr
    assert not any(path.is_file() for path in tmp_path.rglob("*") if path != file)


def test_an_existing_folder_is_not_touched(tmp_path):
    """By the command, in a process of its own."""
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "hf").mkdir()
    command = [sys.executable, ROOT / "tools/gguf_to_hf.py", tmp_path / "model.gguf", tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "exists already" in done.stderr
    assert not any((tmp_path / "hf").iterdir())
