"""What ranks run in the family tests: one sequence through each layout, its logits, and the weights out again."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from exact_numbers import exact_engine
from layout_jobs import layout_config, pack
from safetensors.torch import load_file

from gspo_mega.checkpoint import gather, hf_folder, hf_import
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.engine.losses import PassOutput
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.routing import RoutingPass
from gspo_mega.models import families, tensors
from gspo_mega.models.huggingface import read_model_spec

SIZES = ("tensor", "pipeline", "context", "expert", "expert_tensor")


def through_layouts(
    folder: str,
    layouts: dict[str, dict],
    precision: str = "fp32",
    tokens: np.ndarray | None = None,
    fault: str | None = None,
) -> dict | None:
    """For each layout: largest |logit - Hugging Face's| over all tokens and the vocabulary, `logits` of fp32 and `exact`
    of fp64, and the tensors whose bytes did not come back. On rank 0; None elsewhere."""
    with _injected(fault):
        seen = {name: _through(Path(folder), parallel, precision, tokens) for name, parallel in layouts.items()}
    return seen if dist.get_rank() == 0 else None


def _through(folder: Path, parallel: dict, precision: str, tokens: np.ndarray | None) -> dict:
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(str(folder), parallel, precision=precision)
    spec = read_model_spec(folder)
    groups = create_groups(**{name: parallel.get(name, 1) for name in SIZES})
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=1)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        source = load_file(folder / "model.safetensors")
        dtype = next(iter(source.values())).dtype
        found = {name: tensor.clone() for name, tensor in PolicyTensors(spec, groups, engine.chunks).stream(dtype)}
        changed = sorted(
            name
            for name in source
            if groups.world.rank == 0
            and not tensors.is_ignored_tensor(spec, name)
            and not torch.equal(found[name], source[name])
        )
        extra = sorted(found.keys() - source.keys())
        if tokens is None:
            return {"changed": changed + extra}
        own = (engine, spec, groups, tokens)
        return {
            "logits": logits_difference(*own, np.load(folder / "logits.npy")),
            "exact": exact_logits_difference(*own, np.load(folder / "exact_logits.npy")),
            "changed": changed + extra,
        }
    finally:
        destroy_groups()


def gradients_through_layouts(folder: str, layouts: dict[str, dict], tokens: np.ndarray) -> dict | None:
    """For each layout and tensor: the relative L2 difference of its gradient to `gradients.safetensors`, both computed in
    fp64. The loss is the sum of the log-probs of all tokens but the first. On rank 0; None elsewhere.
    """
    seen = {name: _gradient_differences(Path(folder), parallel, tokens) for name, parallel in layouts.items()}
    return seen if dist.get_rank() == 0 else None


def _gradient_differences(folder: Path, parallel: dict, tokens: np.ndarray) -> dict[str, float]:
    parallel = {"expert_tensor": 1, **parallel}
    # The distributed optimizer would leave each rank a part of the sums.
    config = layout_config(str(folder), parallel, optimizer=dict(distributed=False))
    spec = read_model_spec(folder)
    groups = create_groups(**{name: parallel.get(name, 1) for name in SIZES})
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=1)
        import_huggingface(folder, spec, groups, engine.chunks)
        engine.after_weights_loaded()
        # Every data rank has the sequence, and gradients are summed over them.
        with exact_engine(engine):
            engine.accumulate_gradients(
                [pack([_sequence(tokens)], [0], 2 * groups.tensor.size * groups.context.size)],
                lambda batch, log_probs, entropies: PassOutput(loss=log_probs.double().sum() / groups.data.size),
            )
        wanted = load_file(folder / "gradients.safetensors")
        found = PolicyTensors(spec, groups, engine.chunks, values=lambda parameter: parameter.main_grad)
        apart = {name: float((tensor - wanted[name]).norm()) for name, tensor in found.stream(torch.float32)}
        # An expert that no token chose has no gradient: here, too, or the difference is infinite.
        return {name: value and float(np.divide(value, float(wanted[name].norm()))) for name, value in apart.items()}
    finally:
        destroy_groups()


def _sequence(tokens: np.ndarray) -> dict:
    """The tokens as a prompt of one and a response."""
    return dict(
        tokens=tokens,
        prompt=1,
        mask=np.ones(len(tokens) - 1, np.float32),
        rollout=np.zeros(len(tokens) - 1, np.float32),
        advantage=1.0,
    )


def exact_logits_difference(engine: PolicyEngine, *of) -> float:
    """`logits_difference`, computed in fp64, in which the engine's weights then stay."""
    with exact_engine(engine):
        return logits_difference(engine, *of)


