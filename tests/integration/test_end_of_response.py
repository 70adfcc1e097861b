"""A folder whose configuration and tokenizer name different end tokens, as Base models have it, in both directions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from run_support import Command
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from gspo_mega.base.run_folder import RunFolder
from gspo_mega.data.journal.journal import Journal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
TEXTS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def folder_that_ends(folder: Path, configured: int, tokenizer: int) -> Path:
    """An untrained model that says each of the first three tokens, all of which are special, about as often as the other
    509 together; its configuration names one as the end, its tokenizer another. The chat template ends a turn with 2.
    """
    make_model(folder, moe=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 30.0  # a feature that is the same everywhere, in every layer
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][:3, 0] = 0.65
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(raw | {"eos_token_id": configured}))
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(raw | {"eos_token": TEXTS[tokenizer]}))
    return folder


def config_of(tmp_path: Path, template: bool) -> str:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(
        f"""\
run: {{name: run, dir: runs, seed: 1}}
model: {{path: model}}
batch: {{prompts_per_step: 8, group_size: 8, num_mini_batches: 1, micro_batch_tokens: 1024}}
cluster: {{num_nodes: 1, ranks_per_node: 1}}
precision: fp32
optimizer: {{lr: 1e-5, schedule: constant}}
train: {{num_steps: 1}}
data: {{path: rows.jsonl, max_prompt_tokens: 64, chat_template: {str(template).lower()}}}
reward: {{functions: [{{function: "run_support:distinct"}}]}}
rollout: {{max_new_tokens: 16, no_server_deadline_seconds: 900}}
server: {{num_servers: 1, max_total_tokens: 8192, start_deadline_seconds: 600}}
publish: {{method: disk}}
"""
    )
    return "config.yaml"


def finish(folder: Path, *words: str) -> Command:
    command = Command(folder, *words, forked=True)
    try:
        assert command.finish() == 0, command.out + command.err
    finally:
        command.end()
    return command


def ends_of(responses: list[list[int]], ends: set[int]) -> set[int]:
    """The end tokens with which responses ended; none of them stands inside one, and few were cut."""
    for response in responses:
        assert not ends & set(response[:-1]), response
    cut = [response for response in responses if response[-1] not in ends]
    assert all(len(response) == 16 for response in cut) and len(cut) < len(responses) / 4
    return {response[-1] for response in responses} & ends


@pytest.mark.parametrize(
    ("configured", "tokenizer", "template", "ends"),
    [
        (0, 2, False, (0, 2)),  # what the tokenizer, and so a cold start, ends with is not in the configuration
        (1, 0, True, (1, 0, 2)),  # and the other way round, with a template that has an end of its own
    ],
)
def test_responses_end_at_all_of_them(tmp_path, configured, tokenizer, template, ends):
    folder_that_ends(tmp_path / "model", configured, tokenizer)
    command = finish(tmp_path, "train", config_of(tmp_path, template))
    said = f"name '{TEXTS[configured]}' ({configured}), the tokenizer '{TEXTS[tokenizer]}' ({tokenizer})"
    assert said in command.out
    assert ("the chat template '<|im_end|>' (2)" in command.out) == template
    run = RunFolder(tmp_path / "runs" / "run")
    record = Journal(run.journal_dir).read(0)
    assert record is not None and record.batch is not None
    batch = record.batch
    responses = [np.asarray(t.response_token_ids).tolist() for t in batch.trajectories]
    assert ends_of(responses, set(ends)) == set(ends)
    assert all(set(t.response_mask) == {1} for t in batch.trajectories)
    line = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])
    assert line["response/truncated_fraction"] < 0.25
    exported = json.loads((run.huggingface_dir / "generation_config.json").read_text())
    assert exported["eos_token_id"] == list(ends), "whoever serves the result stops there, too"
