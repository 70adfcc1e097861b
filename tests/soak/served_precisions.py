"""Every precision of a server on three kinds of models: `python tests/soak/served_precisions.py [--only TEXT]`.

Starts a real SGLang server for each pair of a model (dense, MoE, latent attention with MoE) and a setting of
`server.quantization`, `server.kv_cache` and `server.dtype`, samples from it, and compares the log-probs with the same
model by hand (`tests/support`). Needs no GPU; about half a minute a server. Prints a row each: the largest and the mean
difference to the model by hand, the share of sequences within 2e-5 nats, and the mean difference to the unquantized
model. Exit code 0: in fp32 most sequences agree to 2e-5 and the mean difference is below a tenth of what the
quantization does; in bf16 the mean difference is below what the quantization does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "integration")]

import torch
from converted_models import DEEPSEEK
from hooked_forward import HookedForward
from quantized_forward import QuantizedForward, write_blocks
from test_quantized_servers import CLOSE, Quantized, gaps
from tiny_models import EOS_TOKEN_ID, IN_BLOCKS, VOCAB_SIZE, byte_tokenizer, make_model

QUANTIZATIONS = ("none", "fp8", "fp8_block", "int8")
LATENT = DEEPSEEK | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}


def make_latent(folder: Path) -> Path:
    """A model of DeepSeek-V3's kind whose sides blocks divide, but for the key-value projection's 144 rows."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)).float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def cases() -> list[tuple[str, str, str, str]]:
    """(model, quantization, cache, dtype). By hand there is no scale for all tokens of a call with latent attention, and
    no cache of latents.
    """
    found = []
    for model in ("dense", "moe", "latent"):
        for quantization in QUANTIZATIONS:
            for cache in ("auto", "fp8"):
                for dtype in ("fp32", "bf16"):
                    by_hand = model != "latent" or (cache == "auto" and quantization != "fp8")
                    asked = (quantization, cache, dtype) != ("none", "auto", "fp32")
                    if by_hand and asked:
                        found.append((model, quantization, cache, dtype))
    return found


def measure(folder: Path, models: dict[str, Path], case: tuple[str, str, str, str]) -> dict:
    name, quantization, cache, dtype = case
    model = models[name]
    served = write_blocks(model, folder / "blocks") if quantization == "fp8_block" else model
    if name == "latent":
        by_hand, plain = HookedForward(model, quantization), HookedForward(model, "none")
    else:
        by_hand, plain = QuantizedForward(model, quantization, cache == "fp8"), QuantizedForward(model, "none")
    server = Quantized(folder, model, served, quantization=quantization, kv_cache=cache, dtype=dtype)
    try:
        error, effect = gaps(server, by_hand, plain)
    finally:
        server.close()
    close, changes = float((error <= CLOSE).mean()), (quantization, cache) != ("none", "auto")
    if dtype == "fp32":
        good = close > 0.5 and error.mean() < 0.1 * effect.mean() and effect.min() > 100 * CLOSE
    else:
        good = bool(error.mean() < effect.mean()) if changes else bool(error.mean() < 0.1)
    return {
        "case": " ".join(case),
        "largest": f"{error.max():.1e}",
        "mean": f"{error.mean():.1e}",
        "close": round(close, 2),
        "effect": f"{effect.mean():.1e}",
        "good": bool(good),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose words contain this, such as `moe fp8_block`")
    only = parser.parse_args().only
    root = Path(tempfile.mkdtemp(prefix="served_precisions_"))
    try:
        models = {
            "dense": make_model(root / "dense", moe=False, sizes=IN_BLOCKS),
            "moe": make_model(root / "moe", moe=True, sizes=IN_BLOCKS),
            "latent": make_latent(root / "latent"),
        }
        rows = []
        for index, case in enumerate(case for case in cases() if only in " ".join(case)):
            folder = root / str(index)
            folder.mkdir()
            rows.append(measure(folder, models, case))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0 if rows and all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
