"""Reads a Hugging Face folder: its `config.json` as a ModelSpec, the files that describe the model, and stamps of its
weights.

The folders are those of transformers 4.x and 5.x. Settings that would change the maths and that the engine does not
implement are refused by name: a model that computes something slightly different from its checkpoint is worse than one
that does not start.

`description_files` are the files that an export or a conversion copies, without weights and code. A downloaded folder
is not trusted: a link in it could carry any file that this user can read into a folder that is then published, so only
some links are followed. The stamps are digests by which copies that are made of a folder are named, so that a copy is
used only for its own source. `weights_stamp` uses names, sizes and times of files; `content_stamp`, for a folder that
may be copied, reads the ends of each file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ModelError
from gspo_mega.base.hub import missing_hint
from gspo_mega.base.untrusted import (
    MOST_JSON_BYTES,
    NoRegularFileError,
    find_unreadable_entry,
    open_regular,
    parse_json,
    read_json_file,
)
from gspo_mega.models.block_fp8 import read_block_fp8
from gspo_mega.models.delta_net import read_delta_net
from gspo_mega.models.end_tokens import stated_end
from gspo_mega.models.families import FAMILIES, ExpertKeys, Family, has_stacks
from gspo_mega.models.hf_fields import (
    MOST_EXPERTS_OF_ALL_LAYERS,
    ConfigReader,
    is_fp4,
    needs_plain_copy,
    read_experts,
    read_gpt_oss,
    read_latent_attention,
    read_minimax,
    read_rope,
    read_window,
    shown,
)
from gspo_mega.models.spec import BlockFp8, ModelSpec, MoeSpec

ARCHITECTURES = {family.architecture: name for name, family in FAMILIES.items()}
_DTYPES = ("float32", "bfloat16")

# If one of these keys is set, the model computes something that no family here implements. (False, 0 and null count as
# absent.)
_FOREIGN = {
    "shared_expert_intermediate_size": "shared experts",
    "n_shared_experts": "shared experts",
    "num_nextn_predict_layers": "multi-token prediction",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "q_lora_rank": "latent attention",
    "kv_lora_rank": "latent attention",
    "mlp_bias": "biases in the MLP",
}

# Architectures that users ask for and that the installed Megatron-Core and SGLang cannot compute, with the reason.
# tests/unit/models/test_not_computed.py asks their classes whether each is still true.
_NOT_COMPUTED = {
    "Gemma4ForCausalLM": "its layers without a window have wider heads than the others (global_head_dim), and"
    " Megatron-Core has one width of heads (kv_channels) for all layers of a model",
    "Ministral3ForCausalLM": "its queries are multiplied by a factor that grows with their position"
    " (llama_4_scaling_beta), which Megatron-Core's attention does not have",
    "MinistralForCausalLM": "SGLang has no model of this name; published Ministral-8B names MistralForCausalLM",
}
# Architectures that could be computed, and that nothing here builds.
_SPARSE = "an indexer chooses the keys that each query sees (index_topk), which is not implemented here"
_NOT_BUILT = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "NemotronHForCausalLM": "layers with Mamba, and experts without a gate (mlp_hidden_act), are not implemented here",
}
_WITH_IMAGES = "ForConditionalGeneration"


def _why_not(architectures: object) -> str | None:
    """Why a known architecture is refused; None for one that nothing is known of."""
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    name = str(architectures[0])
    if name.endswith(_WITH_IMAGES):
        trained = ", ".join(known for known in ARCHITECTURES if known.endswith(_WITH_IMAGES))
        return f"models named {_WITH_IMAGES} read images or sounds too; only the text part of {trained} is trained"
    return (_NOT_COMPUTED | _NOT_BUILT).get(name)


def read_model_spec(
    folder: str | Path, renamed: Callable[[dict[str, Any], str], dict[str, Any]] = lambda raw, where: raw
) -> ModelSpec:
    """Read `config.json` (and `generation_config.json` for further end-of-sequence ids) of a folder.

    A `.json` file instead of a folder is read as a config.json: a shape to plan with. `renamed`: a function from a
    parsed config.json and its path to the config.json that is read in its place.

    Raises ModelError listing everything that is missing, malformed or unsupported, and for a link that leads out of the
    folder.
    """
    folder = Path(folder)
    if folder.is_file() and folder.suffix == ".json":
        return spec_from_config(renamed(_read_json(folder) or {}, str(folder)), where=str(folder))
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; give a Hugging Face folder with config.json and safetensors"
            f"{missing_hint(folder)}"
        )
    if (odd := find_unreadable_entry(folder)) is not None:
        raise ModelError(odd)
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ModelError(f"{folder}: it has no config.json; give a Hugging Face folder")
    description_files(folder)  # refuses a bad link now, on a login node, instead of at the first export
    if (folder / _MODELOPT).is_file() and not raw.get("quantization_config"):
        raise ModelError(
            f"{folder / _MODELOPT}: the weights are quantised, which config.json does not say; of quantised weights"
            " only FP8 in blocks can be read. Give the folder of the plain model"
        )
    generation = _read_json(folder / "generation_config.json") or {}
    where = str(folder / "config.json")
    spec = spec_from_config(renamed(raw, where), where=where, generation=generation)
    family = FAMILIES[spec.family]
    may_stack = family.may_stack is not None
    return replace(spec, stacks_experts=may_stack and has_stacks(_tensor_names(folder), family.carried))


def _tensor_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder; none if files are missing or damaged, which whoever reads them says."""
    try:
        if (index := folder / _INDEX).is_file():
            return set(read_json_file(index)["weight_map"])
        return set(_header(folder / _SINGLE))
    except _UNREADABLE:
        return set()


