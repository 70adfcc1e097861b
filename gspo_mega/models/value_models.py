"""A critic as a Hugging Face model: which tensors it has, and what config.json says of it.

transformers has two classes for a backbone with a number for each state, `...ForTokenClassification` and
`...ForSequenceClassification`, both with `score.weight`; a reward model is of the second one. Owns these names, for
import, export and conversion. Moves no data and imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ModelError
from gspo_mega.base.guarded_files import read_json_file
from gspo_mega.models.families import TensorEntry, hf_tensors, may_be_there
from gspo_mega.models.huggingface import ARCHITECTURES, read_model_spec
from gspo_mega.models.spec import ModelSpec

VALUE_HEAD = "value_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"
_LM_HEAD = "output_layer.weight"
_CAUSAL, _SEQUENCES, _TOKENS = "ForCausalLM", "ForSequenceClassification", "ForTokenClassification"


def read_critic_spec(folder: str | Path) -> ModelSpec:
    """The shape of a critic's folder: as `read_model_spec`, of a policy, a critic or a reward model.

    Raises ModelError as it does, and for a classifier of several labels.
    """
    return read_model_spec(folder, causal_architecture)


def is_classifier(folder: Path) -> bool:
    """Whether the folder's config.json names a class with `score.weight`."""
    names = read_json_file(folder / "config.json").get("architectures")
    return isinstance(names, list) and any(str(name).endswith((_SEQUENCES, _TOKENS)) for name in names)


def causal_architecture(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A parsed config.json whose classifier, if it is one, is named as the policy with its backbone.

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
    """The config.json of a critic whose backbone is described by `raw`: of a classifier with one label."""
    (name,) = raw["architectures"]
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return raw | {"architectures": [name.replace(_CAUSAL, _SEQUENCES)]} | labels


def critic_tensors(spec: ModelSpec) -> list[TensorEntry]:
    """Every tensor of a critic with this backbone: those of the policy but for its LM head, and `score.weight`."""
    return [entry for entry in hf_tensors(spec) if entry.parameter != _LM_HEAD] + [_of_head(SCORE, spec.hidden_size)]


def zero_bias() -> TensorEntry:
    """`score.bias`, which is written beside `critic_tensors`: a critic has none, but two readers need one. transformers
    gives token classifiers a bias, and SGLang some sequence classifiers.
    """
    return _of_head(SCORE_BIAS)


def may_be_beside(spec: ModelSpec, name: str) -> bool:
    """Is this a tensor that a critic's folder may hold besides `critic_tensors`? A policy's LM head, and the bias."""
    return name in ("lm_head.weight", SCORE_BIAS) or may_be_there(spec, name)


def _of_head(name: str, *columns: int) -> TensorEntry:
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
