"""What a server's model computes of given tokens, by this package's functions and by SGLang's own modules, and which
models it leaves to SGLang: a fork for `test_plain_layers.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gspo_mega.rollout.server.spec import ServerSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))


@contextmanager
def changed(thing: Any, name: str, value: Any) -> Iterator[None]:
    """The attribute has another value for a while."""
    before = getattr(thing, name, None)
    try:
        setattr(thing, name, value)
        yield
    finally:
        setattr(thing, name, before)


def other_models(model: Any) -> dict[str, Callable[[], Any]]:
    """Changes of a plain model, after each of which SGLang must compute it."""
    layer = model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    other_dtype = torch.float64

    class OtherLayer(type(layer)):
        pass

    class OtherMethod(type(attention.o_proj.quant_method)):
        pass

    return {
        "a kind of layer that is not known": lambda: changed(layer, "__class__", OtherLayer),
        "quantized": lambda: changed(mlp.down_proj, "quant_method", OtherMethod()),
        "packed for AMX": lambda: changed(attention.qkv_proj, "use_intel_amx_backend", True),
        "a bias of the output": lambda: changed(attention.o_proj, "bias", torch.nn.Parameter(torch.zeros(1))),
        "another norm": lambda: changed(layer.input_layernorm, "variance_size_override", 8),
        "a norm in another dtype": lambda: changed(
            layer.post_attention_layernorm, "weight", torch.nn.Parameter(layer.input_layernorm.weight.to(other_dtype))
        ),
        "interleaved positions": lambda: changed(attention.rotary_emb, "is_neox_style", False),
        "partial positions": lambda: changed(attention.rotary_emb, "rotary_dim", 4),
        "a window": lambda: changed(attention.attn, "sliding_window_size", 8),
        "states of layers are asked for": lambda: changed(model, "layers_to_capture", [1]),
    }


def main(arguments: list[str]) -> None:
    """Arguments: a JSON file of `spec`, `sequences`, `prompts`; the safetensors file to write, `ours` and `theirs`
    [tokens, vocabulary] logits; the JSON file to write, [is plain, names of changes that it should have seen].
    """
    import on_policy_server

    from gspo_mega.cpu.sglang_layers import _PLAIN, is_plain_model

    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    runner = on_policy_server.runner_of(ServerSpec(**job["spec"]))
    model = runner.model.model
    logits = {}
    for who in ("ours", "theirs"):
        model.embed_tokens._forward_hooks.clear()
        if who == "theirs":
            vars(model)[_PLAIN] = False
        rows = on_policy_server.run(runner, job["sequences"], job["prompts"], on_policy_server.Tape())
        logits[who] = rows["logits"].float().contiguous()
    vars(model).pop(_PLAIN)
    unseen = []
    for name, change in other_models(model).items():
        with change():
            if is_plain_model(model):
                unseen.append(name)
    save_file(logits, arguments[1])
    Path(arguments[2]).write_text(json.dumps([is_plain_model(model), unseen]), encoding="utf-8")
