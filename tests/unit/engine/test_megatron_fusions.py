"""What of the configuration reaches Megatron's TransformerConfig, and what a machine cannot do is refused in words."""

import dataclasses
import logging

import pytest
import torch
from run_configs import make_config
from te_process import in_te_process

import gspo_mega.engine.precision as fusions
from gspo_mega.base.errors import ModelError

BF16 = dict(precision="bf16")
OFF = dict(bias_activation_fusion=False, moe_permute_fusion=False, gradient_accumulation_fusion=False)


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a machine with a GPU, where the libraries are there except those in `missing`."""

    def machine(**missing):
        monkeypatch.setattr(fusions, "is_cpu_backend", lambda: False)
        monkeypatch.setattr(fusions, "_missing", lambda: missing)

    return machine


def settings(has_experts=True, **sections):
    return fusions.fusion_settings(fusions.fusion_choices(make_config(**sections), has_experts), has_experts)


def test_on_a_gpu_everything_is_fused_by_default(on_gpu):
    on_gpu()
    every = dict(bias_activation_fusion=True, moe_permute_fusion=True, gradient_accumulation_fusion=True)
    assert settings(**BF16) == every and settings(precision="fp8") == every
    assert settings(False, **BF16) == every | dict(moe_permute_fusion=False)
    assert settings(precision="fp32") == OFF | dict(bias_activation_fusion=True)
    assert settings(**BF16, engine=dict(transformer_engine=False)) == OFF | dict(bias_activation_fusion=True)


@pytest.mark.parametrize("key", fusions.FUSION_SETTINGS)
def test_a_key_turns_its_setting_off_and_no_other(on_gpu, key):
    on_gpu()
    assert [name for name, on in settings(**BF16, engine={key: False}).items() if not on] == [
        fusions.FUSION_SETTINGS[key]
    ]


def test_without_a_gpu_nothing_is_fused_unless_asked():
    assert settings(**BF16) == OFF and settings(precision="fp32") == OFF
    assert settings(precision="fp32", engine=dict(fuse_activation=True)) == OFF | dict(bias_activation_fusion=True)


@pytest.mark.parametrize(
    ("sections", "has_experts", "words"),
    [
        (dict(precision="fp32", engine=dict(fuse_weight_gradient=True)), True, "weight_gradient: true, .*plain layers"),
        (
            dict(**BF16, engine=dict(fuse_permutation=True, transformer_engine=True)),
            False,
            "permutation: .* no experts",
        ),
        (dict(**BF16, engine=dict(fuse_permutation=True, transformer_engine=True)), True, "Transformer Engine 2.1 or"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused(sections, has_experts, words):
    with pytest.raises(ModelError, match=words + ".*leave the key out|" + words):
        settings(has_experts, **sections)


def test_a_library_that_is_missing_turns_a_default_off_and_refuses_a_wish(on_gpu, caplog):
    on_gpu(fuse_activation="torch.compile needs Triton on a GPU, and it is not installed")
    caplog.set_level(logging.INFO, "gspo_mega.engine.precision")
    fusions._log.cache_clear()
    assert settings(**BF16)["bias_activation_fusion"] is False and settings(**BF16)["moe_permute_fusion"] is True
    assert caplog.messages == [
        "fused: permutation (by default on a GPU), weight gradient (by default on a GPU); not fused: activation"
        " (torch.compile needs Triton on a GPU, and it is not installed)"
    ]
    with pytest.raises(ModelError, match="engine.fuse_activation: true, .*torch.compile needs Triton"):
        settings(**BF16, engine=dict(fuse_activation=True))


def dispatcher(name):
    return fusions.dispatcher_settings(make_config(parallel=dict(expert=2, expert_dispatcher=name)).parallel)


@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_megatrons_own_dispatchers(name):
    assert dispatcher(name) == dict(moe_token_dispatcher_type=name)


def test_the_flex_dispatchers_reach_megatron_where_their_kernels_are(monkeypatch):
    with pytest.raises(ModelError, match="expert_dispatcher: deepep needs the Python package deep_ep"):
        dispatcher("deepep")
    monkeypatch.setattr(fusions.fused_a2a, "HAVE_DEEP_EP", True)
    want = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    assert dispatcher("deepep") == want
    monkeypatch.setattr(fusions.fused_a2a, "HAVE_HYBRIDEP", True)
    fields = {field.name for field in dataclasses.fields(fusions.TransformerConfig)}
    if fusions._UNEVEN_HYBRID in fields:
        assert dispatcher("hybridep") == want | {
            "moe_flex_dispatcher_backend": "hybridep",
            fusions._UNEVEN_HYBRID: True,
        }
        return
    with pytest.raises(ModelError, match="hybridep needs Megatron-Core 0.19: older versions take packs of one length"):
        dispatcher("hybridep")


def test_megatron_accepts_the_settings():
    """Its own checks of a whole TransformerConfig, apart from what needs a library."""
    built = fusions.TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        bias_activation_fusion=True,
        gradient_accumulation_fusion=True,
    )
    assert built.moe_flex_dispatcher_backend == "deepep" and built.bias_activation_fusion


def test_the_head_is_built_without_apex_and_only_there():
    from megatron.core.tensor_parallel import layers

    before = layers._grad_accum_fusion_available
    with fusions.head_without_apex():
        assert layers._grad_accum_fusion_available is True
    assert layers._grad_accum_fusion_available is before


@in_te_process
def test_with_transformer_engine_loaded_nothing_is_missing():
    assert fusions._missing() == {}
    wanted = dict.fromkeys(fusions.FUSION_SETTINGS, True)
    got = settings(precision="bf16", engine=dict(transformer_engine=True, **wanted))
    assert got == dict(bias_activation_fusion=True, moe_permute_fusion=True, gradient_accumulation_fusion=True)
