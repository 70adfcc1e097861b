"""What is refused by name is refused for a true reason: the classes of the installed Megatron-Core and SGLang are asked."""

from __future__ import annotations

import importlib.util
import inspect
import typing
from dataclasses import fields
from pathlib import Path

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.models.huggingface import _NOT_BUILT, _NOT_COMPUTED, ARCHITECTURES, spec_from_config
from gspo_mega.plan.validate_delta import ADAPTERS_NOT_SERVED


def has_one_width_of_heads() -> bool:
    """Also where Megatron lets layers differ, in `heterogeneous_block_specs`."""
    from megatron.core.transformer.heterogeneous.heterogeneous_config import AttentionConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    of_layers = {field.name for field in fields(AttentionConfig)}
    return typing.get_type_hints(TransformerConfig)["kv_channels"] in (int, int | None) and not (
        of_layers & {"kv_channels", "head_dim", "num_attention_heads"}
    )


def scales_no_query_by_its_position() -> bool:
    """Its attention sees positions only as rotary embeddings, and no setting names such a factor."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = {field.name for field in fields(TransformerConfig)}
    seen = {name for name in inspect.signature(Attention.forward).parameters if "pos" in name and "rotary" not in name}
    return not seen and not any("llama" in name or "temperature" in name or "floor_scale" in name for name in settings)


def sglang_lacks(architecture: str) -> bool:
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("sglang is not installed")
    models = Path(package.origin).parent / "srt" / "models"
    return not any(f"class {architecture}(" in path.read_text() for path in models.glob("*.py"))


IS_TRUE = {
    "Gemma4ForCausalLM": has_one_width_of_heads,
    "Ministral3ForCausalLM": scales_no_query_by_its_position,
    "MinistralForCausalLM": lambda: sglang_lacks("MinistralForCausalLM"),
}


@pytest.mark.parametrize("architecture", _NOT_COMPUTED)
def test_the_reason_is_true_of_what_is_installed(architecture):
    assert IS_TRUE[architecture](), f"{architecture}: {_NOT_COMPUTED[architecture]}: no longer so; try the family again"
    with pytest.raises(ModelError) as refused:
        spec_from_config({"architectures": [architecture]})
    assert f"architectures is [{architecture!r}], which is not supported: {_NOT_COMPUTED[architecture]}" in str(
        refused.value
    )


def test_every_reason_is_asked_for():
    assert IS_TRUE.keys() == _NOT_COMPUTED.keys() and not _NOT_BUILT.keys() & _NOT_COMPUTED.keys()


@pytest.mark.parametrize("architecture", _NOT_BUILT)
def test_what_nothing_here_builds_is_refused_with_its_reason(architecture):
    assert architecture not in ARCHITECTURES
    with pytest.raises(ModelError, match=f"'{architecture}'.*which is not supported: .* not implemented here"):
        spec_from_config({"architectures": [architecture]})


def test_the_questions_can_be_answered_with_no(monkeypatch):
    """With the attribute that is missing, as a later release may have it."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setitem(TransformerConfig.__annotations__, "kv_channels", list[int])
    assert not has_one_width_of_heads()
    monkeypatch.setattr(Attention, "forward", lambda self, hidden_states, position_ids: None)
    assert not scales_no_query_by_its_position()
    assert not sglang_lacks("MistralForCausalLM")


@pytest.mark.parametrize("file", ["qwen3_5_text.py", "qwen3_next.py"])
def test_sglangs_classes_with_delta_nets_do_not_know_the_widths_of_their_adapters(file):
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("sglang is not installed")
    sglang = Path(package.origin).parent / "srt"
    assert "def get_hidden_dim(" not in (sglang / "models" / file).read_text(), (
        f"{file}: {ADAPTERS_NOT_SERVED}: no longer"
    )
    # The one class that has it is the body inside, which the server's LoRA manager does not ask.
    assert "def get_hidden_dim(" in (sglang / "models" / "qwen3_5.py").read_text()
    instead = (
        (sglang / "lora" / "utils.py").read_text().partition("def get_default_hidden_dim(")[2].partition("\ndef ")[0]
    )
    assert instead and '== "out_proj"' not in instead and "output_gate" not in instead


@pytest.mark.parametrize("family", ["Gemma4", "Mistral3", "KimiK25"])
def test_models_with_images_are_named_as_such(family):
    said = r"which is not supported: models named ForConditionalGeneration .* text part of Qwen3_5ForConditionalGen"
    with pytest.raises(ModelError, match=said):
        spec_from_config({"architectures": [f"{family}ForConditionalGeneration"]})
