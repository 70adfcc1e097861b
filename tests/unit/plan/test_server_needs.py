"""What the precisions of a server cost, and which of them a model or a GPU cannot have."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from gspo_mega.base.errors import PlanError
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import plan_run, render_report
from gspo_mega.plan.memory import server_memory
from gspo_mega.plan.servers import cache_element_bytes, weight_bytes

SHAPES = Path(__file__).parents[3] / "configs" / "models"
# Every side a multiple of 128: 4 heads of 64 and 2 key-value heads.
WIDE = dict(hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)


@pytest.fixture
def latent_shape(tmp_path):
    def writer(**changes: int) -> Path:
        raw = json.loads((SHAPES / "certify_mla.json").read_text()) | changes
        path = tmp_path / "latent.json"
        path.write_text(json.dumps(raw))
        return path

    return writer


def refusals(load, shape, *overrides, device="cpu", kind="dense", **sizes) -> str:
    with pytest.raises(PlanError) as error:
        plan_run(load(*overrides), device, shape(kind, **(WIDE | sizes)))
    return str(error.value)


def test_weights_take_a_byte_and_their_scales(load, shape):
    """By hand: a layer has q 256 x 256, k and v 128 x 256, o 256 x 256, gate, up, down 512 x 256."""
    spec = read_model_spec(shape("dense", **WIDE, num_hidden_layers=2))
    q, kv, mlp = 256 * 256, 128 * 256, 512 * 256
    linear, rest = 2 * (2 * q + 2 * kv + 3 * mlp), 1000

    def size(quantization: str, *overrides: str) -> int:
        config = load("precision=fp32", f"server.quantization={quantization}", *overrides).config
        return weight_bytes(config.server, config.precision, spec, linear + rest)

    assert size("none") == 4 * (linear + rest)
    assert size("none", "server.dtype=bf16") == 2 * (linear + rest)
    blocks = 2 * (2 * 4 + 2 * 2 + 3 * 8)
    assert size("fp8_block") == linear + 4 * rest + 4 * blocks
    rows = 2 * (256 + 128 + 128 + 256 + 512 + 512 + 256)
    assert size("fp8") == size("int8") == linear + 4 * rest + 4 * rows
    assert size("fp8", "server.dtype=bf16") == linear + 2 * rest + 4 * rows


def test_an_experts_weight_has_one_scale_in_fp8_and_one_a_row_in_int8(load, shape):
    spec = read_model_spec(shape("moe"))
    configs = [load(f"server.quantization={q}").config for q in ("fp8", "int8")]
    fp8, int8 = (weight_bytes(config.server, config.precision, spec, 10**6) for config in configs)
    moe = spec.moe
    rows = spec.num_layers * moe.num_experts * (2 * moe.expert_intermediate_size + spec.hidden_size)
    assert int8 - fp8 == 4 * (rows - spec.num_layers * moe.num_experts * 3)


def test_an_fp8_cache_holds_twice_the_tokens_of_bf16(load, shape):
    spec = read_model_spec(shape("dense"))
    tokens = {
        cache: server_memory(load("precision=bf16", f"server.kv_cache={cache}").config, spec, 0, 10**6).cache_tokens
        for cache in ("auto", "fp8")
    }
    assert abs(tokens["fp8"] - 2 * tokens["auto"]) <= 1
    for config, size in ((load().config, 2), (load("server.dtype=fp32").config, 4)):
        assert cache_element_bytes(config.server, config.precision) == size


def test_the_report_says_what_servers_compute_in(load, shape):
    report = render_report(
        plan_run(load("server={quantization: fp8_block, kv_cache: fp8, dtype: fp32}"), "cpu", shape("dense", **WIDE))
    )
    assert "fp32 activations, e4m3 weights in 128 x 128 blocks, quantized by the trainer, e4m3 cache" in " ".join(
        report.split()
    )
    assert "bf16 activations, bf16 weights, bf16 cache" in render_report(plan_run(load(), "cpu", shape("dense")))


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("dense", {"hidden_size": 192}, "hidden size 192"),
        ("dense", {"num_attention_heads": 3, "num_key_value_heads": 3}, "attention output (heads x head size) 192"),
        ("dense", {"num_attention_heads": 3, "num_key_value_heads": 3}, "query size (heads x head size) 192"),
        ("dense", {"num_key_value_heads": 1}, "key size and value size (heads x head size) 64"),
        ("dense", {"intermediate_size": 576}, "intermediate size 576"),
        ("moe", {"moe_intermediate_size": 64}, "experts' intermediate size 64"),
    ],
)
def test_blocks_divide_every_part_of_a_linear_layer(load, shape, kind, sizes, said):
    text = refusals(load, shape, "server.quantization=fp8_block", kind=kind, **sizes)
    assert "server.quantization: fp8_block needs these sides of a linear layer on one of a server's 1 ranks" in text
    assert said in text and "valid: none, fp8, int8" in text


def test_blocks_divide_a_ranks_share(load, shape):
    two = ("server={quantization: fp8_block, tensor: 2}", "publish.verify=replicas")
    text = refusals(load, shape, *two)
    assert "key size and value size (heads x head size) 128 / 2 ranks" in text and "a smaller server.tensor" in text
    plan_run(load(*two), "cpu", shape("dense", **(WIDE | {"num_key_value_heads": 4})))
    # Above the number of key-value heads, ranks keep copies of a head.
    four = ("server={quantization: fp8_block, tensor: 4}", "publish.verify=replicas")
    plan_run(load(*four), "cpu", shape("dense", **(WIDE | {"head_dim": 128})))


LATENT = dict(
    hidden_size=256,
    intermediate_size=256,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    moe_intermediate_size=128,
)


@pytest.mark.parametrize(
    ("overrides", "changes", "said"),
    [
        ([], {"q_lora_rank": 64}, "q_lora_rank 64"),
        ([], {"kv_lora_rank": 64}, "kv_lora_rank 64"),
        ([], {"moe_intermediate_size": 64}, "shared experts' intermediate size 64"),
        (["server.tensor=4"], {"v_head_dim": 128, "moe_intermediate_size": 512, "intermediate_size": 512}, "384 / 4"),
        (["server.tensor=4"], {"v_head_dim": 128}, "keys' and values' size (heads x both) 768 / 4"),
    ],
)
def test_a_latents_sides(load, latent_shape, overrides, changes, said):
    """The key-value projection with its rotary part (160 rows) is one part of one rank's: it may be ragged."""
    blocks = ["server.quantization=fp8_block", "publish.verify=replicas"]
    plan_run(load(*blocks), "cpu", latent_shape(**LATENT))
    with pytest.raises(PlanError) as error:
        plan_run(load(*blocks, *overrides), "cpu", latent_shape(**(LATENT | changes)))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["precision=fp32", "server.quantization=fp8_block"], "fp8_block with activations in fp32: on a GPU"),
        (["precision=bf16", "server.quantization=int8"], "int8: on a GPU SGLang takes INT8 weights from a checkpoint"),
        (
            ["precision=bf16", "train.num_steps=1", "server.quantization=fp8"],
            "fp8: on a GPU SGLang cannot load new weights into layers that it quantized while",
        ),
    ],
)
def test_what_sglang_cannot_on_a_gpu(load, shape, overrides, said):
    text = refusals(load, shape, *overrides, device="gpu")
    assert f"server.quantization: {said}" in text
    plan_run(load(*overrides), "cpu", shape("dense", **WIDE))


