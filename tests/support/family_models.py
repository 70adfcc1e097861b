"""Small random models of every family, made by transformers itself, and the logits that transformers gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from exact_numbers import exact_logits, kept_in_fp64
from safetensors.torch import load_file, save_file

from gspo_mega.models.families import FAMILIES

VOCAB_SIZE = 600  # no multiple of the padding, and no smaller than the ids of `recorded_sequences`
NUM_TOKENS = 96
_SHARED = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
)
# Wavelengths of all three ranges, well inside the sequence.
_LLAMA_3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
# Sixteen experts in four groups, of which a token goes to two.
_DEEPSEEK = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    n_shared_experts=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=0,
)
_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32, beta_fast=4, beta_slow=1
)
_GLM = dict(
    head_dim=16,
    attention_bias=True,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=24,
    routed_scaling_factor=1.5,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    rms_norm_eps=1e-5,
    num_nextn_predict_layers=0,
)
# As GLM-4.7-Flash has it: DeepSeek-V3's attention in one group, heads of other widths, layers listed by their kind.
_GLM_LITE = _DEEPSEEK | dict(
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    v_head_dim=20,
    routed_scaling_factor=1.8,
    rms_norm_eps=1e-5,
    mlp_layer_types=["dense"] + 3 * ["sparse"],
)
_OLMO = dict(sliding_window=24, rms_norm_eps=1e-6)
_MINIMAX = dict(
    head_dim=16,
    num_local_experts=8,
    num_experts_per_tok=3,
    intermediate_size=24,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)
# Windows and limits that are small enough to act, and a range of wavelengths that ends within a dimension.
_GPT_OSS = dict(
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    sliding_window=8,
    swiglu_limit=0.4,
    rope_parameters=_YARN | dict(truncate=False),
)
# Three heads of values to one of keys, values wider than keys, and chunks that end inside the sequence.
_DELTA = dict(
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=2e3, partial_rotary_factor=0.5),
)
_DELTA_EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
)
# As published: the part of a head that positions turn, divided among time, height and width.
_SECTIONS = dict(mrope_interleaved=True, mrope_section=[2, 1, 1])
_DELTA_VL = _DELTA | dict(rope_parameters=_DELTA["rope_parameters"] | _SECTIONS)
_QWEN3_VL = dict(
    head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e4) | _SECTIONS | dict(mrope_section=[4, 2, 2])
)
_VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, num_position_embeddings=16, patch_size=4)
_KEPT_IN_FP32 = "e_score_correction_bias"
VARIANTS: dict[str, tuple[str, dict]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(rope_parameters=_LLAMA_3)),
    "llama3-tied": ("llama", dict(rope_parameters=_LLAMA_3 | {"factor": 32.0}, tie_word_embeddings=True, head_dim=16)),
    # Windows that act, here and below.
    "mistral": ("mistral", dict(head_dim=16, sliding_window=24)),
    "olmo3": ("olmo3", _OLMO),
    "olmo3-yarn": (
        "olmo3",
        _OLMO
        | dict(
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=dict(full_attention=_YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4)),
        ),
    ),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "qwen3_moe": (
        "qwen3_moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "qwen3_moe-unnormalised": (
        "qwen3_moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": (
        "qwen2_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    # As Moonlight has it: no latent of queries, one group, another epsilon outside the latents.
    "deepseek_v3-one-group": (
        "deepseek_v3",
        _DEEPSEEK | dict(q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=3, rms_norm_eps=1e-5),
    ),
    "deepseek_v3-yarn": ("deepseek_v3", _DEEPSEEK | dict(rope_parameters=_YARN, first_k_dense_replace=2)),
    "deepseek_v3-yarn-scaled": (
        "deepseek_v3",
        _DEEPSEEK | dict(rope_parameters=_YARN | dict(mscale=1.0, mscale_all_dim=0.707), first_k_dense_replace=0),
    ),
    # As Kimi-K2 has it: more experts than one byte numbers, and YaRN without a range between its two kinds of wavelengths.
    "deepseek_v3-kimi": (
        "deepseek_v3",
        _DEEPSEEK
        | dict(
            n_group=1,
            topk_group=1,
            n_routed_experts=288,
            n_shared_experts=1,
            moe_intermediate_size=8,
            routed_scaling_factor=2.827,
            rope_parameters=_YARN | dict(factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    # As GLM-4.5 has it, and as GLM-4.5-Air; then what the keys allow besides.
    "glm4_moe": ("glm4_moe", _GLM | dict(use_qk_norm=True, first_k_dense_replace=2)),
    "glm4_moe-air": ("glm4_moe", _GLM),
    "glm4_moe-plain": (
        "glm4_moe",
        _GLM
        | dict(
            attention_bias=False,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=4,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
        ),
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _GLM_LITE),
    "minimax_m2": ("minimax_m2", _MINIMAX),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss-other-keys": (
        "gpt_oss",
        _GPT_OSS
        | dict(
            layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
            rope_parameters=_YARN,
            tie_word_embeddings=True,
        ),
    ),
}

VARIANTS |= {
    "qwen3_next": ("qwen3_next", _DELTA | _DELTA_EXPERTS),
    "qwen3_next-other-keys": (
        "qwen3_next",
        _DELTA
        | _DELTA_EXPERTS
        | dict(
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_conv_kernel_dim=3,
            num_key_value_heads=1,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5": ("qwen3_5", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe", _DELTA | _DELTA_EXPERTS),
    # As published: the experts of a layer in one tensor, which transformers reads and does not write.
    "qwen3_5_moe-stacked": ("qwen3_5_moe", _DELTA | _DELTA_EXPERTS),
    "qwen3_5_vl": ("qwen3_5_vl", _DELTA_VL),
    "qwen3_5_moe_vl": ("qwen3_5_moe_vl", _DELTA_VL | _DELTA_EXPERTS),
    "qwen3_5_moe_vl-stacked": ("qwen3_5_moe_vl", _DELTA_VL | _DELTA_EXPERTS),
    "qwen3_vl": ("qwen3_vl", _QWEN3_VL),
    # As published: in stacks of transposed matrices, which transformers reads and does not write.
    "qwen3_vl_moe": ("qwen3_vl_moe", _QWEN3_VL | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)),
}


class Proof(NamedTuple):
    """What else the tests need to know of a family; every table of them that is not listed by hand takes it from here.

    `faults`: those of `family_jobs.py` that its logits must catch. `cuts_experts`: expert_tensor may be above 1.
    `served`: other values of its keys for a server (widths in multiples of 32), with the trainer's layout. `tokenizer`:
    the class that its folders name, and how a turn ends (`family_runs.py`). `server_names`: SGLang's own names of what
    a layer with experts, or any layer without, has on a server.
    """

    faults: tuple[str, ...]
    served: dict
    layout: dict
    tokenizer: tuple[str, str]
    server_names: frozenset[str]
    cuts_experts: bool = True


_LAYER_NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
_SERVED_DENSE = {"mlp.gate_up_proj.weight", "mlp.down_proj.weight"}
_SERVED_ATTENTION = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
_SERVED_LATENT = {
    f"self_attn.{name}.weight"
    for name in ("fused_qkv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")
}
PROOFS: dict[str, Proof] = {
    "glm4_moe_lite": Proof(
        faults=("permuted experts", "another layer's bias", "keys of all heads before values"),
        served=dict(kv_lora_rank=32, v_head_dim=16, moe_intermediate_size=32),
        layout=dict(expert=2),
        tokenizer=("PreTrainedTokenizerFast", "roles"),
        server_names=frozenset(
            _LAYER_NORMS
            | _SERVED_LATENT
            | {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
            | {"mlp.experts.w13_weight", "mlp.experts.w2_weight"}
            | {"mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"}
        ),
    ),
    "mistral": Proof(
        faults=("query, key and value one after the other", "a window of one token more"),
        served=dict(sliding_window=256),
        layout=dict(tensor=2),
        tokenizer=("LlamaTokenizerFast", "words"),
        server_names=frozenset(_LAYER_NORMS | _SERVED_DENSE | _SERVED_ATTENTION),
    ),
    "olmo3": Proof(
        faults=("another head's norm", "another layer's norm of outputs", "windows in the other layers"),
        served={},
        layout=dict(tensor=2),
        tokenizer=("PreTrainedTokenizerFast", "im"),
        server_names=frozenset(
            {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}
            | _SERVED_DENSE
            | _SERVED_ATTENTION
            | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        ),
    ),
    "minimax_m2": Proof(
        faults=(
            "swapped gate and up",
            "permuted experts",
            "another layer's bias",
            "query, key and value one after the other",
            "rotary elements over the whole head",
            "another head's norm",
        ),
        served=dict(intermediate_size=32),
        layout=dict(expert=2),
        tokenizer=("PreTrainedTokenizerFast", "roles"),
        server_names=frozenset(
            _LAYER_NORMS
            | {f"self_attn.{name}.weight" for name in ("qkv_proj", "o_proj", "q_norm", "k_norm")}
            | {
                f"block_sparse_moe.{name}"
                for name in ("gate.weight", "e_score_correction_bias", "experts.w13_weight", "experts.w2_weight")
            }
        ),
    ),
}
"""By variant: the first of its family."""


# SGLang's file of a family whose class is of another name, or only derived from another's.
SERVED_BY = {
    "mistral": ("LlamaForCausalLM", "llama.py"),
    "olmo3": ("Olmo2ForCausalLM", "olmo2.py"),
    "qwen3_vl_moe": ("Qwen3VLForConditionalGeneration", "qwen3_vl.py"),
}


def proof_of(family: str) -> str | None:
    """The variant of PROOFS that is of this family."""
    return next((variant for variant in PROOFS if VARIANTS[variant][0] == family), None)


def variant_config(variant: str, **changes) -> transformers.PretrainedConfig:
    """The variant's configuration as transformers has it, with other values of its keys."""
    family, own = VARIANTS[variant]
    model_class = getattr(transformers, FAMILIES[family].architecture)
    keys = _SHARED | own | changes
    if FAMILIES[family].text_part:
        keys = dict(text_config=keys, vision_config=_VISION | dict(out_hidden_size=keys["hidden_size"]))
    return model_class.config_class(**keys)