def logits_difference(engine: PolicyEngine, spec, groups, tokens: np.ndarray, reference: np.ndarray) -> float:
    """Of whole logits, put together from all tensor ranks of the last stage; the largest over the ranks, inf for NaN,
    which neither gloo's maximum nor Python's keeps. Collective.
    """
    caught: list[torch.Tensor] = []
    hook = engine.chunks[-1].register_forward_hook(lambda module, inputs, output: caught.append(output))
    batch = [pack([_sequence(tokens)], [0], 2 * groups.tensor.size)]
    engine.pipeline.run(
        batch,
        lambda batch, log_probs, entropies: PassOutput(),
        forward_only=True,
        routing=RoutingPass(engine.routers, 1),
    )
    hook.remove()
    difference = torch.zeros((), dtype=torch.float64)
    if groups.is_last_stage:
        with torch.no_grad():
            hidden = _gathered(caught[0], groups.tensor) if engine.megatron_config.sequence_parallel else caught[0]
            part = hidden[:, 0] @ engine.chunks[-1].head_weight().T
            logits = _gathered(part.T.contiguous(), groups.tensor).T[: len(tokens), : spec.vocab_size]
        difference = (logits.double() - torch.from_numpy(reference)).abs().nan_to_num(nan=torch.inf).max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return float(difference)


def _gathered(part: torch.Tensor, group) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size)]
    dist.all_gather(parts, part.contiguous(), group=group.group)
    return torch.cat(parts)


def _keys_first(spec, rows: np.ndarray) -> np.ndarray:
    """Rows of kv_b_proj as if the keys of all heads lay before the values."""
    heads = rows.reshape(spec.num_heads, -1)
    return np.concatenate([heads[:, : spec.latent.content_dim].ravel(), heads[:, spec.latent.content_dim :].ravel()])


def _halves(spec, rows: np.ndarray) -> np.ndarray:
    """Rows of q_b_proj with the pairs that positions turn as halves beside each other, as most families have them."""
    heads = rows.reshape(spec.num_heads, -1).copy()
    rotary = heads[:, spec.latent.content_dim :]
    heads[:, spec.latent.content_dim :] = np.concatenate([rotary[:, 0::2], rotary[:, 1::2]], axis=1)
    return heads.ravel()


_REORDERED = {
    "keys of all heads before values": ("kv_b_proj.weight", _keys_first),
    "rotary elements one half apart": ("q_b_proj.weight", _halves),
    "another head's norm": ("q_norm.weight", lambda spec, rows: np.roll(rows, spec.head_dim)),
}


def _queries_first(spec, rows: int) -> np.ndarray:
    """Where a row of q_proj would lie if the queries of all heads were before their gates."""
    return np.arange(rows).reshape(2, spec.num_heads, -1).swapaxes(0, 1).ravel()


