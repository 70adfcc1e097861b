"""Names of what is compared. No torch: the table is drawn without it."""

from __future__ import annotations

# Of optimizer steps: see `steps.py`.
STEP_KINDS = ("norm", "steps", "state")
# Beside the kinds of `compare_runs.Tolerance`; each tolerates what that one of the policy does.
CRITIC_KINDS = {
    "values": "log_prob",
    "value_gradient": "gradient",
    "value_weights": "weights",
    **{f"value_{kind}": kind for kind in STEP_KINDS},
}
# The parameter groups in which a norm is taken apart.
PARAMETER_KINDS = (
    *("embeddings", "matrices", "norms", "biases", "sinks", "routers", "experts", "biases of experts", "adapters"),
)


def parameter_kind(name: str) -> str:
    """One of PARAMETER_KINDS, from Megatron's or a checkpoint's name of a parameter."""
    if "lora_" in name or name.startswith("adapters."):
        return "adapters"
    if ".experts." in name:
        return "biases of experts" if "bias" in name.rpartition(".experts.")[2] else "experts"
    if name.endswith(("sinks", "softmax_offset")):
        return "sinks"
    if any(part in name for part in (".router.", "mlp.gate.", "moe.gate.", "shared_expert_gate", "gate_weight")):
        return "routers"
    if "norm" in name:
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if any(part in name for part in ("embed", "lm_head", "output_layer", "score.", "value_head")):
        return "embeddings"
    return "matrices"