def test_servers_that_are_only_evaluated_may_quantize_on_a_gpu(load, shape):
    loaded = load("precision=bf16", "server.quantization=fp8")
    assert loaded.config.train is None
    plan_run(loaded, "gpu", shape("dense", **WIDE))


def test_triton_reads_no_e4m3_cache_on_a_gpu_without_it(load, shape, latent_shape):
    """Of plain weights too. FlashInfer, SGLang's choice there for other attention than latent, converts it itself."""
    cache = ("precision=bf16", "server.kv_cache=fp8", "cluster.gpu=A100")
    plan_run(load(*cache), "gpu", shape("dense", **WIDE))
    text = refusals(load, shape, *cache, "server.attention_backend=triton", device="gpu")
    assert "server.kv_cache: fp8 on A100: Triton" in text and "`server.attention_backend: flashinfer`" in text
    with pytest.raises(PlanError, match=r"server.kv_cache: fp8 on A100: .*nearest valid: auto"):
        plan_run(load(*cache), "gpu", latent_shape())
    plan_run(load(*cache), "cpu", latent_shape())
    plan_run(load("precision=bf16", "server.kv_cache=fp8", "cluster.gpu=H100"), "gpu", latent_shape())


@pytest.mark.parametrize(
    ("gpu", "quantization", "trains", "said"),
    [
        ("A100", "fp8_block", True, "fp8_block on a GPU of compute capability 8.0: SGLang repacks FP8 weights"),
        ("A100", "fp8_block", False, "fp8_block on a GPU of compute capability 8.0: SGLang repacks FP8 weights"),
        ("A100", "fp8", False, "fp8 on a GPU of compute capability 8.0: SGLang repacks FP8 weights"),
        (
            "B200",
            "fp8_block",
            True,
            "fp8_block on a GPU of compute capability 10.0: SGLang replaces the blocks' scales",
        ),
        ("B200", "fp8_block", False, None),
        ("H100", "fp8_block", True, None),
        ("A100", "none", True, None),
    ],
)
def test_blocks_are_sent_only_to_gpus_that_keep_them(load, shape, gpu, quantization, trains, said):
    words = ["precision=bf16", f"cluster.gpu={gpu}", f"server.quantization={quantization}"]
    words += ["train.num_steps=1"] * trains
    if said is None:
        plan_run(load(*words), "gpu", shape("dense", **WIDE))
    else:
        assert f"server.quantization: cluster.gpu {gpu}: {said}" in refusals(load, shape, *words, device="gpu")
    plan_run(load(*words), "cpu", shape("dense", **WIDE))


