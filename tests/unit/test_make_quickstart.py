import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from gspo_mega.config.schema import Data
from gspo_mega.data.demonstrations import load_demonstrations
from gspo_mega.data.quickstart import VOCAB_SIZE, build_tokenizer
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.rewards.builtin import arithmetic

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_quickstart.py"
SMALL = ["--num-train", "200", "--num-heldout", "50"]


@pytest.fixture(scope="module")
def make():
    """make(*arguments) -> the exit code of the tool, run in this process."""
    spec = importlib.util.spec_from_file_location("make_quickstart", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    assert make(folder, *SMALL) == 0
    return folder


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shape", ["moe", "dense", "wide"])
def test_hugging_face_loads_every_tensor_of_the_model(make, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    assert make(tmp_path, *SMALL, *[f"--{shape}"] * (shape != "moe")) == 0
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(model).__name__ == ("Qwen3MoeForCausalLM" if shape == "moe" else "Qwen3ForCausalLM")
    assert model.dtype == torch.float32 and (
        model.generation_config.eos_token_id,
        model.generation_config.pad_token_id,
    ) == (2, 0)
    logits = model(torch.tensor([[10, 20, 30]])).logits
    # Random weights know nothing: near to uniform over the vocabulary.
    assert logits.shape == (1, 3, VOCAB_SIZE) and logits.std() < 1


def test_a_model_of_another_shape(make, tmp_path):
    shape = json.loads((TOOL.parents[1] / "configs" / "models" / "quickstart_moe.json").read_text())
    (tmp_path / "shape.json").write_text(json.dumps(shape | {"num_hidden_layers": 5, "num_experts": 4}))
    assert make(tmp_path / "out", *SMALL, "--shape", tmp_path / "shape.json") == 0
    spec = read_model_spec(tmp_path / "out" / "model")
    assert (spec.num_layers, spec.moe.num_experts, spec.eos_token_ids) == (5, 4, (2,))


def test_the_experts_have_their_names_on_disk(made):
    weights = load_file(made / "model" / "model.safetensors")
    assert weights["model.layers.2.mlp.experts.7.gate_proj.weight"].shape == (64, 64)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    matrices = torch.cat([weight.flatten() for weight in weights.values() if weight.dim() == 2])
    assert abs(matrices.std().item() - 0.05) < 1e-3 and abs(matrices.mean().item()) < 3e-4
    assert all((weight == 1).all() for weight in weights.values() if weight.dim() == 1)


def test_our_own_reader_takes_the_model(made):
    spec = read_model_spec(made / "model")
    assert (spec.family, spec.vocab_size, spec.eos_token_ids, spec.moe.num_experts) == ("qwen3_moe", 512, (2,), 8)


def test_the_tokenizer(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model", local_files_only=True)
    assert (
        len(tokenizer) == VOCAB_SIZE and tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    )
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4719+2386=")] == list("4719+2386=")
    text = "Γειά 12,345€ \x00\t\n\n  日本語 🙂 'tis"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        json.loads((made / "model" / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )


def test_no_merge_touches_a_digit_or_a_sign():
    merged = [token for token in build_tokenizer().get_vocab() if len(token) > 1 and not token.startswith("<|")]
    assert len(merged) > 200 and not any(set(token) & set("0123456789+-=#,*/.") for token in merged)


def test_the_tokenizer_is_the_same_in_every_process():
    code = "from gspo_mega.data.quickstart import build_tokenizer; print(build_tokenizer().to_str())"
    others = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TOOL.parents[1]
        ).stdout
        for _ in range(2)
    ]
    assert [other.strip() for other in others] == [build_tokenizer().to_str()] * 2


def test_train_and_heldout(made):
    train, heldout = rows_of(made / "data" / "train.jsonl"), rows_of(made / "data" / "heldout.jsonl")
    assert (len(train), len(heldout)) == (200, 50)
    assert {frozenset(row["prompt"].rstrip("=").split("+")) for row in train}.isdisjoint(
        {frozenset(row["prompt"].rstrip("=").split("+")) for row in heldout}
    )
    for row in train + heldout:
        assert arithmetic(prompt=row["prompt"], response=row["response"], answer=row["answer"], metadata={}) == 1.0


def test_the_demonstrations_are_short(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    data = Data(path=str(made / "data" / "train.jsonl"), max_prompt_tokens=16, chat_template=False)
    [source] = load_demonstrations(data, tokenizer, max_response_tokens=48)
    assert source.num_overlong == 0 and source.num_examined == 200
    assert max(item.rows[0].num_learned for item in source.items()) <= 41


def test_the_same_arguments_make_the_same_bytes(make, made, tmp_path):
    assert make(tmp_path / "new" / "folder", *SMALL) == 0
    assert contents(tmp_path / "new" / "folder") == contents(made)
    assert make(tmp_path / "other", *SMALL, "--seed", 2) == 0
    other = contents(tmp_path / "other")
    changed = {str(path) for path, content in contents(made).items() if other[path] != content}
    assert changed == {"model/model.safetensors", "data/train.jsonl", "data/heldout.jsonl"}


def test_nothing_different_is_overwritten(make, made, capsys):
    before = contents(made)
    assert make(made, *SMALL) == 0
    (made / "model" / "config.json").unlink()
    assert make(made, *SMALL, "--seed", 2) == 2
    error = capsys.readouterr().err
    assert (
        "these exist with other content" in error
        and str(made / "data" / "train.jsonl") in error
        and "tokenizer.json" not in error
    )
    # The missing file was not made either, and is when the arguments are right.
    assert not (made / "model" / "config.json").exists()
    assert make(made, *SMALL) == 0
    assert contents(made) == before


def test_what_cannot_be_made(make, tmp_path, capsys):
    assert make(tmp_path / "x", "--num-train", 10, "--num-heldout", 10**9) == 2
    assert "1000000000 heldout problems of 4 digits requested; at most" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file") == 2
    assert "file" in capsys.readouterr().err
    assert list((tmp_path / "x").iterdir()) == []


def test_it_runs_as_a_script_from_anywhere(tmp_path):
    done = subprocess.run([sys.executable, TOOL, "out", *SMALL], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "200 train problems, 50 held-out problems" in done.stdout


def test_the_calculator_has_its_own_template_and_turns(make, tmp_path):
    assert make(tmp_path, *SMALL, "--task", "calculator") == 0
    assert read_model_spec(tmp_path / "model").family == "qwen3"
    assert "tools:" in (tmp_path / "model" / "chat_template.jinja").read_text()
    train, heldout = rows_of(tmp_path / "data" / "train.jsonl"), rows_of(tmp_path / "data" / "heldout.jsonl")
    assert (len(train), len(heldout)) == (200, 50) and not {r["prompt"] for r in train} & {r["prompt"] for r in heldout}
    for row in train + heldout:
        last = row["response"][-1]["content"]
        assert arithmetic(prompt=row["prompt"], response=last, answer=row["answer"], metadata={}) == 1.0
    # The same folder cannot hold the other task.
    assert make(tmp_path, *SMALL, "--dense") == 2
