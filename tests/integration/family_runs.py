"""Short runs of every family through `gspo-mega train`, from folders that hold what a published one holds: weights, both
configurations, a tokenizer of the family's usual class, and a chat template.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from family_models import PROOFS, make_family_folder
from run_support import Command

NUM_STEPS = 2
FAMILIES = {
    "llama2": ("LlamaTokenizerFast", "words"),
    "llama3": ("PreTrainedTokenizerFast", "eot"),
    "qwen2": ("Qwen2TokenizerFast", "im"),
    "qwen3": ("Qwen2Tokenizer", "im"),
    "qwen3_moe": ("Qwen2Tokenizer", "im"),
    "qwen2_moe": ("Qwen2TokenizerFast", "im"),
    "mixtral": ("LlamaTokenizer", "words"),
    "deepseek_v3": ("LlamaTokenizerFast", "sentence"),
    "glm4_moe": ("PreTrainedTokenizerFast", "roles"),
    "gpt_oss": ("PreTrainedTokenizerFast", "channels"),
    "qwen3_next": ("Qwen2Tokenizer", "im"),
    "qwen3_5": ("Qwen2Tokenizer", "im"),
    "qwen3_5_moe": ("Qwen2Tokenizer", "im"),
    "qwen3_5_moe-stacked": ("Qwen2Tokenizer", "im"),
    **dict.fromkeys(
        ("qwen3_5_vl", "qwen3_5_moe_vl", "qwen3_5_moe_vl-stacked", "qwen3_vl", "qwen3_vl_moe"), ("Qwen2Tokenizer", "im")
    ),
    "deepseek_v3-kimi": ("PreTrainedTokenizerFast", "im"),
    **{variant: proof.tokenizer for variant, proof in PROOFS.items()},
}
"""The variant of `family_models` -> the tokenizer's class as the family's folders name it, and how it ends a turn."""

# special tokens (begin, end, and others), template. Written for these tests in the manner of the published ones.
_TEMPLATES: dict[str, tuple[list[str], str]] = {
    "words": (
        ["<s>", "</s>"],
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}"
        "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    ),
    "eot": (
        ["<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    "im": (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "sentence": (
        ["<|begin|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"],
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
        "{{ m.content }}<|end_of_sentence|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}",
    ),
    "roles": (
        ["<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>"],
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    "channels": (
        ["<|startoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>"],
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ),
}


# Sides of whole 128 x 128 blocks, as servers of FP8 blocks need them, and a projection of 16 x 49 rows.
BLOCKS = dict(hidden_size=128, head_dim=64, intermediate_size=128)
BLOCKS |= dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)
BLOCKS |= dict(linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=32)


def make_folder(folder: Path, variant: str, **sizes: int) -> Path:
    """A small random model of a family. Its end token has id 2, as in `family_models`. `sizes`: other values of keys."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Multiples of 32: without a GPU, SGLang pads others, and then holds other tensors than it is sent.
    served = PROOFS[variant].served if variant in PROOFS else {}
    widths = dict(intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    make_family_folder(folder, variant, **widths | served | sizes)
    tokenizer_class, manner = FAMILIES[variant]
    (begin, end, *others), template = _TEMPLATES[manner]
    special = [begin, "<unk>", end, *others]
    if manner == "words":  # as sentencepiece makes it: spaces as a sign of their own, and bytes for the rest
        words = ["\u2581", *"0123456789+-=*/().,:;[]", *map(chr, range(65, 91)), *map(chr, range(97, 123))]
        vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        made = Tokenizer(
            models.BPE(
                vocab={token: place for place, token in enumerate(vocabulary)},
                merges=[],
                byte_fallback=True,
                unk_token="<unk>",
                fuse_unk=True,
            )
        )
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        made = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(vocabulary)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": tokenizer_class,
        "bos_token": begin,
        "eos_token": end,
        "pad_token": begin,
        "unk_token": "<unk>",
        "additional_special_tokens": others,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    (folder / "chat_template.jinja").write_text(template)
    if variant == "deepseek_v3-kimi":  # the one name of a model that its folders have for themselves
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}, indent=1))
    return folder


def train(
    folder: Path, variant: str, *overrides: str, forked: bool = False, k3: float = 1e-4, **sizes: int
) -> list[dict[str, float]]:
    """Make a folder of the family in `folder` and train it for two steps, by the command with `overrides` and with a real
    server. Returns the lines of metrics.jsonl. Raises AssertionError: the run ended otherwise, left a process, or did not
    train, or `mismatch/k3` is not below `k3`. `sizes`: of the model.
    """
    make_folder(folder / "model", variant, **sizes)
    rows = [{"prompt": f"{number}+{number + 3}=", "answer": str(2 * number + 3)} for number in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(
        f"""\
run: {{name: run, dir: runs, seed: 1}}
model: {{path: model}}
algorithm: gspo
batch: {{prompts_per_step: 4, group_size: 4, num_mini_batches: 2, micro_batch_tokens: 512}}
cluster: {{num_nodes: 1, ranks_per_node: 1}}
precision: fp32
optimizer: {{lr: 1e-4, schedule: constant}}
train: {{num_steps: {NUM_STEPS}}}
data: {{path: train.jsonl, max_prompt_tokens: 64}}
reward: {{functions: [{{function: "run_support:distinct"}}]}}
rollout: {{max_new_tokens: 16, no_server_deadline_seconds: 900}}
server: {{num_servers: 1, max_total_tokens: 4096, start_deadline_seconds: 600}}
publish: {{method: disk}}
"""
    )
    command = Command(folder, "train", "config.yaml", *overrides, forked=forked)
    try:
        assert command.finish() == 0, command.out + command.err
        assert command.left_running(folder / "runs" / "run") == []
    finally:
        command.end()
    lines = [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1)), lines
    for line in lines:
        assert line["optimizer/grad_norm"] > 0 and math.isfinite(line["optimizer/grad_norm"]), line
        assert line["publish/weight_version"] == line["step"], line
        assert line["mismatch/k3"] < k3, line  # the same weights on both sides; a tie of a router may cost a token more
    return lines