def token_ids() -> np.ndarray:
    """[NUM_TOKENS] int64: the sequence on which logits are compared."""
    return np.random.default_rng(11).integers(0, VOCAB_SIZE, NUM_TOKENS)


def make_family_folder(
    folder: Path, variant: str, dtype: torch.dtype = torch.float32, seed: int = 5, **changes: Any
) -> Path:
    """A checkpoint as transformers saves it, every weight random (biases and norms too), and its logits: `logits.npy` of
    fp32, `exact_logits.npy` of fp64. `changes`: other values of the variant's keys.
    """
    family, own = VARIANTS[variant]
    changes = {key: value for key, value in changes.items() if key in _SHARED | own}
    model_class = getattr(transformers, FAMILIES[family].architecture)
    torch.manual_seed(seed)
    model = model_class(variant_config(variant, **changes))
    if FAMILIES[family].text_part:
        # With the next line, and text before images below, a vision-language class has the text model's numbers.
        torch.manual_seed(seed)
        text = variant.replace("_vl", "")
        getattr(transformers, FAMILIES[VARIANTS[text][0]].architecture)(variant_config(text, **changes))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda named: ".visual." in named[0]):
            noise = (2.0 if name.endswith("sinks") else 0.1) * torch.randn(parameter.shape)
            around_one = "norm" in name and not (FAMILIES[family].delta_net and not name.endswith("attn.norm.weight"))
            parameter.copy_(1 + noise if around_one else noise)
            if name.endswith("A_log"):  # heads that remember from one token to a hundred
                parameter.copy_(20 * noise - 2)
            if name.endswith("conv1d.weight"):  # of few elements
                parameter.copy_(2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(_KEPT_IN_FP32):  # a part of the scores' own size
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    biases = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(_KEPT_IN_FP32)}
    model.to(dtype)
    for name, bias in biases.items():  # as `from_pretrained` does
        model.get_buffer(name).data = bias
    model.save_pretrained(folder)
    if variant.endswith("-stacked"):  # the modules' own tensors, under their own names
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    if FAMILIES[family].may_stack == "transposed":
        _transpose_stacks(folder / "model.safetensors")
    if not (folder / "generation_config.json").is_file():
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    tokens = torch.from_numpy(token_ids())
    with torch.no_grad():
        np.save(folder / "logits.npy", model.float().eval()(tokens[None]).logits[0].numpy())
    np.save(folder / "exact_logits.npy", exact_logits(model, tokens).numpy())
    return folder


