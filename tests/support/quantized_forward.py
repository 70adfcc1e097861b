"""Qwen3 by hand, from a folder's tensors, with every quantized operand rounded where it is used: what a quantized server
should answer. Nothing of the product: float64, and FP8 by the search of `fp8_by_numpy.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from fp8_by_numpy import nearest_fp8
from safetensors.torch import load_file, save_file


def fp8_rows(x: np.ndarray, width: int, is_divided: bool = False) -> np.ndarray:
    """Values of [n, m], each `width` of a row rounded to e4m3 by the scale amax / 448. They are multiplied by its
    reciprocal, as by SGLang's kernels, or divided by it, as published weights are.
    """
    parts = x.astype(np.float32).reshape(-1, width)
    scale = np.abs(parts).max(1, keepdims=True) / np.float32(448)
    scale[scale == 0] = 1
    scaled = parts / scale if is_divided else parts * (np.float32(1) / scale)
    return (nearest_fp8(scaled, "e4m3") * scale).astype(np.float64).reshape(x.shape)


def fp8_squares(x: np.ndarray, side: int = 128) -> np.ndarray:
    out = np.empty(x.shape, np.float64)
    for i in range(0, x.shape[0], side):
        for j in range(0, x.shape[1], side):
            part = x[i : i + side, j : j + side]
            out[i : i + side, j : j + side] = fp8_rows(part.reshape(1, -1), part.size, True).reshape(part.shape)
    return out


def int8_rows(x: np.ndarray) -> np.ndarray:
    rows = x.astype(np.float32)
    amax = np.maximum(np.abs(rows).max(1, keepdims=True), np.float32(1e-10))
    scaled = rows * (np.float32(127) / amax)
    codes = np.sign(scaled) * np.floor(np.abs(scaled.astype(np.float64)) + 0.5)  # halves away from zero
    return codes * (amax / np.float32(127)).astype(np.float64)


def write_blocks(source: Path, target: Path) -> Path:
    """Copy a folder, its linear layers' weights in e4m3 blocks as published checkpoints have them."""
    shutil.copytree(source, target)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if "_proj" in name and name.endswith(".weight"):
            weight = tensor.float().numpy()
            rows, columns = (-(-size // 128) for size in weight.shape)
            scales = np.empty((rows, columns), np.float32)
            for i, j in np.ndindex(rows, columns):
                scales[i, j] = np.abs(weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]).max() / np.float32(448)
            codes = fp8_squares(weight) / np.kron(scales, np.ones((128, 128)))[: len(weight), : weight.shape[1]]
            tensors[name] = torch.from_numpy(codes).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.from_numpy(scales)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    return target


class QuantizedForward:
    """`quantization`: none, fp8, fp8_block or int8; `cache_fp8`: keys and values pass through e4m3."""

    def __init__(self, folder: Path, quantization: str, cache_fp8: bool = False) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = {n: t.float().numpy() for n, t in load_file(folder / "model.safetensors").items()}
        self._quantization, self._cache_fp8 = quantization, cache_fp8
        self._rounded: dict[str, np.ndarray] = {}

    def log_probs(self, tokens: list[int], num_prompt_tokens: int | None = None) -> np.ndarray:
        """[T - 1] float64: of each token after the first, given those before it.

        `num_prompt_tokens` went through the model in one call, each later token in a call of its own; None: all in one.
        """
        first = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        self._calls = [first] + [1] * (len(tokens) - first)
        x = self._weights["model.embed_tokens.weight"][tokens].astype(np.float64)
        for index in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{index}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            h = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + (self._experts if "num_experts_per_tok" in self._config else self._mlp)(h, f"{name}.mlp")
        logits = self._norm(x, "model.norm") @ self._weights["lm_head.weight"].T.astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return scores[np.arange(len(tokens) - 1), tokens[1:]]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        variance = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(variance + self._config["rms_norm_eps"]) * self._weights[f"{name}.weight"]

    def _tokens(self, x: np.ndarray) -> np.ndarray:
        if self._quantization == "none":
            return x
        if self._quantization == "int8":
            return int8_rows(x)
        return fp8_rows(x, 128 if self._quantization == "fp8_block" else x.shape[1])

    def _call(self, x: np.ndarray) -> np.ndarray:
        """What enters the experts: with fp8 one scale for all tokens of a call."""
        if self._quantization != "fp8":
            return self._tokens(x)
        rows_a_token = len(x) // sum(self._calls)
        parts = np.split(x, np.cumsum(self._calls)[:-1] * rows_a_token)
        return np.concatenate([fp8_rows(part.reshape(1, -1), part.size).reshape(part.shape) for part in parts])

    def _weight(self, name: str) -> np.ndarray:
        if name not in self._rounded:
            weight = self._weights[f"{name}.weight"]
            self._rounded[name] = {
                "none": lambda w: w.astype(np.float64),
                "fp8": lambda w: fp8_rows(w, w.shape[1]),
                "fp8_block": fp8_squares,
                "int8": int8_rows,
            }[self._quantization](weight)
        return self._rounded[name]

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        config, size = self._config, self._config["head_dim"]
        rounded = self._tokens(x)
        q, k, v = (
            (rounded @ self._weight(f"{name}.{part}_proj").T).reshape(len(x), -1, size).transpose(1, 0, 2)
            for part in "qkv"
        )
        q, k = self._rotate(self._norm(q, f"{name}.q_norm")), self._rotate(self._norm(k, f"{name}.k_norm"))
        if self._cache_fp8:
            k, v = (nearest_fp8(part.astype(np.float32), "e4m3").astype(np.float64) for part in (k, v))
        repeats = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = np.repeat(k, repeats, 0), np.repeat(v, repeats, 0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(size)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        return self._tokens(out.transpose(1, 0, 2).reshape(len(x), -1)) @ self._weight(f"{name}.o_proj").T

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        theta = self._config.get("rope_theta") or self._config["rope_parameters"]["rope_theta"]
        angles = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        rounded = self._tokens(x)
        gate, up = (rounded @ self._weight(f"{name}.{part}_proj").T for part in ("gate", "up"))
        return self._tokens(gate / (1 + np.exp(-gate)) * up) @ self._weight(f"{name}.down_proj").T

    def _experts(self, x: np.ndarray, name: str) -> np.ndarray:
        config = self._config
        logits = x @ self._weights[f"{name}.gate.weight"].T.astype(np.float64)
        probabilities = torch.softmax(torch.from_numpy(logits), -1)
        weights, chosen = torch.topk(probabilities, config["num_experts_per_tok"])
        weights = (weights / weights.sum(-1, keepdim=True)).numpy()
        rows = [(t, slot, int(e)) for t, experts in enumerate(chosen.tolist()) for slot, e in enumerate(experts)]
        entering, between = self._call(x), []
        for token, _, expert in rows:
            gate, up = (self._expert(name, expert, part) @ entering[token] for part in ("gate", "up"))
            between.append(gate / (1 + np.exp(-gate)) * up)
        out = np.zeros_like(x)
        for (token, slot, expert), row in zip(rows, self._call(np.stack(between)), strict=True):
            out[token] += weights[token, slot] * (self._expert(name, expert, "down") @ row)
        return out

    def _expert(self, name: str, expert: int, part: str) -> np.ndarray:
        path = f"{name}.experts.{expert}.{part}_proj"
        if self._quantization != "fp8":
            return self._weight(path)
        if path not in self._rounded:  # one scale for gate and up together
            parts = ["down"] if part == "down" else ["gate", "up"]
            weights = [self._weights[f"{name}.experts.{expert}.{p}_proj.weight"] for p in parts]
            flat = np.concatenate([w.reshape(-1) for w in weights])[None]
            values = np.split(fp8_rows(flat, flat.size)[0], len(parts))
            for p, w, v in zip(parts, weights, values, strict=True):
                self._rounded[f"{name}.experts.{expert}.{p}_proj"] = v.reshape(w.shape)
        return self._rounded[path]
