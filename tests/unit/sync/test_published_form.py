"""What leaves the trainer for its servers, and the checksums that these must report: plain, in FP8 blocks, and of what a
server quantises itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.algorithm.fp8 import dequantize_blocks, quantize_blocks
from gspo_mega.algorithm.rounding import served_experts, served_linear
from gspo_mega.base.errors import PublishError
from gspo_mega.checkpoint import hf_export, quantized
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.quantized import PublishedForm, published_form, quantised_on_load, quantize_weight
from gspo_mega.config import load_config
from gspo_mega.models.block_fp8 import is_quantizable, scale_name
from gspo_mega.models.huggingface import spec_from_config
from gspo_mega.models.spec import BlockFp8
from gspo_mega.models.tensors import hf_tensors
from gspo_mega.sync import publish
from gspo_mega.sync.broadcast_group import buckets, flattened
from gspo_mega.sync.servers import Deadline, Fleet
from gspo_mega.sync.verify import Baseline, ExpectedChecksums, check_replicas, loads_with, server_tensors

ROOT = Path(__file__).parents[3]
RAW = json.loads((ROOT / "configs/models/certify_moe.json").read_text())
SPEC = spec_from_config(RAW | dict(num_hidden_layers=1))
ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.mlp.experts"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {e.name: torch.randn(e.shape, generator=generator) for e in hf_tensors(SPEC)}


def configured(**changes):
    config = load_config(ROOT / "configs/quickstart.yaml").config
    server = config.server.model_copy(update={k: changes.pop(k) for k in ("quantization", "dtype") if k in changes})
    fp8 = config.fp8.model_copy(update={k: changes.pop(k) for k in ("block_scales",) if k in changes})
    return config.model_copy(update={"server": server, "fp8": fp8, **changes})


@pytest.mark.parametrize(
    "changes, gathered, plain, rule",
    [
        (dict(precision="fp32"), torch.float32, torch.float32, None),
        (dict(precision="fp32", dtype="bf16"), torch.float32, torch.bfloat16, None),
        (dict(precision="fp32", quantization="fp8_block"), torch.float32, torch.float32, "float32"),
        (dict(precision="fp8", quantization="fp8_block"), torch.bfloat16, torch.bfloat16, "float32"),
        (dict(precision="fp8", quantization="fp8_block", block_scales="power_of_two"), torch.bfloat16, torch.bfloat16,
         "power_of_two"),
        (dict(precision="bf16", quantization="fp8"), torch.bfloat16, torch.bfloat16, None),
        (dict(precision="fp32", quantization="int8", dtype="bf16"), torch.float32, torch.bfloat16, None),
    ],
)  # fmt: skip
def test_the_configuration_says_what_is_sent(changes, gathered, plain, rule):
    config = configured(**changes)
    form = published_form(config)
    assert (form.gathered, form.plain) == (gathered, plain)
    assert (form.stored is None) == (rule is None) and (rule is None or form.rule == rule)
    assert quantised_on_load(config.server) == (
        changes["quantization"] if changes.get("quantization") in ("fp8", "int8") else None
    )


def test_a_linear_weight_is_sent_with_its_scales_and_the_rest_as_it_is():
    form = PublishedForm(torch.float32, torch.bfloat16, BlockFp8(), "float32")
    for entry in hf_tensors(SPEC):
        tensor = torch.randn(entry.shape)
        sent = dict(form.tensors(entry, tensor))
        assert {n: (t.dtype, tuple(t.shape)) for n, t in sent.items()} == form.described(entry)
        if is_quantizable(entry):
            data, scales = quantize_blocks(tensor, (128, 128))
            assert torch.equal(sent[entry.name].view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(sent[scale_name(entry.name)], scales)
        else:
            assert list(sent) == [entry.name] and torch.equal(sent[entry.name], tensor.to(torch.bfloat16))


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    seed=st.integers(0, 2**16),
    rule=st.sampled_from(["checkpoint", "float32", "power_of_two"]),
)
@settings(max_examples=40, deadline=None)
def test_what_is_published_is_within_half_a_step_of_the_weight(rows, columns, seed, rule):
    """e4m3 has 3 mantissa bits: half a step is 2**-4 of a value, or of the least normal one's scale below that."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    data, scales = quantize_weight(weight, rule, (128, 128))
    back = dequantize_blocks(data, scales)
    step = torch.maximum(
        weight.abs(), 2**-6 * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    )
    assert bool(((back - weight).abs() <= step * 2**-4 * (1 + 1e-6)).all())


def sha(*parts: torch.Tensor) -> str:
    joined = b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts)
    return hashlib.sha256(joined).hexdigest()[:16]


