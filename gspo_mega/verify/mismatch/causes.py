"""The list of causes of a mismatch: what each changes, on which engine, and when there is nothing to change.

A new cause is one entry of `CAUSES`. Every cause has a *neutral* setting, in which it contributes nothing. With all
causes neutral, the trainer is one rank in `budget.reference` precision (fp32 by default) without packing, and the
server is a plain one of the same precision: this is the reference. Nothing is computed or started here; `walks.py`
orders the causes, and `run.py` evaluates them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_mega.config.precision import has_transformer_engine_layers, server_dtype
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.verify.mismatch.served_folders import ServedFolders

# Settings of an evaluation that are not configuration keys: how the server is asked, how the trainer packs, how many
# tokens of a gated delta net it computes together.
HOW, TOGETHER, PACKING, CHUNK = "@how", "@together", "@packing", "@chunk"
SAMPLED, CACHED, FLUSHED = "sampled", "cached", "flushed"

SAMPLING, PREFIX_CACHE, ENGINES = "sampling", "prefix cache", "between the engines"

Settings = Mapping[str, Any]

ONE_RANK: Settings = {
    "cluster.ranks_per_node": 1,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.virtual_pipeline": None,
    "parallel.context": 1,
    "parallel.expert": 1,
    "parallel.expert_tensor": 1,
}


@dataclass(frozen=True)
class Facts:
    """The facts that decide whether a cause has anything to change. `device`: of this machine."""

    config: Config
    spec: ModelSpec
    device: Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Nothing:
    """Why a cause is not measured. `is_zero`: its setting is the neutral one already, so it contributes nothing.
    Otherwise the machine, the model or the software cannot change it, and other rows contain its contribution.
    """

    why: str
    is_zero: bool


@dataclass(frozen=True)
class Cause:
    """`neutral`: returns the settings in which the cause contributes nothing, or why it cannot be changed. `pinned`: it
    keeps its place in every order. `after`: causes that come before this one in every order. `avoidable`: a user may
    run with the neutral setting. `follows`: the cause whose row contains this one, which has no setting of its own.
    """

    name: str
    side: Literal["server", "trainer"]
    meaning: str
    neutral: Callable[[Facts], Settings | Nothing]
    pinned: bool = False
    after: tuple[str, ...] = ()
    avoidable: bool = False
    follows: str = ""


def value_of(config: Config, key: str) -> Any:
    """Return the value of a dotted key; None if a section is absent."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _keys(settings: Settings) -> Callable[[Facts], Settings | Nothing]:
    """Return a `neutral` that sets keys of the configuration, or `Nothing` if they have these values already."""

    def neutral(facts: Facts) -> Settings | Nothing:
        changed = {key: value for key, value in settings.items() if value_of(facts.config, key) != value}
        return changed or Nothing(", ".join(f"{key} is {_shown(value)}" for key, value in settings.items()), True)

    return neutral


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _attention(facts: Facts) -> Settings | Nothing:
    plain = {"cpu": "torch_native", "gpu": "triton"}[facts.device]
    if facts.spec.latent is not None and facts.device == "cpu":
        return Nothing("latent attention has one backend on a CPU", False)
    if facts.spec.sinks and facts.device == "cpu":
        return Nothing("attention with sinks has one backend on a CPU", False)
    return _keys({"server.attention_backend": plain})(facts)


def _server_activations(facts: Facts) -> Settings | Nothing:
    if facts.config.server.quantization == "none":
        return Nothing("server.quantization is none", True)
    return {"server.quantization": "none", "model.path": str(ServedFolders(facts.config).path("rounded"))}


def _server_weights(facts: Facts) -> Settings | Nothing:
    if facts.config.server.quantization == "none":
        return Nothing("server.quantization is none", True)
    if facts.spec.stored is not None:
        return Nothing("model.path is quantized itself: both engines hold rounded weights", True)
    return {"model.path": facts.config.model.path}


STATES_DTYPE = "mamba_ssm_dtype"
"""SGLang's option, and its key in config.json, for the type of what gated delta nets remember."""


def states_dtype(facts: Facts) -> str:
    """Return torch's name of the type in which servers keep what gated delta nets remember; float32 without them."""
    if facts.spec.delta is None:
        return "float32"
    raw = facts.spec.raw or {}
    own = raw.get("text_config", raw).get(STATES_DTYPE)
    return facts.config.server.options.get(STATES_DTYPE) or own or "float32"


def _server_states(facts: Facts) -> Settings | Nothing:
    if facts.spec.delta is None:
        return Nothing("the model has no gated delta nets", True)
    if states_dtype(facts) == "float32":
        return Nothing("servers keep the states of gated delta nets in fp32", True)
    return {f"server.options.{STATES_DTYPE}": "float32"}


