"""Bytes of one rank's weights, gradients and optimizer state, from its elements (`shares.py`) and the precisions."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_mega.config.critic_config import penalises_kl
from gspo_mega.config.schema import Config
from gspo_mega.plan.shares import State

WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
MAIN_BYTES = 4
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class StateBytes:
    """Of one rank's `State`. `padding`: of weights and gradients. `offloaded`: optimizer state on the host instead.
    `fp8_copies`: linear weights in FP8 beside those of `weights`, rowwise and columnwise. `reference`: the weights of
    the frozen reference of a KL term or penalty, with the FP8 copies that a forward pass keeps; it has no gradients,
    padding or optimizer state. `snapshots`: weights of the present and earlier versions on the host
    (`diagnostics.exact_staleness`).
    """

    weights: int
    gradients: int
    padding: int
    main: int
    moments: int
    fp8_copies: int
    offloaded: int
    reference: int
    snapshots: int

    @property
    def on_host(self) -> int:
        return self.offloaded + self.snapshots

    @property
    def on_device(self) -> int:
        return (
            self.weights + self.gradients + self.padding + self.main + self.moments + self.fp8_copies + self.reference
        )


def has_reference(config: Config) -> bool:
    """Does the KL term or penalty hold a frozen model? A policy with adapters is its own reference without them."""
    compares = config.kl.coefficient > 0 or penalises_kl(config)
    return compares and (config.lora is None or config.kl.reference_path is not None)


def checkpoint_bytes(config: Config, total_parameters: int) -> int:
    """Bytes of a checkpoint of that many trained parameters: weights, fp32 main weights and moments."""
    main = 0 if config.precision == "fp32" else MAIN_BYTES
    return total_parameters * (WEIGHT_BYTES[config.precision] + main + 2 * MOMENT_BYTES[config.optimizer.moments_dtype])


def state_bytes(config: Config, state: State, *, is_critic: bool = False) -> StateBytes:
    """Bytes of the state of a policy, or with the critic's configuration those of a critic. FP8 copies are Transformer
    Engine's; moments below fp32 and offloading are without their scales.
    """
    optimizer = config.optimizer
    weight, gradient = WEIGHT_BYTES[config.precision], GRADIENT_BYTES[optimizer.gradients_dtype]
    fp8 = config.precision == "fp8"
    in_fp8 = state.linear if fp8 and config.fp8.parameters else 0
    # fp32 parameters are their own main copy.
    main = 0 if config.precision == "fp32" else state.optimized * MAIN_BYTES
    moments = 2 * state.optimized * MOMENT_BYTES[optimizer.moments_dtype]
    stay = 1.0 - optimizer.cpu_offload_fraction
    weights = (state.parameters - in_fp8) * weight + in_fp8
    most_stale = config.rollout.max_staleness
    return StateBytes(
        weights=weights,
        gradients=(state.parameters - state.frozen) * gradient,
        padding=state.padding * (weight + gradient),
        main=round(main * stay),
        moments=round(moments * stay),
        # Both orientations of each linear weight, less the one that the parameter itself is.
        fp8_copies=2 * state.linear - in_fp8 if fp8 else 0,
        offloaded=main + moments - round(main * stay) - round(moments * stay),
        reference=weights + (state.linear - in_fp8 if fp8 else 0) if has_reference(config) and not is_critic else 0,
        snapshots=(most_stale + 1) * weights if config.diagnostics.exact_staleness and most_stale else 0,
    )
