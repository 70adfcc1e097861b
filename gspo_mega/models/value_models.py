"""Critics and reward models as Hugging Face models: their tensors and config.json, and their sizes on a server.

transformers has two classes for a backbone with a number for each state, `...ForTokenClassification` and
`...ForSequenceClassification`, both with `score.weight`; a reward model is of the second one. First come these names,
for import, export and conversion of a critic. Then come the sizes of a sequence classifier of any architecture, as a
server of a reward model loads it, and whether SGLang can serve it; they are read from config.json and the headers of
the weights' files. This module moves no data and imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError, ModelError
from gspo_mega.base.untrusted import MOST_JSON_BYTES, open_regular, parse_json, read_json_file
from gspo_mega.models.huggingface import ARCHITECTURES, read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors, is_ignored_tensor

VALUE_HEAD = "value_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"
_LM_HEAD = "output_layer.weight"
_CAUSAL, _SEQUENCES, _TOKENS = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"


def read_critic_spec(folder: str | Path) -> ModelSpec:
    """As `read_model_spec`, for the folder of a policy, a critic or a reward model.

    Raises ModelError as `read_model_spec` does, and for a classifier of several labels.
    """
    return read_model_spec(folder, causal_architecture)


def is_classifier(folder: Path) -> bool:
    """Whether the folder's config.json names a class with `score.weight`."""
    names = read_json_file(folder / "config.json").get("architectures")
    return isinstance(names, list) and any(str(name).endswith((_SEQUENCES, _TOKENS)) for name in names)


def causal_architecture(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A parsed config.json. If its architecture is a classifier, it is replaced by that of the policy with the same
    backbone.

    Raises ModelError for a classifier of several labels.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return raw
    causal = names[0].replace(_SEQUENCES, _CAUSAL).replace(_TOKENS, _CAUSAL)
    if causal == names[0] or causal not in ARCHITECTURES:
        return raw
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if count != 1:
        raise ModelError(f"{where}: {names[0]} has {count} labels (id2label); a critic has one, its value")
    return raw | {"architectures": [causal]}


def critic_config_json(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a critic whose backbone is described by `raw`: that of a classifier with one label."""
    (name,) = raw["architectures"]
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return raw | {"architectures": [name.replace(_CAUSAL, _SEQUENCES)]} | labels


def critic_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of a critic with this backbone: those of the policy except its LM head, and `score.weight`."""
    return [entry for entry in hf_tensors(spec) if entry.parameter != _LM_HEAD] + [_head_entry(SCORE, spec.hidden_size)]


def zero_bias() -> TensorEntry:
    """`score.bias`, which is written in addition to `critic_tensors`. A critic has none, but two readers need one:
    transformers gives token classifiers a bias, and SGLang gives one to some sequence classifiers.
    """
    return _head_entry(SCORE_BIAS)


def is_ignored_critic_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a critic's folder may hold this tensor in addition to `critic_tensors`, such as a policy's LM head or the
    bias. Such tensors are ignored.
    """
    return name in ("lm_head.weight", SCORE_BIAS) or is_ignored_tensor(spec, name)


def _head_entry(name: str, *columns: int) -> TensorEntry:
    return TensorEntry(
        name=name,
        shape=(1, *columns),
        parameter=VALUE_HEAD,
        role="whole",
        sharding="replicated",
        stage="last",
        layer=None,
        expert=None,
    )


# --- Classifiers on a server ---------------------------------------------------------------------------------

# SGLang 0.5.23 gives the head of these a bias. If the weights have none, the bias stays uninitialized memory.
_WITH_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


@dataclass(frozen=True)
class ClassifierSizes:
    """`elements`: the number of elements of the weights. `num_heads`, `num_kv_heads`, `head_dim`: None if config.json
    lacks them. `latent`: elements per token and layer of a latent cache, which each GPU of a server holds whole.
    `positions`: the largest number of tokens of a text, None for no limit.
    """

    elements: int
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    latent: int | None
    positions: int | None

    def cached_elements(self, tensor: int) -> int | None:
        """The elements of one token in the cache of one of `tensor` GPUs; None if the sizes are not known."""
        if self.num_layers is None:
            return None
        if self.latent is not None:
            return self.num_layers * self.latent
        if self.num_kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.num_layers * max(1, self.num_kv_heads // tensor) * self.head_dim


def read_sizes(folder: str | Path) -> ClassifierSizes:
    """The sizes of the classifier in `folder`. Raises ConfigError if it is not a model's folder, or if its weights are
    in a form that servers do not load.
    """
    raw, shapes = read_config(Path(folder)), _shapes_in(Path(folder))
    if shapes is None:
        raise ConfigError(f"{folder} has no weights as safetensors; servers load no other form, which may hold code")

    def number(*names: str) -> int | None:
        return next((raw[name] for name in names if isinstance(raw.get(name), int)), None)

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    latent, rope = number("kv_lora_rank"), number("qk_rope_head_dim")
    return ClassifierSizes(
        elements=sum(map(math.prod, shapes.values())),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", "num_attention_heads"),
        head_dim=number("head_dim") or (hidden // heads if hidden and heads else None),
        latent=latent + rope if latent is not None and rope is not None else None,
        positions=number("max_position_embeddings"),
    )


def check_head(folder: str) -> None:
    """Raise ConfigError if SGLang would add a number to every score that is in no file."""
    architectures = read_config(Path(folder)).get("architectures") or []
    if any(name in _WITH_BIAS for name in architectures) and "score.bias" not in (_shapes_in(Path(folder)) or {}):
        raise ConfigError(
            f"{folder}: its weights have no score.bias, and SGLang gives the head of a {architectures[0]} one that it"
            " does not initialize: it would add another number to every score on each start. Add a tensor `score.bias`"
            " of zeros, or fit the model with gspo-mega reward-model, which writes it"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError."""
    try:
        raw = read_json_file(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no Hugging Face model folder: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{folder}/config.json holds no object, so it describes no model")
    return raw


def _shapes_in(folder: Path) -> dict[str, list[int]] | None:
    """Shapes by name, from the headers of the safetensors files; None if there are none. Raises ConfigError for a
    damaged file.
    """
    paths = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, list[int]] = {}
    for path in paths:
        try:
            with open_regular(path) as file:
                header = parse_json(file.read(min(int.from_bytes(file.read(8), "little"), MOST_JSON_BYTES)))
            shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged or cut off: {error}") from error
    return shapes if paths else None
