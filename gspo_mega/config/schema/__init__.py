"""The typed shape of a run's YAML file: every key with its unit, range, default and meaning.

Each module holds a group of sections, and `Config` below puts them together. Sections are frozen and refuse unknown
keys. `loader.py` reads the YAML and knows positions, `validate.py` has the rules between keys, and `plan/` checks what
a layout needs from a model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo_mega.config.algorithms import AlgorithmName
from gspo_mega.config.schema.data import (
    Data,
    HttpReward,
    JudgeReward,
    ModelReward,
    OwnReward,
    ReasoningGym,
    ReasoningGymTask,
    RemoteReward,
    Reward,
    RewardFunction,
    Source,
)
from gspo_mega.config.schema.learning import (
    Advantage,
    Batch,
    Critic,
    Kl,
    Lora,
    Mismatch,
    Objective,
    Optimizer,
    Sft,
    SourceTeacher,
    Teacher,
    TeacherModel,
    Train,
)
from gspo_mega.config.schema.measuring import (
    Alerts,
    Budget,
    Certify,
    CertifyCase,
    Checkpoint,
    Diagnostics,
    Eval,
    EvalSet,
    Journal,
    Metrics,
    MetricsSink,
    Profile,
    Prometheus,
    Watchdog,
)
from gspo_mega.config.schema.rollout import Endpoint, EpisodeFunction, Episodes, Publish, Rollout, Server
from gspo_mega.config.schema.run import Cluster, Engine, Fp8, Model, Moe, Parallel, PlanRules, Recompute, Run
from gspo_mega.config.schema.section import MAY_CHANGE, Hook, Section, UserFunction

__all__ = [
    "Advantage",
    "Alerts",
    "Batch",
    "Budget",
    "Certify",
    "CertifyCase",
    "Checkpoint",
    "Cluster",
    "Config",
    "Critic",
    "Data",
    "Endpoint",
    "Engine",
    "EpisodeFunction",
    "Episodes",
    "Eval",
    "EvalSet",
    "Fp8",
    "Hook",
    "HttpReward",
    "Journal",
    "JudgeReward",
    "Kl",
    "Lora",
    "Metrics",
    "MetricsSink",
    "Mismatch",
    "Model",
    "ModelReward",
    "Moe",
    "Objective",
    "OldLogProbs",
    "Optimizer",
    "OwnReward",
    "Parallel",
    "PlanRules",
    "Precision",
    "Profile",
    "Prometheus",
    "Publish",
    "ReasoningGym",
    "ReasoningGymTask",
    "Recompute",
    "RemoteReward",
    "Reward",
    "RewardFunction",
    "Rollout",
    "Run",
    "Section",
    "Server",
    "Sft",
    "Source",
    "SourceTeacher",
    "Teacher",
    "TeacherModel",
    "Train",
    "UserFunction",
    "Watchdog",
]

Precision = Literal["fp32", "bf16", "fp8"]
OldLogProbs = Literal["trainer", "rollout"]


class Config(Section):
    """One run. See `configs/` for commented examples."""

    run: Run
    model: Model
    algorithm: AlgorithmName = Field(
        default="gspo",
        description="Which recipe the objective follows; `custom` combines the keys of `objective` freely.",
    )
    objective: Objective = Objective()
    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    old_log_probs: OldLogProbs = Field(
        default="trainer",
        description="trainer: recomputed by the trainer. rollout: SGLang's are used as they are (warned about).",
    )
    mismatch: Mismatch = Mismatch()
    batch: Batch
    cluster: Cluster = Field(default=Cluster(), json_schema_extra=MAY_CHANGE)
    parallel: Parallel = Field(default=Parallel(), json_schema_extra=MAY_CHANGE)
    precision: Precision = Field(
        default="bf16",
        description=(
            "Parameters and matmuls; log-softmax and reductions are fp32 always. fp8: linear layers by Transformer"
            " Engine, the rest bf16."
        ),
    )
    engine: Engine = Engine()
    fp8: Fp8 = Fp8()
    moe: Moe = Moe()
    recompute: Recompute = Field(default=Recompute(), json_schema_extra=MAY_CHANGE)
    plan: PlanRules = Field(default=PlanRules(), json_schema_extra=MAY_CHANGE)
    optimizer: Optimizer
    lora: Lora | None = None
    teacher: Teacher | None = None
    critic: Critic | None = None
    train: Train | None = Field(default=None, description="Needed by `gspo-mega train`.")
    data: Data
    reward: Reward
    rollout: Rollout
    episodes: Episodes = Episodes()
    server: Server = Field(default=Server(), json_schema_extra=MAY_CHANGE)
    publish: Publish = Field(default=Publish(), json_schema_extra=MAY_CHANGE)
    eval: Eval | None = None
    checkpoint: Checkpoint = Field(default=Checkpoint(), json_schema_extra=MAY_CHANGE)
    journal: Journal = Field(default=Journal(), json_schema_extra=MAY_CHANGE)
    metrics: Metrics = Field(default=Metrics(), json_schema_extra=MAY_CHANGE)
    diagnostics: Diagnostics = Field(default=Diagnostics(), json_schema_extra=MAY_CHANGE)
    profile: Profile = Field(default=Profile(), json_schema_extra=MAY_CHANGE)
    alerts: Alerts = Field(default=Alerts(), json_schema_extra=MAY_CHANGE)
    watchdog: Watchdog = Field(default=Watchdog(), json_schema_extra=MAY_CHANGE)
    sft: Sft | None = None
    certify: Certify = Certify()
    budget: Budget = Field(default=Budget(), json_schema_extra=MAY_CHANGE)
