"""What of a Hugging Face folder goes into every export: no code, and nothing from outside it."""

import json
import os
import stat
from pathlib import Path

import pytest

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_export import copy_description
from gspo_mega.models.huggingface import description_files, read_model_spec

SHAPE = Path(__file__).parents[3] / "configs/models/certify_dense.json"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(SHAPE.read_text())
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "README.md", "LICENSE"):
        (folder / name).write_text(name)
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "modeling_x.py",
        "setup.sh",
        "x.so",
        ".netrc",
        "training_args.bin",
    ):
        (folder / name).write_text(name)
    (folder / "sub").mkdir()
    return folder


def copied(folder, tmp_path):
    (tmp_path / "out").mkdir()
    copy_description(folder, tmp_path / "out", "float32")
    return tmp_path / "out"


def test_configuration_tokenizer_and_licence_are_copied_and_no_weights_and_no_code(folder, tmp_path):
    out = copied(folder, tmp_path)
    assert sorted(entry.name for entry in out.iterdir()) == [
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert (
        json.loads((out / "config.json").read_text())["architectures"] == json.loads(SHAPE.read_text())["architectures"]
    )


def test_a_vision_language_class_names_the_dtype_of_the_copy_where_the_source_named_its_own(folder, tmp_path):
    """As published: for the text part only. Otherwise the copy's weights would be read as bfloat16."""
    text = {k: v for k, v in json.loads(SHAPE.read_text()).items() if k not in ("architectures", "torch_dtype")}
    raw = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text | {"dtype": "bfloat16"}}
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_model_spec(folder).torch_dtype == "bfloat16"
    assert read_model_spec(copied(folder, tmp_path)).torch_dtype == "float32"


def test_a_link_out_of_the_folder_is_refused_by_name_before_anything_runs(folder, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("private")
    secret.chmod(0o600)
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(secret)
    for action in (lambda: copied(folder, tmp_path), lambda: read_model_spec(folder)):
        with pytest.raises(ModelError, match="README.md: this link leads to .*id_rsa, outside the model's folder"):
            action()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_private_file_stays_private(folder, tmp_path):
    (folder / "tokenizer.json").chmod(0o600)
    assert stat.S_IMODE((copied(folder, tmp_path) / "tokenizer.json").stat().st_mode) == 0o600


def test_links_of_a_cache_of_another_models_folder_and_inside_are_followed(folder, tmp_path):
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (cache / "blobs" / f"hash-{name}").write_text((folder / name).read_text())
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    (snapshot / "tokenizer_config.json").symlink_to("tokenizer.json")
    (snapshot / "merges.txt").symlink_to(folder / "merges.txt")
    assert [file.name for file in description_files(snapshot)] == [
        "config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (snapshot / "vocab.txt").symlink_to(folder / "merges.txt")
    with pytest.raises(ModelError, match="vocab.txt: this link leads to"):
        description_files(snapshot)


def test_a_pipe_is_no_file_to_wait_for(folder):
    os.mkfifo(folder / "special.json")
    assert "special.json" not in [file.name for file in description_files(folder)]
