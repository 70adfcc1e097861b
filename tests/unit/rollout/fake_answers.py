"""SGLang's answers to /generate as a fake server gives them: whole, in reports, and packed to do harm."""

from __future__ import annotations

import base64
import functools
import json
import random
import zlib

import numpy as np

EOS = 2
VOCAB = 64


def good_answer(input_ids, params, version="0", rng=random, experts=None, rid="the-request", count=None) -> dict:
    """One answer of the real server's form (0.5.23, without a tokenizer), whole. `count`: its length instead of a
    random one.
    """
    count = count or rng.randint(1, params["max_new_tokens"])
    ids = [rng.randint(3, VOCAB - 1) for _ in range(count)]
    if count < params["max_new_tokens"]:
        ids[-1] = EOS
    finish = {"type": "stop", "matched": EOS} if ids[-1] == EOS else {"type": "length", "length": count}
    meta = {
        "id": rid,
        "finish_reason": finish,
        "prompt_tokens": len(input_ids),
        "completion_tokens": count,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "output_token_logprobs": [[-rng.random() * 3, token, None] for token in ids],
    }
    if experts is not None:
        layers, top_k, num_experts = experts
        rows = np.array([rng.sample(range(num_experts), top_k) for _ in range((len(input_ids) + count - 1) * layers)])
        meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    if params.get("top_k", -1) > 1:
        meta["output_token_sampling_mask"] = [[token, (token + 1) % VOCAB] for token in ids]
        meta["output_token_sampling_logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
    return {"output_ids": ids, "meta_info": meta}


def part_of(answer: dict, start: int, end: int, finish: dict | None = None, versions: list[str] | None = None) -> dict:
    """The report of tokens `start` to `end` of an answer; `finish`: how it ends there, earlier than the whole.
    `versions`: of each token, where they are not all of the answer's.
    """
    whole = answer["meta_info"]
    total = len(answer["output_ids"])
    is_last = end == total or finish is not None
    meta = {name: whole[name] for name in ("id", "prompt_tokens", "weight_version")}
    meta |= {"finish_reason": (finish or whole["finish_reason"]) if is_last else None, "completion_tokens": end}
    for name in ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs"):
        if name in whole:
            meta[name] = whole[name][start:end]
    if is_last:
        meta["weight_versions"] = spans(versions[:end] if versions else [whole["weight_version"]] * end)
        if "routed_experts" in whole and end:
            rows = whole["prompt_tokens"] + end - 1
            data = base64.b64decode(whole["routed_experts"])
            each = len(data) // (whole["prompt_tokens"] + total - 1)
            meta["routed_experts"] = base64.b64encode(data[: rows * each]).decode()
    return {"output_ids": answer["output_ids"][start:end], "meta_info": meta}


def spans(versions: list[str]) -> list[dict]:
    """As SGLang's end of an answer says the version of each token."""
    found: list[dict] = []
    for place, version in enumerate(versions):
        if not found or found[-1]["version"] != version:
            found.append({"version": version, "start": place, "end": place})
        found[-1]["end"] = place + 1
    return found


def event(value) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


@functools.cache
def gzip_bomb() -> bytes:
    """A fifth of a megabyte that is 200 MB of an answer's beginning."""
    packer = zlib.compressobj(wbits=31)
    return b"".join(
        [packer.compress(b"data: "), *(packer.compress(b" " * 1_000_000) for _ in range(200)), packer.flush()]
    )