@pytest.mark.parametrize(
    ("kind", "tied", "refused"), [("moe", True, True), ("moe", False, False), ("dense", True, False)]
)
def test_an_output_layer_that_sglang_does_not_tie_is_refused(load, shape, kind, tied, refused):
    def planned(*overrides):
        return plan_run(load(*overrides), "cpu", shape(kind, tie_word_embeddings=tied))

    if refused:
        with pytest.raises(
            PlanError, match="model.path: tie_word_embeddings is true .* SGLang 0.5.23 does not tie them"
        ):
            planned("train.num_steps=1")
    else:
        planned("train.num_steps=1")
    planned()  # which samples nothing, as `certify`
    planned("train={num_steps: 1, from_rollouts: /recorded}")


def test_the_table_of_untied_output_layers_is_sglangs():
    """Its models that tie the two say so where they make `lm_head`."""
    from family_models import SERVED_BY

    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        pytest.skip("sglang is not installed")
    models = Path(package.origin).parent / "srt" / "models"
    sources = {path: path.read_text() for path in models.glob("*.py")}
    for name, family in FAMILIES.items():
        known, _ = SERVED_BY.get(name, (family.architecture, None))
        # SGLang serves the classes that a module lists as its entries.
        (source,) = [text for text in sources.values() if re.search(rf"\b{known}\b", text.partition("\nEntryClass")[2])]
        assert family.own_head == ("config.tie_word_embeddings" not in source), name


@pytest.mark.parametrize(
    ("kind", "changes", "words", "refused"),
    [
        ("dense", {"intermediate_size": 176}, (), "intermediate_size 176: without a GPU SGLang 0.5.23 pads"),
        ("dense", {"intermediate_size": 160}, (), None),
        ("dense", {"intermediate_size": 160}, ("server.tensor=2",), "multiples of 32 x server.tensor 2 = 64"),
        ("moe", {"moe_intermediate_size": 40}, (), "the experts' width 40: without a GPU"),
        ("moe", {"intermediate_size": 100}, (), None),  # of no layer
        ("dense", {"intermediate_size": 176}, ("train.from_rollouts=/recorded",), None),
    ],
)
def test_widths_that_sglang_pads_without_a_gpu_are_refused(load, shape, kind, changes, words, refused):
    words, model = ("train.num_steps=1", *words), shape(kind, **changes)
    if refused is None:
        plan_run(load(*words), "cpu", model)
    else:
        assert refused in refusals(load, shape, *words, device="cpu", kind=kind, **changes)
