"""The folder of a served classifier: its sizes, of any architecture, and weights that SGLang would add to."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gspo_mega.base.errors import ConfigError
from gspo_mega.models.value_models import check_head, read_sizes

LLAMA = dict(num_hidden_layers=3, num_attention_heads=8, hidden_size=64, num_key_value_heads=2)


def folder_of(path, raw, **tensors):
    (path / "config.json").write_text(json.dumps(raw))
    if tensors:
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path / "model.safetensors")
    return path


def test_its_elements_are_those_of_all_files_and_its_cache_is_the_shapes(tmp_path):
    folder_of(tmp_path, LLAMA | {"max_position_embeddings": 99}, a=(3, 5), b=(7,))
    save_file({"c": torch.zeros(2, 2)}, tmp_path / "second.safetensors", {"format": "pt"})
    sizes = read_sizes(tmp_path)
    assert (sizes.elements, sizes.num_heads, sizes.positions) == (15 + 7 + 4, 8, 99)
    # Keys and values, of 3 layers, with one of 2 heads on each of 2 GPUs, and on each of 4.
    assert [sizes.cached_elements(tensor) for tensor in (1, 2, 4)] == [2 * 3 * 2 * 8, 2 * 3 * 8, 2 * 3 * 8]


@pytest.mark.parametrize(
    ("raw", "cached"),
    [
        (LLAMA | {"head_dim": 16}, 2 * 3 * 2 * 16),
        ({key: LLAMA[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")}, 2 * 3 * 8 * 8),
        (LLAMA | {"kv_lora_rank": 32, "qk_rope_head_dim": 4}, 3 * 36),
        ({"num_hidden_layers": 3}, None),
        ({}, None),
    ],
)
def test_what_config_json_does_not_say_is_not_known(tmp_path, raw, cached):
    assert read_sizes(folder_of(tmp_path, raw, a=(1,))).cached_elements(1) == cached


@pytest.mark.parametrize(
    ("architecture", "names", "is_fit"),
    [
        ("Qwen3ForSequenceClassification", ("score.weight",), False),
        ("Qwen3ForSequenceClassification", ("score.weight", "score.bias"), True),
        ("LlamaForSequenceClassification", ("score.weight",), True),
    ],
)
def test_a_head_that_sglang_would_add_to_is_refused(tmp_path, architecture, names, is_fit):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    if is_fit:
        check_head(str(tmp_path))
    else:
        with pytest.raises(
            ConfigError, match="its weights have no score.bias, and SGLang gives the head of a Qwen3For"
        ):
            check_head(str(tmp_path))


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no Hugging Face model folder"):
        check_head(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1]", "config.json holds no object, so it describes no model"), ("{", "is no Hugging Face model")],
)
def test_a_config_json_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sizes(tmp_path)


def test_weights_in_another_form_are_refused(tmp_path):
    (folder_of(tmp_path, LLAMA) / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="has no weights as safetensors; servers load no other form"):
        read_sizes(tmp_path)


def test_weights_that_are_cut_off_are_refused(tmp_path):
    folder_of(tmp_path, LLAMA, a=(3, 5))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:20])
    with pytest.raises(ConfigError, match="model.safetensors is damaged or cut off"):
        read_sizes(tmp_path)