def _chunks(facts: Facts) -> Settings | Nothing:
    if facts.spec.delta is None:
        return Nothing("the model has no gated delta nets", True)
    return Nothing(
        "both engines score by chunks of 64 tokens, a constant of the kernels; `sampling` has the rule token by token"
        " against it, and on a CPU the last rows have the trainer with other chunks",
        False,
    )


def _server_precision(facts: Facts) -> Settings | Nothing:
    reference = facts.config.budget.reference
    if server_dtype(facts.config.server, facts.config.precision) == reference:
        return Nothing(f"the servers compute in {reference}", True)
    return {"server.dtype": reference}


def _server_head(facts: Facts) -> Settings | Nothing:
    if server_dtype(facts.config.server, facts.config.precision) == "fp32":
        return Nothing("the servers' LM head is fp32", True)
    options = dict(facts.config.server.options)
    if options.get("enable_fp32_lm_head"):
        return Nothing("server.options.enable_fp32_lm_head is true", True)
    return {"server.options": {**options, "enable_fp32_lm_head": True}}


def _trainer_fp8(facts: Facts) -> Settings | Nothing:
    if facts.config.precision != "fp8":
        return Nothing(f"precision is {facts.config.precision}", True)
    return {"precision": "bf16", "fp8.parameters": False, "engine.transformer_engine": True}


def _trainer_precision(facts: Facts) -> Settings | Nothing:
    reference = facts.config.budget.reference
    if facts.config.precision == reference or (facts.config.precision == "fp8" and reference == "bf16"):
        return Nothing(f"the trainer's plain layers compute in {reference}", True)
    if facts.config.precision == "fp32":
        return Nothing(f"precision is fp32, finer than budget.reference {reference}", False)
    return {"precision": reference, "engine.transformer_engine": None}


def _trainer_layers(facts: Facts) -> Settings | Nothing:
    if not has_transformer_engine_layers(facts.config.precision, facts.config.engine, facts.device == "gpu"):
        return Nothing("the trainer's layers are Megatron's plain ones", True)
    return {"engine.transformer_engine": False}


def _layout(facts: Facts) -> Settings | Nothing:
    found = _keys(ONE_RANK)(facts)
    return Nothing("one rank", True) if isinstance(found, Nothing) else found


def _always(settings: Settings) -> Callable[[Facts], Settings | Nothing]:
    return lambda _facts: settings


def _replay(facts: Facts) -> Settings | Nothing:
    if facts.spec.moe is None:
        return Nothing("the model has no experts", True)
    return (
        _keys({"moe.routing_replay": "none"})(facts)
        if facts.config.moe.routing_replay == "R3"
        else Nothing(f"moe.routing_replay is {facts.config.moe.routing_replay}; `R3` is an alternative, below", True)
    )


def _trainer_head(facts: Facts) -> Settings | Nothing:
    if facts.config.precision == "fp32":
        return Nothing("the trainer's LM head is fp32", True)
    return Nothing("the trainer's LM head follows `precision`, with fp32 sums; no key changes it alone", False)


# The order leads from the sampled log-probs to the trainer's as the run computes them: the server's causes are made
# neutral in this order, then the engine changes, then the trainer's causes are put back in this order.
CAUSES: tuple[Cause, ...] = (
    Cause(
        SAMPLING,
        "server",
        "tokens drawn one at a time, at the run's temperature, against the same tokens scored in one pass",
        _always({HOW: CACHED}),
        pinned=True,
    ),
    Cause(
        PREFIX_CACHE,
        "server",
        "cached keys and values of the prompt against new ones",
        _always({HOW: FLUSHED}),
        pinned=True,
    ),
    Cause(
        "server batch",
        "server",
        "the same tokens among other requests and alone",
        _always({TOGETHER: 1}),
    ),
    Cause("server attention", "server", "the servers' attention backend against a plain one", _attention),
    Cause(
        "server KV cache",
        "server",
        "quantized keys and values against plain ones",
        _keys({"server.kv_cache": "auto"}),
        avoidable=True,
    ),
    Cause(
        "server states",
        "server",
        "what gated delta nets remember, in another type against fp32, where tokens are scored again",
        _server_states,
        avoidable=True,
    ),
    Cause(
        "delta rule by chunks",
        "server",
        "the delta rule by chunks of tokens against token by token",
        _chunks,
        follows=SAMPLING,
    ),
    Cause(
        "server activations",
        "server",
        "quantized activations against plain ones, with rounded weights in both",
        _server_activations,
        avoidable=True,
    ),
    Cause(
        "server weights",
        "server",
        "weights rounded as the servers quantize them against the model's own",
        _server_weights,
        after=("server activations",),
    ),
    Cause(
        "server LM head", "server", "the servers' LM head in their precision against fp32", _server_head, avoidable=True
    ),
    Cause(
        "server precision",
        "server",
        "the servers' weights and activations against those of the reference",
        _server_precision,
        after=("server LM head",),
    ),
    Cause(
        "trainer precision",
        "trainer",
        "the trainer's layers in its plain precision against the reference",
        _trainer_precision,
    ),
    Cause(
        "trainer layers",
        "trainer",
        "Transformer Engine's layers against Megatron's plain ones",
        _trainer_layers,
        after=("trainer precision",),
    ),
    Cause(
        "trainer FP8",
        "trainer",
        "FP8 products against bf16 ones",
        _trainer_fp8,
        after=("trainer precision", "trainer layers"),
    ),
    Cause(
        "trainer LM head", "trainer", "the trainer's LM head against fp32", _trainer_head, follows="trainer precision"
    ),
    Cause(
        "trainer packing",
        "trainer",
        "packs of several sequences against one sequence each",
        _always({PACKING: "one_each"}),
    ),
    Cause("trainer layout", "trainer", "the run's ranks against one", _layout),
    Cause("routing replay", "trainer", "the servers' experts (R3) against the trainer's own", _replay),
    Cause(
        SAMPLING,
        "trainer",
        "the trainer at temperature 1 against the run's (the other half of the first entry)",
        _keys({"rollout.temperature": 1.0}),
        pinned=True,
    ),
)


