"""The layers that CPU servers compute in few operations are SGLang's own, for prefill and decode, and no others."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess

import pytest
import torch
import transformers
from family_models import make_family_folder, token_ids
from forks import forked_servers
from safetensors.torch import load_file
from servers import run_config

from gspo_mega.config import load_config
from gspo_mega.cpu.sglang_hooks import has_gpu
from gspo_mega.rollout.registration import ensure_secret
from gspo_mega.rollout.server.spec import spec_from_config

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.skipif(has_gpu(), reason="on machines without a GPU only"),
]


def sequences() -> tuple[list[list[int]], list[int]]:
    """Three of different lengths, and the lengths of their prompts; as many tokens of each are decoded."""
    ids = token_ids().tolist()
    return [ids, ids[3:], ids[:-5]], [len(ids) // 2, len(ids) // 2 - 3, len(ids) // 2 - 5]


@pytest.mark.parametrize(
    ("variant", "precision"), [("llama3-tied", "fp32"), ("qwen2", "fp32"), ("llama3-tied", "bf16"), ("qwen2", "bf16")]
)
def test_layers_are_sglangs(variant, precision, tmp_path):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    folder = make_family_folder(tmp_path / "model", variant, dtype=dtype)
    config = load_config(run_config(tmp_path, folder, precision=precision)).config
    ensure_secret(tmp_path / "key")
    spec = spec_from_config(
        config,
        model_path=str(folder),
        weight_version=None,
        port=30124,
        api_key_file=tmp_path / "key",
        attempt="one",
        index=0,
        generation=1,
        store=tmp_path / "store",
    )
    lists, prompts = sequences()
    job, rows, said = tmp_path / "job.json", tmp_path / "rows.safetensors", tmp_path / "said.json"
    job.write_text(json.dumps({"spec": dataclasses.asdict(spec), "sequences": lists, "prompts": prompts}))
    done = subprocess.run(
        [*forked_servers().command("plain_layers"), str(job), str(rows), str(said)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    is_plain, unseen = json.loads(said.read_text())
    assert is_plain and unseen == []

    found = {who: logits.log_softmax(-1) for who, logits in load_file(rows).items()}
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        # Logits follow the last token of a prompt and every decoded one.
        expected = [exact(torch.tensor([ids])).logits[0, n - 1 : -1] for ids, n in zip(lists, prompts, strict=True)]
    expected = torch.cat(expected).log_softmax(-1)
    errors = {who: (log_probs - expected).abs() for who, log_probs in found.items()}
    assert found["ours"].shape == expected.shape and not torch.equal(found["ours"], found["theirs"])
    if precision == "fp32":
        assert (found["ours"] - found["theirs"]).abs().max() <= 1e-5
        assert errors["ours"].max() <= 1e-5
    else:  # as far from exact numbers as SGLang's
        assert errors["ours"].mean() <= 1.25 * errors["theirs"].mean()
        assert errors["ours"].max() <= 1.5 * errors["theirs"].max()