def foretold(sent: dict[str, torch.Tensor], *how) -> dict[str, str]:
    expected = ExpectedChecksums(SPEC, *how)
    for name, tensor in sent.items():
        expected.add(name, tensor)
    return expected.checksums()


def test_checksums_of_blocks_are_of_fused_weights_and_of_fused_scales():
    form, plain = PublishedForm(torch.float32, torch.float32, BlockFp8(), "float32"), weights()
    sent = {n: t for e in hf_tensors(SPEC) for n, t in form.tensors(e, plain[e.name])}
    found = foretold(sent, BlockFp8())
    for suffix in ("", "_scale_inv"):
        parts = [sent[f"{ATTENTION}.{n}_proj.weight{suffix}"] for n in "qkv"]
        assert found[f"{ATTENTION}.qkv_proj.weight{suffix}"] == sha(*parts)
        count = RAW["num_experts"]
        parts = [sent[f"{EXPERTS}.{e}.{n}_proj.weight{suffix}"] for e in range(count) for n in ("gate", "up")]
        assert found[f"{EXPERTS}.w13_weight{suffix}"] == sha(*parts)
    assert found.keys() == server_tensors(SPEC, BlockFp8()).expected


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_checksums_of_what_a_server_quantises_are_those_of_its_fused_parameters(kind):
    sent = weights()
    found = foretold(sent, None, kind)
    data, scale = served_linear(torch.cat([sent[f"{ATTENTION}.{n}_proj.weight"] for n in "qkv"]), kind)
    assert found[f"{ATTENTION}.qkv_proj.weight"] == sha(data)
    assert found[f"{ATTENTION}.qkv_proj.weight_scale"] == sha(scale)
    experts = [
        torch.cat([sent[f"{EXPERTS}.{e}.{n}_proj.weight"] for n in ("gate", "up")]) for e in range(RAW["num_experts"])
    ]
    data, scale = served_experts(torch.stack(experts), kind)
    assert found[f"{EXPERTS}.w13_weight"] == sha(data) and found[f"{EXPERTS}.w13_weight_scale"] == sha(scale)
    assert found.keys() == server_tensors(SPEC, None, kind).expected


@pytest.mark.parametrize("name", [f"{ATTENTION}.o_proj.weight", f"{EXPERTS}.1.down_proj.weight_scale_inv"])
def test_another_scale_or_another_weight_has_another_checksum(name):
    form, plain = PublishedForm(torch.float32, torch.float32, BlockFp8(), "float32"), weights()
    sent = {n: t for e in hf_tensors(SPEC) for n, t in form.tensors(e, plain[e.name])}
    right = foretold(sent, BlockFp8())
    other = sent[name].clone()
    other.view(torch.uint8).view(-1)[0] ^= 1
    wrong = foretold(sent | {name: other}, BlockFp8())
    (changed,) = [n for n in right if right[n] != wrong[n]]
    assert changed == server_tensors(SPEC, BlockFp8()).names[name]


class _Server:
    server_id, tensor_parallel, generation = "a", 1, 1


def check(tensors, before: dict[str, str], now: dict[str, str], digests: dict[str, str]) -> str | None:
    fleet = Fleet([_Server()], Deadline(5))
    old = dict.fromkeys(tensors.names, "1")
    check_replicas(fleet, tensors, {"a": [now]}, old | digests, Baseline(old, {1: [before]}))
    return fleet.failed.get("a")


def test_replicas_a_stale_scale_is_named_and_a_gpu_reports_weights_with_scales():
    tensors = server_tensors(SPEC, BlockFp8())
    held = dict.fromkeys(tensors.expected, "1")
    weight, scales = f"{ATTENTION}.o_proj.weight", f"{ATTENTION}.o_proj.weight_scale_inv"
    changed = {weight: "2", scales: "2"}
    assert check(tensors, held, held | changed, changed) is None
    assert f"changed in the trainer and not there: {scales}" in check(tensors, held, held | {weight: "2"}, changed)
    together = server_tensors(SPEC, BlockFp8(), reports_scales=False)
    assert together.expected == {name for name in tensors.expected if not name.endswith("_scale_inv")}
    held = dict.fromkeys(together.expected, "1")
    assert check(together, held, held | {weight: "2"}, {scales: "2"}) is None


def test_replicas_what_a_server_rounds_itself_may_stay_and_may_not_change_alone():
    tensors = server_tensors(SPEC, None, "fp8")
    held = dict.fromkeys(tensors.expected, "1")
    weight = f"{ATTENTION}.o_proj.weight"
    assert check(tensors, held, held, {weight: "2"}) is None
    assert check(tensors, held, held | {f"{weight}_scale": "2"}, {weight: "2"}) is None
    assert "changed there and not in the trainer" in check(tensors, held, held | {f"{weight}_scale": "2"}, {})
    assert "changed in the trainer and not there: lm_head.weight" in check(tensors, held, held, {"lm_head.weight": "2"})


