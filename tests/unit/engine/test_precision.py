import logging

import pytest
import torch
from run_configs import make_config

import gspo_mega.engine.precision as precision
from gspo_mega.base.errors import ModelError
from gspo_mega.engine.model import transformer_config
from gspo_mega.models.spec import ModelSpec

SPEC = ModelSpec(
    family="qwen3",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=512,
    max_position_embeddings=256,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="bfloat16",
    eos_token_ids=(2,),
)


def fp8(**section):
    return make_config(precision="fp8", fp8=section)


@pytest.fixture
def pretend(monkeypatch):
    """As on a machine with that GPU, CUDA and Transformer Engine; `engine` None: it cannot be imported."""

    def machine(capability, cuda="13.0", engine="2.20.2", powers_of_two=False):
        monkeypatch.setattr(precision, "_multiplies_powers_of_two", lambda: powers_of_two)
        monkeypatch.setattr(precision, "is_cpu_backend", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(
            precision, "transformer_engine_error", lambda: None if engine else "ImportError: libcudart.so.13"
        )
        monkeypatch.setattr(precision, "transformer_engine_version", lambda: engine)

    return machine


@pytest.mark.parametrize("config", [fp8(), make_config(precision="bf16", engine=dict(transformer_engine=True))])
def test_without_a_gpu_a_process_that_did_not_load_transformer_engine_says_so(config):
    with pytest.raises(ModelError, match="has not loaded; it loads them if GSPO_TRANSFORMER_ENGINE=1"):
        transformer_config(config, SPEC)


def test_fp8_without_transformer_engine_is_an_error_that_says_why(pretend):
    pretend((9, 0), engine=None)
    with pytest.raises(ModelError, match=r"cannot be imported: install .*importing it: ImportError: libcudart.so.13"):
        precision.require_precision(fp8())
    with pytest.raises(ModelError, match="bf16 on a GPU needs Transformer Engine"):
        precision.require_precision(make_config(precision="bf16"))
    precision.require_precision(make_config(precision="fp32"))


def test_a_recipe_that_the_chip_lacks_is_an_error(pretend):
    pretend((8, 9))
    with pytest.raises(ModelError, match="blockwise needs Hopper"):
        precision.require_precision(fp8())
    precision.require_precision(fp8(recipe="tensorwise"))


BLOCKS = dict(server=dict(quantization="fp8_block"))


@pytest.mark.parametrize(
    ("capability", "gpu", "block_scales", "is_wrong"),
    [
        ((10, 0), None, "auto", True),
        ((10, 0), "H100", "auto", True),
        ((10, 0), "B200", "auto", False),
        ((9, 0), "B200", "auto", True),
        ((9, 0), None, "auto", False),
        ((9, 0), "B200", "float32", False),
        ((10, 0), None, "power_of_two", False),
    ],
)
@pytest.mark.parametrize("trainer", ["bf16", "fp8"])
def test_published_blocks_have_the_scales_of_this_gpu(pretend, capability, gpu, block_scales, is_wrong, trainer):
    pretend(capability, powers_of_two=block_scales == "power_of_two" or capability == (10, 0))
    config = make_config(precision=trainer, fp8=dict(block_scales=block_scales), cluster=dict(gpu=gpu), **BLOCKS)
    if is_wrong:
        with pytest.raises(ModelError, match=rf"^fp8.block_scales: auto is .*cluster.gpu \({gpu or 'null'}\)"):
            precision.require_precision(config)
        assert precision.require_precision(config.model_copy(update=dict(server=make_config().server))) is None
    else:
        precision.require_precision(config)


def test_a_process_that_imported_transformer_engine_before_keeps_its_scales(pretend):
    pretend((9, 0))
    with pytest.raises(ModelError, match="is powers of two on a GPU of .*multiplies with float32 scales.*imported"):
        precision.require_precision(fp8(block_scales="power_of_two"))
    precision.require_precision(fp8(block_scales="power_of_two", recipe="tensorwise"))
    pretend((9, 0), powers_of_two=True)
    precision.require_precision(fp8(block_scales="power_of_two"))
    with pytest.raises(ModelError, match="auto is float32 scales"):
        precision.require_precision(fp8())


@pytest.mark.parametrize(
    ("recipe", "number_format"),
    [("delayed", "hybrid"), ("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")],
)
def test_megatron_is_told_of_fp8_and_nothing_else_changes(pretend, recipe, number_format):
    pretend((9, 0))
    bf16 = settings_of(make_config(precision="bf16"))
    told = settings_of(fp8(recipe=recipe))
    assert told["fp8"] == number_format and told["fp8_recipe"] == recipe and told["fp8_param"] is False
    assert {key: told[key] for key in bf16} == bf16 and bf16["params_dtype"] == torch.bfloat16 and bf16["bf16"]
    assert {key for key in told.keys() - bf16.keys() if not key.startswith("fp8")} == set()
    assert ("fp8_amax_history_len" in told) == (recipe == "delayed")


def test_megatron_takes_every_setting_and_keeps_attention_and_router_out_of_fp8(pretend):
    """All but the fused rotary kernel, which Megatron looks for at once and which needs Transformer Engine."""
    pretend((9, 0))
    settings = settings_of(fp8(recipe="delayed", parameters=True)) | {"apply_rope_fusion": False}
    built = precision_config(settings)
    assert built.fp8 == "hybrid" and built.fp8_param and built.fp8_amax_history_len == 16
    assert (
        not built.fp8_dot_product_attention and not built.fp8_multi_head_attention and not built.first_last_layers_bf16
    )


def settings_of(config):
    dtype = precision.parameter_dtype(config.precision, config.certify)
    return precision.precision_settings(config.precision, config.engine, config.fp8, dtype)


def precision_config(settings):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=4, **settings)


def test_fp32_on_a_gpu_uses_plain_layers(pretend):
    pretend((9, 0))
    plain = dict(pipeline_dtype=torch.float32, bf16=False, transformer_impl="local")
    assert settings_of(make_config(precision="fp32")) == dict(params_dtype=torch.float32, **plain)
    assert settings_of(make_config(precision="bf16"))["transformer_impl"] == "transformer_engine"
    chosen = make_config(precision="bf16", engine=dict(transformer_engine=False))
    assert settings_of(chosen)["transformer_impl"] == "local"


def test_backends_are_described_and_logged_once(pretend, caplog):
    assert precision.describe_backends()[-1] == "no GPU: Megatron's plain layers over gloo"
    pretend((9, 0), engine=None)
    assert any(
        "Transformer Engine: no (ImportError: libcudart.so.13)" in line for line in precision.describe_backends()
    )
    pretend((9, 0))
    caplog.set_level(logging.INFO, "gspo_mega.engine.precision")
    precision.log_backends.cache_clear()
    precision.log_backends()
    precision.log_backends()
    assert caplog.messages == precision.describe_backends() and "Transformer Engine 2.20.2" in caplog.messages
