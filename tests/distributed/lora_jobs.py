"""What ranks run in the tests of adapters: a recorded batch through a policy with adapters in a given layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import family_jobs
import numpy as np
import torch
from exact_numbers import exact_engine
from layout_jobs import layout_config, recorded_sequences, shard
from token_values import token_values

from gspo_mega.algorithm.objective import ObjectiveSettings
from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.adapters import AdapterTensors, export_adapters, fill_adapters, init_adapters
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_export import export_huggingface
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.schema import Lora
from gspo_mega.engine.adapters import adapter_norm
from gspo_mega.engine.optimizer import gradient_norm
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.reference import FrozenBase
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.low_rank import adapter_tensors
from gspo_mega.verify.certify.steps import complete_gradients


def start_tensors(settings: Lora, spec, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random halves, B among them: with B zero, A would have no gradient."""
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: 0.05 * torch.randn(entry.shape, generator=generator)
        for entry in adapter_tensors(spec, settings.rank, settings.targets)
    }


def run(folder: str, parallel: dict, steps: int = 3, random_start: bool = True, **sections) -> dict | None:
    """Log-probs of the first pass, gradients, adapters and merged weights after `steps`; whole on rank 0."""
    parallel = {"expert_tensor": 1, **parallel}
    config = layout_config(folder, parallel, **sections)
    settings, spec = config.lora, read_model_spec(folder)
    assert settings is not None
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")}
    groups = create_groups(virtual_pipeline=parallel.get("virtual_pipeline"), **sizes)
    try:
        engine = PolicyEngine(config, spec, groups, num_optimizer_steps=100)
        import_huggingface(folder, spec, groups, engine.chunks)

        def halves(values=None) -> dict:
            found = AdapterTensors(settings, spec, groups, engine.chunks, values).stream(torch.float32)
            return {name: value.clone().numpy() for name, value in found}

        first = halves()
        if random_start:
            fill_adapters(settings, spec, groups, engine.chunks, start_tensors(settings, spec))
        engine.after_weights_loaded()
        multiple = 2 * groups.context.size * groups.tensor.size
        batch = shard(recorded_sequences(), groups.data.rank, groups.data.size, multiple)
        old = engine.old_pass(batch)
        engine.policy_gradients(batch, ObjectiveSettings(), 11.0, None)
        complete_gradients(engine)
        gradient = halves(lambda parameter: parameter.main_grad)
        results = [engine.train_mini_batch(batch, ObjectiveSettings(), 11.0, None)[0] for _ in range(steps)]
        adapters = halves()
        for _ in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32):
            pass  # merging is reading: a second time gives the same
        merged = {n: v.clone().numpy() for n, v in PolicyTensors(spec, groups, engine.chunks).stream(torch.float32)}
        trained = [p for c in engine.chunks for p in c.parameters() if p.requires_grad]
        log_probs = token_values(batch, [part.log_probs for part in old.micro_batches], groups)
        if groups.world.rank:
            return None
        return dict(
            first=first,
            gradient=gradient,
            adapters=adapters,
            merged=merged,
            log_probs=log_probs,
            grad_norms=[r.grad_norm for r in results],
            linears={type(module).__name__ for chunk in engine.chunks for module in _linears(chunk)},
            num_trained=sum(p.numel() for p in trained),
            num_optimized=sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"]),
        )
    finally:
        destroy_groups()


def exact_gradients(folder: str, parallel: dict, lora: dict, **sections) -> dict:
    """The gradients of `run`, computed in fp64 and added up in fp32, by the names of the adapters' halves."""
    with _engine(folder, parallel, lora, **sections) as engine:
        settings, own = engine.config.lora, (engine.spec, engine.groups, engine.chunks)
        assert settings is not None
        fill_adapters(settings, *own, start_tensors(settings, engine.spec))
        groups = engine.groups
        multiple = 2 * groups.context.size * groups.tensor.size
        batch = shard(recorded_sequences(), groups.data.rank, groups.data.size, multiple)
        with exact_engine(engine):
            engine.old_pass(batch)
            engine.policy_gradients(batch, ObjectiveSettings(), 11.0, None)
        complete_gradients(engine)
        found = AdapterTensors(settings, *own, lambda parameter: parameter.main_grad).stream(torch.float32)
        return {name: value.clone().numpy() for name, value in found}


def _linears(chunk) -> list:
    return [module for name, module in chunk.named_modules() if name.rpartition(".")[2].startswith("linear_")]