def test_a_buckets_bytes_are_aligned_whatever_its_dtypes():
    """SGLang takes each tensor from where the one before it ends, and refuses a start that its dtype cannot have."""
    tensors = [torch.arange(3).to(torch.float8_e4m3fn), torch.tensor([1.5]), torch.ones(3, dtype=torch.bfloat16)]
    ordered = sorted(tensors, key=lambda tensor: -tensor.element_size())
    flat, start = flattened(ordered), 0
    for tensor in ordered:
        assert start % tensor.element_size() == 0
        end = start + tensor.numel() * tensor.element_size()
        assert torch.equal(flat[start:end].view(tensor.dtype).float(), tensor.float())
        start = end
    assert start == flat.numel()


def test_fused_down_projections_and_their_scales_stay_in_one_bucket():
    names = [f"l.0.self_attn.{n}.weight{s}" for n in ("q_a_proj", "kv_a_proj_with_mqa") for s in ("", "_scale_inv")]
    tensors = [("l.0.input_layernorm.weight", torch.zeros(20)), *((n, torch.zeros(20)) for n in names)]
    tensors += [("l.1.self_attn.q_a_proj.weight", torch.zeros(20))]
    found = [[name for name, _ in bucket] for bucket in buckets(iter(tensors), 80)]
    assert found == [["l.0.input_layernorm.weight"], names, ["l.1.self_attn.q_a_proj.weight"]]
    assert not loads_with("l.1.self_attn.q_a_proj.weight", names[-1])


def test_scales_of_another_shape_are_not_sent(monkeypatch):
    form = PublishedForm(torch.float32, torch.float32, BlockFp8(), "float32")
    entry = next(e for e in hf_tensors(SPEC) if e.name == f"{ATTENTION}.o_proj.weight")
    monkeypatch.setattr(quantized, "quantize_blocks", lambda x, *_, **__: quantize_blocks(x, (1, 128)))
    with pytest.raises(PublishError, match=f"{entry.name}_scale_inv: has the shape"):
        list(form.tensors(entry, torch.randn(entry.shape)))


@pytest.mark.parametrize("rule", ["checkpoint", "float32", "power_of_two"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_not_sent_as_a_finite_one(rule, value):
    form = PublishedForm(torch.float32, torch.float32, BlockFp8(), rule)
    entry = next(e for e in hf_tensors(SPEC) if e.name == f"{ATTENTION}.o_proj.weight")
    tensor = torch.randn(entry.shape)
    tensor[3, 5] = value
    with pytest.raises(PublishError, match=f"{entry.name}: has a value that is not finite"):
        list(form.tensors(entry, tensor))


class _Policy:
    """The tensors that one rank owns; the first linear weight is infinite. Counts what was gathered."""

    groups = SimpleNamespace(host="host", is_lead=True, world=SimpleNamespace(rank=0))
    spec = SPEC
    table = {entry.name: [entry] for entry in hf_tensors(SPEC)}
    owners = {entry.parameter: 0 for entry in hf_tensors(SPEC)}
    stored, owner = PolicyTensors.stored, PolicyTensors.owner

    def __init__(self) -> None:
        self.num_gathered = 0

    def config_json(self, raw):
        return raw

    def owned(self, dtype):
        for entry in hf_tensors(SPEC):
            self.num_gathered += 1
            yield entry, torch.full(entry.shape, float("inf"))

    def brought_to(self, home, dtype):
        return self.owned(dtype)


@pytest.mark.parametrize("through", ["digests", "export", "checksums"])
def test_what_one_rank_cannot_send_all_ranks_are_told(tmp_path, monkeypatch, through):
    """Other ranks wait in the next collective; an error of one rank alone would leave them there."""
    told: list[tuple[list[str], object]] = []

    def raise_together(problems, group, error, title, limit=20):
        told.append((problems, group))
        if problems:
            raise error(problems[0])

    for module in (hf_export, publish):
        monkeypatch.setattr(module, "raise_together", raise_together)
    monkeypatch.setattr(hf_export, "_start", lambda staging, *_: staging.mkdir())
    form, policy = PublishedForm(torch.float32, torch.float32, BlockFp8(), "float32"), _Policy()
    with pytest.raises(PublishError, match="has a value that is not finite"):
        if through == "digests":
            hf_export.policy_digests(policy, form)
        elif through == "export":
            hf_export.export_policy(policy, tmp_path / "v1", form, tmp_path, 1)
        else:
            publish.expected_checksums(policy, form, ExpectedChecksums(SPEC, form.stored, None))
    assert told[-1][0] and told[-1][1] == "host"
    assert policy.num_gathered == len(hf_tensors(SPEC)), "the collectives were run to their end"
