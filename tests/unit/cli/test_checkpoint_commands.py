"""Checkpoints through `gspo-mega` itself: there and back, what it says, and the configurations that come with it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import get_args

import pytest

from gspo_mega.checkpoint.convert import FILE_BYTES
from gspo_mega.checkpoint.quantized import Rule
from gspo_mega.cli import checkpoint_tools, quantize
from gspo_mega.cli.main import COMMANDS, main, module_of
from gspo_mega.config import load_config
from gspo_mega.verify.certify.program import make_random_folder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    return make_random_folder(ROOT / "configs/models/certify_dense.json", tmp_path / "hf", 1)


def test_there_and_back(folder, tmp_path, capsys):
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["convert", str(folder), str(there)]) == 0
    assert (there / "megatron" / ".metadata").exists()
    assert main(["convert", str(there), str(back)]) == 0 and (back / "config.json").exists()
    assert main(["verify-checkpoint", str(folder), str(back)]) == 0
    assert f"{folder} and {back}: the same weights" in capsys.readouterr().out
    assert main(["inspect-checkpoint", str(there)]) == 0
    assert "qwen3" in capsys.readouterr().out


def test_a_copy_in_another_dtype(folder, tmp_path, capsys):
    rounded = tmp_path / "rounded"
    assert main(["convert", str(folder), str(rounded), "--to", "hf", "--dtype", "bfloat16"]) == 0
    assert main(["verify-checkpoint", str(folder), str(rounded)]) == 1
    assert "different weights" in capsys.readouterr().out


def test_blocks(folder, tmp_path):
    assert main(["quantize", str(folder), str(tmp_path / "fp8")]) == 0
    assert "quantization_config" in json.loads((tmp_path / "fp8" / "config.json").read_text())


@pytest.mark.parametrize("command", [["convert", "{}/none", "{}/out"], ["inspect-checkpoint", "{}/none"]])
def test_what_is_not_there(tmp_path, capsys, command):
    assert main([word.format(tmp_path) for word in command]) != 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/none: no such folder" in said and "Traceback" not in said


def test_what_is_written_twice_so_that_help_needs_no_torch():
    assert get_args(Rule) == quantize.SCALES and checkpoint_tools.FILE_BYTES == FILE_BYTES


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_an_example(command):
    sentence, example, *_ = (importlib.import_module(module_of(command)).__doc__ or "").split("\n\n")
    assert "\n" not in sentence and f"gspo-mega {command} " in example.splitlines()[0] + " "
    assert all(line.startswith("    ") for line in example.splitlines())


def test_configurations_are_listed_and_printed(tmp_path, capsys, monkeypatch):
    assert main(["configs"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == sorted(
        str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.yaml")
    )
    assert "eval/gsm8k" in listed
    assert main(["configs", "certify_dense"]) == 0
    copy = tmp_path / "copy.yaml"
    copy.write_text(capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    config = load_config(copy, (), "certify").config
    assert config.model.path == str(ROOT / "configs/models/certify_dense.json")
    assert copy.read_text().startswith(f"# yaml-language-server: $schema={ROOT / 'configs/schema.json'}\n")


def test_a_name_that_is_none(capsys):
    assert main(["configs", "quikstart.yaml"]) == 2
    assert "no configuration is named 'quikstart.yaml'; did you mean quickstart?" in capsys.readouterr().err
