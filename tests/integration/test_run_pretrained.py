"""A pretrained model in a real run: SmolLM2-135M-Instruct converted there and back, and scored by all three programs.

What is wider (kills and replays, precisions, adapters, episodes, layouts) is tests/soak/pretrained.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/soak"))

import pretrained  # noqa: E402

MODEL = ROOT / "runs/models/smollm2"
FEW = (
    "batch.prompts_per_step=2",
    "batch.group_size=2",
    "rollout.max_new_tokens=20",
    "server.max_total_tokens=4096",
    "eval=null",
)

pytestmark = pytest.mark.skipif(
    not (MODEL / "gguf.json").is_file(), reason="smollm2 is not in runs/models; launch/smollm2_model.sh fetches it"
)


def test_converted_there_and_back_and_scored_alike_by_trainer_server_and_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    soak = pretrained.Soak(MODEL, tmp_path, FEW)
    assert pretrained.convert(soak)["verified"].endswith("the same weights")
    found = pretrained.logits(soak)  # its trainer starts with the converted checkpoint
    assert found["tokens"] > 50
