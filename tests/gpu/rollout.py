"""A real SGLang server on the GPU: does it start, and are its log-probs those of the trainer's bf16?

    python tests/gpu/rollout.py

The server serves a random bf16 checkpoint that the trainer's engine has the weights of; both score the same tokens. The
mean difference is the engines' mismatch that a run would measure; the bound is on its size a token.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from gpu_engine import SHAPES, arguments, engine, finish, one_rank, precision_config, recorded_batch
from gpu_model import server_python
from safetensors.torch import save_file

from gspo_mega.checkpoint.gather import gather_stream

MOST_MISMATCH = 0.05
START_SECONDS = 300
PORT = 30123


def write_checkpoint(folder: Path, policy) -> None:
    spec = policy.spec
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )
    (folder / "config.json").write_text(json.dumps(config))
    tensors = gather_stream(spec, policy.groups, policy.chunks, torch.bfloat16)
    save_file(
        {name: value.detach().cpu().contiguous().clone() for name, value in tensors}, folder / "model.safetensors"
    )


def ask(path: str, body: dict | None = None, timeout: float = 60.0) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


def wait_until_healthy(server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            ask("/health_generate", timeout=30)
            return
        except (urllib.error.URLError, OSError) as error:
            if server.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                raise SystemExit(f"the server did not start ({error}); the end of its log:\n{tail}") from error
        time.sleep(2)


def served_log_probs(tokens: list[int]) -> list[float]:
    """The server's log-prob of every token but the first, nats."""
    body = dict(
        input_ids=tokens,
        sampling_params=dict(max_new_tokens=1, temperature=1.0),
        return_logprob=True,
        logprob_start_len=0,
    )
    found = json.loads(ask("/generate", body))["meta_info"]["input_token_logprobs"]
    return [value for value, *_ in found[1:]]


def main() -> None:
    args = arguments(__doc__, longest=512)
    if args.device == "cpu":
        raise SystemExit("the CPU server has its own tests")
    spec, config = SHAPES["small-dense"], precision_config("bf16")
    lengths = [args.longest, args.longest // 2, args.longest // 4]
    with one_rank(), tempfile.TemporaryDirectory() as name:
        folder, log = Path(name, "model"), Path(name, "server.log")
        folder.mkdir()
        with engine(spec, config, same_weights=True) as policy:
            batch = recorded_batch(spec, config, lengths, per_pack=1)
            ours = [part.log_probs.double().cpu() for part in policy.old_pass(batch).micro_batches]
            write_checkpoint(folder, policy)
        command = [
            server_python(),
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(folder),
            "--skip-tokenizer-init",
            "--port",
            str(PORT),
            "--attention-backend",
            "triton",
            "--sampling-backend",
            "pytorch",
            "--disable-cuda-graph",
            "--mem-fraction-static",
            "0.2",
        ]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                wait_until_healthy(server, log)
                theirs = [
                    torch.tensor(served_log_probs(m.token_ids[:n].tolist()), dtype=torch.float64)
                    for m, n in zip(batch, lengths)
                ]
            finally:
                server.terminate()
    gaps = [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]
    mean = float(torch.cat(gaps).mean())
    row = dict(tokens=sum(map(len, gaps)), token_mean=mean, token_max=float(torch.cat(gaps).max()))
    row["sequence_mean"] = float(torch.stack([(a - b).mean().abs() for a, b in zip(ours, theirs)]).mean())
    failed = (
        []
        if mean <= MOST_MISMATCH
        else [f"a token's log-prob is {mean:.3g} nats from the trainer's on average; at most {MOST_MISMATCH}"]
    )
    finish("rollout", [row], failed)


if __name__ == "__main__":
    main()
