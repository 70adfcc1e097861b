"""A transformers model whose linear layers and experts round their operands: what a quantized server of a family with
latent attention should answer. The rounding is `quantized_forward.py`'s; everything else is transformers', in float64.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from quantized_forward import fp8_rows, fp8_squares, int8_rows


class HookedForward:
    """`quantization`: none, fp8, fp8_block or int8. `kv_b_proj` meets no input of its own: a server multiplies by its
    parts, which it rounds with fp8_block only.
    """

    def __init__(self, folder: Path, quantization: str) -> None:
        from transformers import AutoModelForCausalLM

        self._quantization = quantization
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
        if quantization == "none":
            return
        for name, module in self._model.model.layers.named_modules():
            if isinstance(module, torch.nn.Linear):
                if not name.endswith("kv_b_proj"):
                    module.register_forward_pre_hook(lambda _, inputs: (self._tokens(inputs[0]), *inputs[1:]))
                elif quantization != "fp8_block":
                    continue
                module.weight.data = self._held(module.weight.data)
            elif name.endswith("experts") and hasattr(module, "gate_up_proj"):
                self._round_experts(module)

    def log_probs(self, tokens: list[int], num_prompt_tokens: int | None = None) -> np.ndarray:
        """[T - 1] float64: of each token after the first, given those before it."""
        with torch.no_grad():
            scores = torch.log_softmax(self._model(torch.tensor([tokens])).logits[0, :-1].double(), -1)
        return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).numpy()
        width = 128 if self._quantization == "fp8_block" else rows.shape[1]
        return torch.from_numpy(int8_rows(rows) if self._quantization == "int8" else fp8_rows(rows, width)).view(
            x.shape
        )

    def _held(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.numpy()
        how = {"fp8": lambda w: fp8_rows(w, w.shape[1]), "fp8_block": fp8_squares, "int8": int8_rows}
        return torch.from_numpy(how[self._quantization](rows.astype(np.float32)))

    def _round_experts(self, module) -> None:
        if self._quantization == "fp8":
            raise ValueError("one scale for the tokens of a call is quantized_forward's")
        for name in ("gate_up_proj", "down_proj"):
            held = [self._held(weight) for weight in getattr(module, name).data]
            getattr(module, name).data = torch.stack(held)

        def forward(hidden, chosen, weights):
            out, entering = torch.zeros_like(hidden), self._tokens(hidden)
            for token, slot in np.ndindex(*chosen.shape):
                expert = int(chosen[token, slot])
                gate, up = (module.gate_up_proj[expert] @ entering[token]).chunk(2)
                between = self._tokens((torch.nn.functional.silu(gate) * up)[None])[0]
                out[token] += weights[token, slot] * (module.down_proj[expert] @ between)
            return out

        module.forward = forward