def write_folders(folder: str, out: str, parallel: dict, lora: dict) -> None:
    """Random adapters in this layout, written as a PEFT folder `out`/adapter and merged as `out`/merged."""
    with _engine(folder, parallel, lora) as engine:
        own = (engine.spec, engine.groups, engine.chunks)
        settings = engine.config.lora
        assert settings is not None
        fill_adapters(settings, *own, start_tensors(settings, engine.spec))
        export_adapters(Path(out) / "adapter", settings, *own, folder)
        export_huggingface(Path(out) / "merged", *own, torch.float32, folder, 1)


def write_again(folder: str, out: str, parallel: dict, lora: dict, served: bool) -> None:
    """The adapters of `lora.path`, read in this layout, as a folder `out`."""
    with _engine(folder, parallel, lora) as engine:
        settings = engine.config.lora
        assert settings is not None
        own = (engine.spec, engine.groups, engine.chunks)
        export_adapters(Path(out), settings, *own, folder, served=served)


def logits_differences(
    folder: str, references: tuple[str, str], tokens: np.ndarray, parallel: dict, lora: dict
) -> tuple[float, float]:
    """The largest difference of logits from those in files, with adapters from `lora.path`, on every rank: in fp32 from
    the first reference, in fp64 from the second.
    """
    rounded, exact = map(np.load, references)
    with _engine(folder, parallel, lora) as engine:
        of = (engine, engine.spec, engine.groups, tokens)
        return family_jobs.logits_difference(*of, rounded), family_jobs.exact_logits_difference(*of, exact)


def refused(folder: str, lora: dict) -> str:
    """The text with which `lora.path` is refused."""
    try:
        with _engine(folder, {}, lora):
            return "nothing was refused"
    except ModelError as error:
        return str(error)


@contextlib.contextmanager
def _engine(folder: str, parallel: dict, lora: dict, **sections) -> Iterator[PolicyEngine]:
    config = layout_config(folder, {"expert_tensor": 1, **parallel}, lora=lora, **sections)
    groups = create_groups(**parallel)
    try:
        engine = PolicyEngine(config, read_model_spec(folder), groups, num_optimizer_steps=1)
        import_huggingface(folder, engine.spec, groups, engine.chunks)
        init_adapters(engine)
        engine.after_weights_loaded()
        yield engine
    finally:
        destroy_groups()


def own_base(folder: str, parallel: dict, lora: dict, **sections) -> dict:
    """Whether the log-probs of the KL term's reference are those of the model without adapters, before and after
    steps."""
    with _engine(folder, parallel, lora, **sections) as engine:
        batch = shard(recorded_sequences(), engine.groups.data.rank, engine.groups.data.size, 2)
        own = FrozenBase(engine)
        first = engine.old_pass(batch)
        before = own.log_probs(batch)
        norms = [adapter_norm(engine.chunks, engine.groups)]
        for _ in range(2):
            engine.train_mini_batch(batch, ObjectiveSettings(), 11.0, None)
            norms.append(adapter_norm(engine.chunks, engine.groups))
        after, moved = own.log_probs(batch), engine.old_pass(batch)
        return dict(
            starts_as_base=all(torch.equal(a.log_probs, b) for a, b in zip(first.micro_batches, before)),
            stands_still=all(torch.equal(a, b) for a, b in zip(before, after)),
            moved=max(float((a.log_probs - b).abs().max()) for a, b in zip(moved.micro_batches, after)),
            norms=norms,
        )


def dropout(folder: str, lora: dict) -> dict:
    """What two passes of each kind on one batch differ by, and where the next random number is after them."""
    with _engine(folder, {}, lora) as engine:
        assert engine.config.lora is not None
        fill_adapters(
            engine.config.lora,
            engine.spec,
            engine.groups,
            engine.chunks,
            start_tensors(engine.config.lora, engine.spec),
        )
        batch = shard(recorded_sequences(), 0, 1, 2)
        before = torch.get_rng_state()
        old = [torch.cat([p.log_probs for p in engine.old_pass(batch).micro_batches]).numpy() for _ in range(2)]
        drew = not torch.equal(before, torch.get_rng_state())
        norms = []
        for _ in range(2):
            engine.policy_gradients(batch, ObjectiveSettings(), 11.0, None)
            engine.optimizer.prepare_grads()
            norms.append(gradient_norm(engine.optimizer, engine.groups)[0])
        return dict(old=old, old_drew=drew, norms=norms)