def carried_bytes(folder: Path, beginning: str) -> tuple[int, int]:
    """(number, bytes) of the tensors in a folder whose names begin so; zeros if files are missing or damaged."""
    try:
        names = read_json_file(folder / _INDEX)["weight_map"] if (folder / _INDEX).is_file() else {"": _SINGLE}
        files = {file for name, file in names.items() if not name or name.startswith(beginning)}
        held = [
            value["data_offsets"]
            for file in files
            for name, value in _header(folder / file).items()
            if name.startswith(beginning)
        ]
        return len(held), sum(end - start for start, end in held)
    except _UNREADABLE:
        return 0, 0


_MODELOPT = "hf_quant_config.json"  # NVIDIA's ModelOpt, as in nvidia/Llama-3.1-70B-Instruct-FP8
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name."""
    with open_regular(path) as file:
        return parse_json(file.read(min(int.from_bytes(file.read(8), "little"), MOST_JSON_BYTES)))


def read_stored(folder: str | Path) -> BlockFp8 | None:
    """How a folder holds its weights, from its own config.json only. None if no weight is in FP8 blocks, or if there is
    no config.json.

    Raises ModelError for a quantisation that is not supported.
    """
    file = Path(folder) / "config.json"
    reader = ConfigReader(_read_json(file) or {})
    stored = None if is_fp4(reader.raw) else read_block_fp8(reader)
    if reader.problems:
        raise ModelError("\n".join(f"{file}: {problem}" for problem in reader.problems))
    return stored


def folder_needs_plain_copy(folder: str | Path, dtype: str) -> bool:
    """`needs_plain_copy` of a folder; false without a config.json. Raises ModelError."""
    return needs_plain_copy(_read_json(Path(folder) / "config.json") or {}, dtype)


def read_end_tokens(folder: str | Path) -> tuple[int, ...]:
    """The ids that generation_config.json and config.json of a folder name as ends of a response: the `eos_token_ids`
    of its ModelSpec. Empty if only the tokenizer's files name an end token.

    Raises ModelError if the folder is missing, if an id is not a token id, or if no file names one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: no such folder; the one of a Hugging Face model or tokenizer is needed{missing_hint(folder)}"
        )
    reader = ConfigReader(text_values(_read_json(folder / "config.json") or {}))
    ids = _eos_token_ids(reader, _read_json(folder / "generation_config.json") or {}, reader.raw.get("vocab_size") or 0)
    if reader.problems:
        raise ModelError("\n".join(f"{folder}: {problem}" for problem in reader.problems))
    if not ids and stated_end(folder) is None:
        raise ModelError(
            f"{folder}: neither generation_config.json nor config.json names eos_token_id, and tokenizer_config.json no"
            " eos_token that the tokenizer has; a response could never end"
        )
    return ids