@dataclass(frozen=True)
class Alternative:
    """Another setting of the trainer on the same tokens, measured as a whole. `keys`: the keys a user would set.
    `is_change`: its row has the difference from the trainer as the run computes, not from the samples.
    """

    name: str
    settings: Callable[[Facts], Settings | Nothing]
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_change: bool = False


def _other_routing(facts: Facts) -> Settings | Nothing:
    if facts.spec.moe is None:
        return Nothing("the model has no experts", True)
    return {"moe.routing_replay": "none" if facts.config.moe.routing_replay == "R3" else "R3"}


def _other_chunks(length: int) -> Callable[[Facts], Settings | Nothing]:
    def settings(facts: Facts) -> Settings | Nothing:
        if facts.spec.delta is None:
            return Nothing("the model has no gated delta nets", True)
        if facts.device == "gpu":
            return Nothing("a constant of the kernels", False)
        return {CHUNK: length}

    return settings


R3 = "other routing"
ALTERNATIVES: tuple[Alternative, ...] = (
    Alternative(R3, _other_routing, {"moe.routing_replay": "R3", "rollout.return_routed_experts": True}),
    Alternative("chunks of 16", _other_chunks(16), is_change=True),
    Alternative("chunks of 1", _other_chunks(1), is_change=True),
)


def formats(facts: Facts) -> dict[Literal["server", "trainer"], list[str]]:
    """Return the number formats to which each engine rounds in this run: fp32, bf16, fp8, int8."""
    server = [server_dtype(facts.config.server, facts.config.precision)]
    if facts.config.server.quantization != "none":
        server.append(facts.config.server.quantization.split("_")[0])
    if facts.config.server.kv_cache != "auto":
        server.append(facts.config.server.kv_cache)
    if states_dtype(facts) != "float32":
        server.append("bf16")
    return {
        "server": server,
        "trainer": ["bf16", "fp8"] if facts.config.precision == "fp8" else [facts.config.precision],
    }


def left_between(measured: Collection[str], nothing: Mapping[str, Nothing]) -> list[str]:
    """Return the causes that still contribute to the difference between the engines, because nothing changes them.
    `measured`: the causes that are changed. A cause that follows another is neutral together with it.
    """
    follows = {cause.name: cause.follows for cause in CAUSES}

    def is_neutral(name: str) -> bool:
        return name in measured or (name in nothing and nothing[name].is_zero)

    return [name for name, why in nothing.items() if not why.is_zero and not is_neutral(follows.get(name, ""))]


def units_of(
    facts: Facts,
    measured: Mapping[str, Literal["server", "trainer"]],
    nothing: Mapping[str, Nothing],
    units: Mapping[str, float],
) -> dict[str, float]:
    """Return the coarsest unit roundoff that each cause may show, by name. `units`: those of the formats.

    A small change before a coarse rounding becomes a coarse one, so a cause has the coarsest unit of its engine.
    `measured`: the causes that are changed, with their engines. `between the engines` has the reference's unit, or that
    of an engine with a cause that cannot be changed and so contributes there.
    """
    found = formats(facts)
    coarsest = {side: max(units[name] for name in names) for side, names in found.items()}
    between = units[facts.config.budget.reference]
    sides = {cause.name: cause.side for cause in CAUSES}
    left = [coarsest[sides[name]] for name in left_between(measured, nothing)]
    result = {name: coarsest[side] for name, side in measured.items()}
    return {**result, ENGINES: max([between, *left])}
