"""What the length of a chunk and the type of states change in the log-probs of gated delta nets.

`python tests/benchmarks/delta_states.py [TOKENS]`: a small random Qwen3-Next of tests/support/family_models.py in fp32,
whose rule alone changes: by chunks of other lengths, and token by token with states that are rounded after each token,
as a server keeps them (`mamba_ssm_dtype`). Differences of log-probs from chunks of 64, in nats. Ten seconds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from family_models import VOCAB_SIZE, make_family_folder
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from gspo_mega.cpu import delta_rule

SEQUENCES, END = 8, 64


def in_chunks(length: int) -> Callable[..., Any]:
    """The rule by chunks of `length` tokens, with the arguments of transformers'."""

    def rule(q, k, v, g, beta, **unused):
        with mock.patch.object(delta_rule, "CHUNK", length):
            return delta_rule.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    return rule


def token_by_token(dtype: torch.dtype) -> Callable[..., Any]:
    """The rule token by token; `dtype`: that of the state between two tokens."""

    def rule(q, k, v, g, beta, **unused):
        q, k = (delta_rule.l2norm(x).repeat_interleave(v.size(2) // x.size(2), 2) for x in (q, k))
        state, out = v.new_zeros(*v[:, 0].shape[:2], k.size(-1), v.size(-1)), []
        for t in range(v.size(1)):
            state = state.float() * g[:, t].exp()[..., None, None]
            written = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(-2))
            state = state + k[:, t, :, :, None] * written[..., None, :]
            out.append((q[:, t, :, :, None] * state).sum(-2) * q.size(-1) ** -0.5)
            state = state.to(dtype)
        return torch.stack(out, 1), None

    return rule


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as folder:
        made = make_family_folder(Path(folder) / "model", "qwen3_next", max_position_embeddings=length)
        model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB_SIZE, (SEQUENCES, length), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def log_probs(rule: Callable[..., Any]) -> torch.Tensor:
        with mock.patch.object(modeling_qwen3_next, "torch_chunk_gated_delta_rule", rule):
            whole = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        return whole.gather(-1, ids[:, 1:, None])[..., 0].double()

    usual = log_probs(in_chunks(delta_rule.CHUNK))
    for name, rule in (
        *((f"chunks of {size}", in_chunks(size)) for size in (16, 32, 128, length)),
        *(
            (f"token by token, {str(dtype).removeprefix('torch.')} states", token_by_token(dtype))
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ):
        d = (log_probs(rule) - usual).abs()
        first, last = d[:, :END].mean(), d[:, -END:].mean()
        print(
            f"{name:32} mean |d| {d.mean():.1e}  largest {d.max():.1e}  first {END} {first:.1e}  last {END} {last:.1e}"
        )


if __name__ == "__main__":
    main()