def spec_from_config(
    raw: dict[str, Any], where: str = "config.json", generation: dict[str, Any] | None = None
) -> ModelSpec:
    """The ModelSpec of a parsed `config.json`. `where` names it in errors. Raises ModelError."""
    try:
        return _spec_from_config(raw, where, generation)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        # For example a list in place of a text, or a text in place of a number.
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelError(f"{where}: a value is of another form than any model's is ({why})") from error


def _spec_from_config(raw: dict[str, Any], where: str, generation: dict[str, Any] | None) -> ModelSpec:
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        reason = _why_not(architectures)
        problem = "; it must name exactly one" if reason is None else f", which is not supported: {reason}"
        raise ModelError(
            f"{where}: architectures is {shown(architectures)}{problem}; supported: {', '.join(ARCHITECTURES)}"
        )
    name = ARCHITECTURES[architectures[0]]
    family = FAMILIES[name]
    reader = ConfigReader(text_values(raw))
    _refuse_other_maths(reader, family)

    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads")
    num_kv_heads = num_heads if reader.is_omitted("num_key_value_heads", family) else reader.size("num_key_value_heads")
    latent = read_latent_attention(reader) if family.latent else None
    if latent is not None:
        head_dim = latent.content_dim + latent.rotary_dim
    elif reader.is_omitted("head_dim", family):
        head_dim = hidden_size // num_heads if num_heads else 0
        if num_heads and hidden_size % num_heads:
            reader.problem(
                "num_attention_heads",
                f"{num_heads} does not divide hidden_size {hidden_size}, and there is no head_dim",
            )
    else:
        head_dim = reader.size("head_dim")
    if num_kv_heads and num_heads % num_kv_heads:
        reader.problem("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
    if family.norms_outputs and head_dim * num_heads != hidden_size:
        reader.problem("head_dim", f"{head_dim}: SGLang takes hidden_size / num_attention_heads; supported: only that")
    if latent is None and head_dim % 2:
        reader.problem("head_dim", f"{head_dim} is odd; rotary positions need pairs")
    vocab_size = reader.size("vocab_size")
    rope_theta, rope_scaling, rotary_share = read_rope(reader, family)
    if rotary_share < 1 and int(head_dim * rotary_share) % 2:
        reader.problem("partial_rotary_factor", f"{rotary_share} of head_dim {head_dim} is odd; positions need pairs")
    num_layers = reader.size("num_hidden_layers")
    spec = ModelSpec(
        family=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        # Qwen3.5 with experts has no dense layer, and no width of one.
        intermediate_size=reader.size("intermediate_size", *(["moe_intermediate_size"] if family.delta_net else [])),
        vocab_size=vocab_size,
        max_position_embeddings=reader.size("max_position_embeddings"),
        rope_theta=rope_theta,
        rms_norm_eps=reader.number("rms_norm_eps"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qk_norm=_has(reader, family.qk_norm),
        attention_bias=_has(reader, family.qkv_bias),
        torch_dtype=_dtype(reader),
        eos_token_ids=_eos_token_ids(reader, generation or {}, vocab_size),
        moe=None if family.experts is None else _moe(reader, family.experts),
        rope_scaling=rope_scaling,
        rotary_share=rotary_share,
        latent=latent,
        num_ignored_layers=reader.count("num_nextn_predict_layers"),
        stored=None if family.gpt_oss and is_fp4(raw) else read_block_fp8(reader),
        raw=raw,
        window=read_window(reader, family, num_layers),
        **(read_gpt_oss(reader) if family.gpt_oss else {}),
        **(read_delta_net(reader, num_layers) if family.delta_net else {}),
    )
    if spec.moe is not None and num_layers * spec.moe.num_experts > MOST_EXPERTS_OF_ALL_LAYERS:
        text = f"{num_layers} layers of {spec.moe.num_experts} experts; no model has more than"
        reader.problem("num_hidden_layers", f"{text} {MOST_EXPERTS_OF_ALL_LAYERS} experts in all")
    if reader.problems:
        raise ModelError("\n".join(f"{where}: {problem}" for problem in reader.problems))
    return spec


def text_values(raw: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says of the text model: of a vision-language model its `text_config`, with the values that
    count for the whole from the top; of others all.
    """
    if not any(family.text_part and raw.get("architectures") == [family.architecture] for family in FAMILIES.values()):
        return raw
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else {}
    of_all = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
    above = {key: raw[key] for key in of_all if raw.get(key) is not None}
    return text | above | {"tie_word_embeddings": raw.get("tie_word_embeddings", False)}


def _has(reader: ConfigReader, own: bool | str) -> bool:
    """A family's own value, or the value of the key that it names."""
    return own if isinstance(own, bool) else reader.flag(own, False)


def _refuse_other_maths(reader: ConfigReader, family: Family) -> None:
    raw = reader.raw
    if raw.get("hidden_act", "silu") != "silu":
        reader.problem("hidden_act", f"{raw['hidden_act']!r} is not supported; supported: 'silu'")
    # If a family always has biases on query, key and value, the key is not read.
    if raw.get("attention_bias") and not family.qkv_bias:
        reader.problem("attention_bias", "biases in attention are not supported; supported: false")
    if raw.get("qkv_bias") is False and family.qkv_bias:
        reader.problem("qkv_bias", "false: this family without biases on query, key and value is not supported")
    if raw.get("attention_dropout"):
        reader.problem("attention_dropout", f"{raw['attention_dropout']!r} is not supported; supported: 0")
    reads_layers = family.delta_net or family.windows in ("every other", "three of four")
    layer_types = [] if reads_layers else raw.get("layer_types") or []
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        key = "use_sliding_window" if raw.get("use_sliding_window") else "layer_types"
        reader.problem(
            key, "sliding-window and other partial attention is not supported; supported: full attention in every layer"
        )
    for key, meaning in (_FOREIGN | dict(family.refused)).items():
        if raw.get(key) and key not in family.understood:
            reader.problem(key, f"{meaning} are not supported; use a checkpoint without them")
    if family.experts is not None:
        if raw.get("mlp_only_layers"):
            reader.problem(
                "mlp_only_layers",
                f"{raw['mlp_only_layers']!r}: dense layers between MoE layers are not supported; supported: []",
            )
        if raw.get("decoder_sparse_step", 1) != 1:
            reader.problem(
                "decoder_sparse_step",
                f"{raw['decoder_sparse_step']!r} is not supported; supported: 1, experts in every layer",
            )


def _dtype(reader: ConfigReader) -> str:
    key = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    # transformers and torch both take float32 if the key is absent. MXFP4 weights are read in bfloat16.
    value = reader.raw.get(key) or ("bfloat16" if is_fp4(reader.raw) else "float32")
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        reader.problem(
            key,
            f"{value!r} is not supported; supported: {', '.join(_DTYPES)}. Let transformers write the weights anew:"
            " AutoModelForCausalLM.from_pretrained(FOLDER, dtype='bfloat16').save_pretrained(OTHER)",
        )
    return name


def _eos_token_ids(reader: ConfigReader, generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids that end a response: those of generation_config.json and of config.json, each once, in that order."""
    ids: list[int] = []
    for source, value in (
        ("generation_config.json's eos_token_id", generation.get("eos_token_id")),
        ("eos_token_id", reader.raw.get("eos_token_id")),
    ):
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int)
                or not 0 <= token_id < (vocab_size or math.inf)
            ):
                reader.problem(source, f"{token_id!r} is not a token id below vocab_size {vocab_size}")
            elif token_id not in ids:
                ids.append(token_id)
    return tuple(ids)


def _moe(reader: ConfigReader, keys: ExpertKeys) -> MoeSpec:
    num_experts = reader.size(*keys.num_experts)
    experts_per_token = reader.size("num_experts_per_tok")
    if 0 < num_experts < experts_per_token:
        reader.problem("num_experts_per_tok", f"{experts_per_token} is more than the {num_experts} experts")
    intermediate_size = reader.size(keys.intermediate_size)
    if keys.deepseek:
        return read_experts(reader, num_experts, experts_per_token, intermediate_size, keys.lists_layers)
    if keys.minimax:
        return read_minimax(reader, num_experts, experts_per_token, intermediate_size)
    normalises = keys.norm_topk_prob
    if normalises is None:
        normalises = reader.flag("norm_topk_prob", keys.normalises)
    elif reader.raw.get("norm_topk_prob", normalises) is not normalises:
        reader.problem(
            "norm_topk_prob",
            f"{reader.raw['norm_topk_prob']!r}: transformers does not read it here, and"
            f" SGLang does; supported: {normalises}",
        )
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_intermediate_size=intermediate_size,
        norm_topk_prob=normalises,
        shared_intermediate_size=reader.size(keys.gated_shared) if keys.gated_shared is not None else 0,
        shared_gate=keys.gated_shared is not None,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no file. Raises ModelError naming file and line."""
    try:
        value = read_json_file(path)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8 text") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    except NoRegularFileError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return value


# --- Files that describe a model -----------------------------------------------------------------------------

# Configuration, generation configuration, tokenizer, chat template, model card. Never code: nothing here runs it.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".spm", ".bpe", ".vocab", ".md")
_WITHOUT_SUFFIX = ("LICENSE", "LICENCE", "NOTICE", "README", "COPYING")
# Lists of the weights. Code that writes weights writes these lists anew.
_OF_WEIGHTS = (".index.json", "manifest.json")


def description_files(folder: Path) -> list[Path]:
    """The files of `folder` that describe its model, by name.

    A link is followed inside the folder, into the blobs of a Hugging Face cache that the folder belongs to, and to the
    file of the same name in another model's folder. Raises ModelError naming a link that leads elsewhere.
    """
    files = sorted(entry for entry in folder.iterdir() if entry.is_file() and _describes(entry.name))
    for file in files:
        if file.is_symlink() and not _may_lead_to(file, folder):
            raise ModelError(
                f"{file}: this link leads to {os.path.realpath(file)}, outside the model's folder; its content would be"
                " copied into every export. Put the file itself there, or remove the link"
            )
    return files


def _describes(name: str) -> bool:
    if name.startswith(".") or name.endswith(_OF_WEIGHTS):
        return False
    return name.endswith(_SUFFIXES) or (name.partition(".")[0] in _WITHOUT_SUFFIX and not name.endswith((".py", ".sh")))


def _may_lead_to(link: Path, folder: Path) -> bool:
    target, home = Path(os.path.realpath(link)), Path(os.path.realpath(folder))
    if target.is_relative_to(home):
        return True
    # models--org--name/snapshots/REVISION/FILE -> models--org--name/blobs/HASH
    if home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs":
        return True
    return target.name == link.name and (target.parent / "config.json").is_file()


# --- Stamps of weights ---------------------------------------------------------------------------------------


def weights_stamp(folder: str | Path, *settings: object) -> str:
    """A digest of 12 hex digits, of the folder's absolute path, its safetensors and config.json (names, sizes, times of
    the last change), and the `repr` of `settings`, on which a copy depends too. A file that is written again has
    another time. Raises OSError.
    """
    path = Path(folder)
    files = sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    found = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr((str(path.absolute()), found, settings)).encode()).hexdigest()[:12]


_END_BYTES = 64 * 1024


def content_stamp(folder: str | Path) -> str:
    """A digest of 12 hex digits, of the weights in a Hugging Face folder or in its `megatron` subfolder: each file's
    name and size and its first and last 64 KiB. It does not depend on the folder's place. Raises OSError.
    """
    digest = hashlib.sha256()
    for file in sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("megatron/*.distcp")]):
        size = file.stat().st_size
        digest.update(repr((file.name, size)).encode())
        with open_regular(file) as opened:
            digest.update(opened.read(_END_BYTES))
            opened.seek(max(0, size - _END_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:12]
