"""Small random Hugging Face folders for tests: dense and MoE Qwen3, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EOS_TOKEN_ID = 2
VOCAB_SIZE = 512


def byte_tokenizer():
    """Byte-level, no merges: every byte is a token, 256 of them after three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


# Sizes for `make_model` whose every side blocks of 128 divide.
IN_BLOCKS = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
}


def make_model(
    folder: Path, *, moe: bool, seed: int = 0, dtype: torch.dtype = torch.float32, sizes: dict[str, int] | None = None
) -> Path:
    """Write a model with the on-disk names of a published checkpoint (one tensor an expert). `sizes` differ from the
    usual ones.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shared: dict = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        rope_theta=1e6,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        initializer_range=0.08,
    )
    sizes = dict(sizes or {})
    experts = dict(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=sizes.pop("moe_intermediate_size", 64),
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    shared |= sizes
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts)) if moe else Qwen3ForCausalLM(Qwen3Config(**shared))
    model.to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    _check_names(folder, moe)
    return folder


def perturb(source: Path, target: Path, *, seed: int) -> Path:
    """Copy a model folder with every weight moved by a little: the next version of a policy."""
    import shutil

    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(target / "model.safetensors")
    moved = {k: v + 0.02 * torch.randn(v.shape, generator=generator).to(v.dtype) for k, v in tensors.items()}
    save_file(moved, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _check_names(folder: Path, moe: bool) -> None:
    names = load_file(folder / "model.safetensors").keys()
    expert = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert (expert in names) == moe, f"{folder}: transformers wrote other expert names than a published checkpoint has"