def _transpose_stacks(file: Path) -> None:
    held = {name: t.mT.contiguous() if ".mlp.experts." in name else t for name, t in load_file(file).items()}
    save_file(held, file, metadata={"format": "pt"})


def save_gradients(folder: Path, variant: str) -> None:
    """`gradients.safetensors`, in the checkpoint's folder: of the sum of the log-probs of all tokens but the first,
    computed in fp64.
    """
    model_class = getattr(transformers, FAMILIES[VARIANTS[variant][0]].architecture)
    model = model_class.from_pretrained(folder, dtype="float64", experts_implementation="eager")
    ids = torch.from_numpy(token_ids())
    with kept_in_fp64():
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(dim=-1)
        log_probs.gather(1, ids[1:, None]).sum().backward()
    with torch.no_grad():  # as transformers saves weights: under the names of checkpoints, expert by expert
        for parameter in model.parameters():
            parameter.copy_(0 if parameter.grad is None else parameter.grad)  # text has none in a vision tower
    model.save_pretrained(folder / "gradients")
    if FAMILIES[VARIANTS[variant][0]].may_stack == "transposed":
        _transpose_stacks(folder / "gradients" / "model.safetensors")
    (folder / "gradients" / "model.safetensors").rename(folder / "gradients.safetensors")