def _sections(spec, rows: int) -> np.ndarray:
    """Where a row of in_proj_qkvz would lie if queries, keys, values and gates of all key heads followed each other."""
    heads, delta = spec.delta.key_heads, spec.delta
    widths = [delta.key_dim, delta.key_dim, *[delta.values // heads] * 2]
    starts = np.cumsum([0, *(heads * width for width in widths)])
    return np.concatenate(
        [start + head * width + np.arange(width) for head in range(heads) for start, width in zip(starts, widths)]
    )


_PERMUTED = {
    "queries of all heads before gates": ("self_attn.q_proj.weight", _queries_first),
    "one section of all key heads after another": ("in_proj_qkvz.weight", _sections),
    "decays of other heads": ("A_log", lambda spec, rows: np.arange(rows)[::-1]),
}
# Where an expert's tensors would lie in a stack.
_STACKED_AS = {
    "up before gate in a stack": {"gate": ("gate_up_proj", 1, 2), "up": ("gate_up_proj", 0, 2)},
    "gate and up in turn in a stack": {},
}
_OF_ANOTHER_LAYER = {
    "another layer's bias": ".expert_bias",
    "another layer's gate": ".gate_weight",
    "another layer's sinks": ".softmax_offset",
    "another layer's norm of outputs": ".post_mlp_layernorm.weight",
}
# The model is read as if it were another of the same tensors.
_READ_AS = {
    "rotary elements over the whole head": lambda spec: dict(rotary_share=1.0),
    "norms that multiply by their weight": lambda spec: dict(zero_centred_norms=False),
    "windows in the other layers": lambda spec: dict(
        window=dataclasses.replace(spec.window, layers=tuple(not windowed for windowed in spec.window.layers))
    ),
    "a window of one token more": lambda spec: dict(
        window=dataclasses.replace(spec.window, tokens=spec.window.tokens + 1)
    ),
    "an activation without a limit": lambda spec: dict(swiglu_limit=1e9),
    "wavelengths in whole dimensions": lambda spec: dict(
        rope_scaling=dataclasses.replace(spec.rope_scaling, rounds=True)
    ),
}


def _in_turn(own: torch.Tensor, entry: tensors.TensorEntry) -> torch.Tensor:
    own = own.t() if entry.stack.transposed else own
    return own[entry.stack.first :: entry.stack.step]


@contextlib.contextmanager
def _injected(fault: str | None) -> Iterator[None]:
    """A fault in the one place of reshapes, seen by import and export alike: a round trip cannot notice it."""
    if fault is None:
        yield
        return
    if fault == "swapped gate and up":
        other = {"gate": "up", "up": "gate"}
        swapped = {
            name: dataclasses.replace(
                family, tensors=tuple(dataclasses.replace(r, role=other.get(r.role, r.role)) for r in family.tensors)
            )
            for name, family in tensors.FAMILIES.items()
        }
        # The head and the embedding are told by identity.
        for name, family in swapped.items():
            kept = tuple(
                old if old.role == new.role else new for old, new in zip(tensors.FAMILIES[name].tensors, family.tensors)
            )
            swapped[name] = dataclasses.replace(family, tensors=kept)
        patch = mock.patch.object(tensors, "FAMILIES", swapped)
    elif fault in ("permuted experts", *_OF_ANOTHER_LAYER):
        plain = tensors._entry

        def permuted(spec, sizes, rule, layer=None, expert=None):
            entry = plain(spec, sizes, rule, layer, expert)
            if fault in _OF_ANOTHER_LAYER:
                first = 0 if spec.moe is None else spec.moe.num_dense_layers
                other = None if layer is None else first + (layer - first + 1) % (spec.num_layers - first)
                return (
                    dataclasses.replace(entry, parameter=rule.parameter.format(layer=other))
                    if rule.parameter.endswith(_OF_ANOTHER_LAYER[fault])
                    else entry
                )
            if expert is None:
                return entry
            return dataclasses.replace(
                entry, parameter=rule.parameter.format(layer=layer, expert=(expert + 1) % spec.moe.num_experts)
            )

        patch = mock.patch.object(tensors, "_entry", permuted)
    elif fault in _REORDERED:
        ends, order = _REORDERED[fault]
        plain_blocks = tensors.parameter_blocks

        def reordered(spec, entry, tensor_parallel, tensor_rank):
            if not entry.name.endswith(ends):
                return plain_blocks(spec, entry, tensor_parallel, tensor_rank)
            rows = order(spec, np.arange(entry.shape[0]))
            return [tensors.TensorBlock(0, int(row), place, 1) for place, row in enumerate(rows)]

        # Bound by name where they are used.
        patch = contextlib.ExitStack()
        for module in (hf_import, gather):
            patch.enter_context(mock.patch.object(module, "parameter_blocks", reordered))
    elif fault in _PERMUTED:
        ending, permutation = _PERMUTED[fault]
        right_blocks = tensors.parameter_blocks

        def permuted_rows(spec, entry, tensor_parallel, tensor_rank):
            blocks = right_blocks(spec, entry, tensor_parallel, tensor_rank)
            if not entry.name.endswith(ending):
                return blocks
            rows = permutation(spec, entry.shape[0])
            return [
                tensors.TensorBlock(0, int(rows[block.start + place]), block.local_start + place, 1)
                for block in blocks
                for place in range(block.length)
            ]

        patch = contextlib.ExitStack()
        for module in (hf_import, gather):
            patch.enter_context(mock.patch.object(module, "parameter_blocks", permuted_rows))
    elif fault in _STACKED_AS:
        patch = contextlib.ExitStack()
        patch.enter_context(mock.patch.dict(families._PLACES_IN_STACKS, _STACKED_AS[fault]))
        if not _STACKED_AS[fault]:
            patch.enter_context(mock.patch.object(hf_folder, "_part_of_expert", _in_turn))
    elif fault in _READ_AS:

        def read_as(folder, read=read_model_spec):
            spec = read(folder)
            return dataclasses.replace(spec, **_READ_AS[fault](spec))

        patch = mock.patch.object(sys.modules[__name__], "read_model_spec", read_as)
    else:
        assert fault == "query, key and value one after the other"

        def one_after_the_other(spec, role):
            query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
            start, length = {"q": (0, query), "k": (query, key), "v": (query + key, key)}[role]
            yield tensors.TensorBlock(0, 0, start, length)

        patch = mock.patch.object(tensors, "_fused_qkv_rows", one_after_the_other)
    with patch:
        yield
