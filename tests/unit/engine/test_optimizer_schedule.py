"""Learning rates by hand, and settings that this machine cannot follow."""

from types import SimpleNamespace

import pytest
import torch
from run_configs import make_config

import gspo_mega.engine  # noqa: F401  the CPU backend comes before Megatron
from gspo_mega.base.errors import ModelError
from gspo_mega.config.schema import Optimizer
from gspo_mega.engine import optimizer
from gspo_mega.engine.optimizer import build_scheduler
from gspo_mega.engine.policy import PolicyEngine


def learning_rates(num_optimizer_steps, num_steps, **settings):
    """The rate that each of the first optimizer steps uses."""
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    settings = Optimizer(weight_decay=0.1, **settings)
    scheduler = build_scheduler(settings, SimpleNamespace(param_groups=groups), num_optimizer_steps)
    rates = []
    for _ in range(num_steps):
        assert groups[0]["lr"] == groups[1]["lr"]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        rates.append(groups[0]["lr"])
        scheduler.step(increment=1)
    return rates


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (dict(schedule="constant"), [8, 8, 8, 8, 8, 8, 8]),
        # Step k of n warm-up steps has k/n of the peak: no step trains at a rate of 0, and step n is the first at the peak.
        (dict(schedule="constant", warmup_steps=4), [2, 4, 6, 8, 8, 8, 8]),
        (dict(schedule="constant", warmup_steps=1), [8, 8, 8, 8, 8, 8, 8]),
        (dict(schedule="constant", warmup_steps=2), [4, 8, 8, 8, 8, 8, 8]),
        # From the peak at step 0 to min_lr at step 4, and there it stays.
        (dict(schedule="linear"), [8, 6.5, 5, 3.5, 2, 2, 2]),
        (dict(schedule="linear", warmup_steps=1), [8, 6.5, 5, 3.5, 2, 2, 2]),
        # The peak is step 2's; three more steps lead to min_lr.
        (dict(schedule="linear", warmup_steps=2), [4, 8, 6, 4, 2, 2, 2]),
        # min + (max - min) (1 + cos(pi k / 4)) / 2 with cos 45 degrees = 0.70710678
        (dict(schedule="cosine"), [8, 7.12132034, 5, 2.87867966, 2, 2, 2]),
        # min + (max - min) (1 + cos(pi k / 3)) / 2 with cos 60 degrees = 0.5
        (dict(schedule="cosine", warmup_steps=2), [4, 8, 6.5, 3.5, 2, 2, 2]),
        # A warm-up that outlasts the run is followed to its end.
        (dict(schedule="linear", warmup_steps=8), [1, 2, 3, 4, 5, 6, 7]),
        (dict(schedule="linear", warmup_steps=6), [8 / 6, 16 / 6, 4, 32 / 6, 40 / 6, 8, 2]),
    ],
)
def test_learning_rates_by_hand(settings, rates):
    assert learning_rates(4, 7, lr=8.0, min_lr=2.0, **settings) == pytest.approx(rates, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("done", range(8))
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_resumed_schedule_goes_on_as_the_uninterrupted_one(schedule, done):
    """A checkpoint stores how many optimizer steps were taken, and nothing else of the schedule."""
    settings = Optimizer(lr=8.0, min_lr=2.0, schedule=schedule, warmup_steps=3)
    whole = learning_rates(6, 9, lr=8.0, min_lr=2.0, schedule=schedule, warmup_steps=3)
    group = {"wd_mult": 1.0}
    build_scheduler(settings, SimpleNamespace(param_groups=[group]), 6).step(increment=done)
    assert group["lr"] == whole[done] > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(moments_dtype="bf16"), "optimizer.moments_dtype: bf16.*engine.transformer_engine: true"),
        (dict(cpu_offload_fraction=0.5), "optimizer.cpu_offload_fraction: 0.5: there is no GPU"),
    ],
)
def test_the_engine_refuses_before_it_builds_anything(settings, said):
    config = make_config(optimizer=settings)
    with pytest.raises(ModelError, match=said):
        PolicyEngine(config, spec=None, groups=None, num_optimizer_steps=1)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_main_parameters_are_whole_fp32_whatever_the_moments_are(monkeypatch, moments):
    """Transformer Engine's Adam may keep the 16 bits that bf16 lacks in their place; such a checkpoint saves, and
    cannot be read back.
    """
    made = []
    monkeypatch.setattr(optimizer, "OptimizerConfig", SimpleNamespace)  # Megatron's own asks for Transformer Engine
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda config, chunks, **_: made.append(config))
    chunk = SimpleNamespace(config=SimpleNamespace(fp8_recipe=None, fp8_param=False, params_dtype=torch.bfloat16))
    optimizer.build_optimizer(Optimizer(lr=1e-6, moments_dtype=moments), [chunk])
    assert made[0].store_param_remainders is False and made[0].use_precision_aware_optimizer is (moments != "fp32")
