"""A rank of `gspo-mega certify` in which each case has the fault that its name begins with: `python step_faults.py ARGUMENTS...`.

What Megatron's own reports tell of, and what Adam hides. A certificate that passes with one of them would be worth
nothing. `FAULTS` says of each which kinds of numbers must show it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

Patch = contextlib.AbstractContextManager


@dataclass(frozen=True)
class Fault:
    """`model`, `layout`: where it can act; `seen`: kinds that must be outside, others may be; `of`: where it is told."""

    make: Callable[[], Patch]
    model: str
    layout: dict[str, Any]
    seen: tuple[str, ...]
    of: str


TP = {"parallel.tensor": 2}
TP_PLAIN = {"parallel.tensor": 2, "parallel.sequence": False}
TP_EP = {"parallel.tensor": 2, "parallel.expert": 2}
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/issues/"


def engine(name: str) -> Any:
    import importlib

    return importlib.import_module(f"gspo_mega.engine.{name}")


def megatron(name: str) -> Any:
    import importlib

    importlib.import_module(f"megatron.core.{name}")
    return sys.modules[f"megatron.core.{name}"]  # some packages have a function of a module's name


def marked(ends: tuple[str, ...], **marks: Any) -> Callable[[], Patch]:
    """Parameters whose canonical name ends so have these marks, whatever the table says."""

    def make() -> Patch:
        from gspo_mega.models import parameter_names as own

        model = engine("model")

        def mark_parameters(spec, groups, chunks, real=model.mark_parameters):
            real(spec, groups, chunks)
            found = {n: p for n, p in own.canonical_parameters(spec, groups, chunks).items() if n.endswith(ends)}
            assert found or groups.pipeline.size > 1, f"the model has no {ends}"
            for parameter in found.values():
                vars(parameter).update(marks)

        return mock.patch.object(model, "mark_parameters", mark_parameters)

    return make


def counted_by_the_tensor_group() -> Patch:
    """An expert's parameter counts where its rank is the first of the tensor group, unless it is marked."""
    optimizer = engine("optimizer")

    def counts_in_norm(part, parameter, groups):
        cut = getattr(parameter, "tensor_model_parallel", False) and parameter.dim() > 1
        return not getattr(parameter, "shared", False) and (cut or groups.tensor.rank == 0)

    return mock.patch.object(optimizer, "counts_in_norm", counts_in_norm)


def clipped_by_another_norm() -> Patch:
    optimizer = engine("optimizer")
    clip = optimizer.clip_grad_by_total_norm_fp32
    wrong = lambda parameters, limit, norm, *rest: clip(parameters, limit, 1.001 * norm, *rest)  # noqa: E731
    return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", wrong)


def stepped(before: Callable[[Any], None]) -> Callable[[], Patch]:
    """`before(optimizer)` is called before every step of a policy, on every rank."""

    def make() -> Patch:
        policy = engine("policy")

        def apply(optimizer, *rest, real=policy.apply_gradients):
            before(optimizer)
            return real(optimizer, *rest)

        return mock.patch.object(policy, "apply_gradients", apply)

    return make


def group_has(key: str, factor: float) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        group = [g for g in optimizer.chained_optimizers[0].param_groups if g[key]][-1]
        group[key] = tuple(factor * v for v in group[key]) if isinstance(group[key], tuple) else group[key] * factor

    return change


def one_gradient_scaled() -> Patch:
    """After clipping: Adam divides by its size and the weights hardly show it."""
    optimizer = engine("optimizer")

    def clip(parameters, *rest, real=optimizer.clip_grad_by_total_norm_fp32):
        real(parameters, *rest)
        for parameter in parameters:
            if parameter.dim() == 1 and parameter.grad is not None:
                parameter.grad.mul_(1.5)

    return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip)


def a_copy_steps_otherwise() -> Patch:
    """After clipping one rank's copies of norms have twice the gradient, which Adam divides by again: all that is left
    are its moments.
    """
    import torch.distributed as dist

    optimizer = engine("optimizer")

    def clip(parameters, *rest, real=optimizer.clip_grad_by_total_norm_fp32):
        real(parameters, *rest)
        if dist.get_rank() == 1:
            for parameter in parameters:
                if parameter.dim() == 1 and parameter.grad is not None:
                    parameter.grad.mul_(2.0)

    return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip)


def norm_of_one_rank() -> Patch:
    """Each rank clips by the norm of its own part."""
    import torch

    optimizer = engine("optimizer")

    def norm(chained, groups, real=optimizer.gradient_norm):
        found = real(chained, groups)
        own = [optimizer.read_gradient(part, p) for part in chained.chained_optimizers for p in part.get_parameters()]
        return float(torch.stack([g.norm() for g in own if g is not None]).norm()), found[1]

    return mock.patch.object(optimizer, "gradient_norm", norm)


def within_the_step(change: Callable[[list[Any], list[Any]], None]) -> Callable[[], Patch]:
    """`change(parameters, before)` after the numbers of a step, of the vectors that this rank steps: what is read before
    it is right.
    """

    def make() -> Patch:
        import torch
        from megatron.core.optimizer import ChainedOptimizer

        def step(self, real=ChainedOptimizer.step_with_ready_grads):
            held = [p for part in self.chained_optimizers for p in part.get_parameters() if p.dim() == 1]
            before = [p.detach().clone() for p in held]
            result = real(self)
            with torch.no_grad():
                change(held, before)
            return result

        return mock.patch.object(ChainedOptimizer, "step_with_ready_grads", step)

    return make


def longer_steps(parameters: list[Any], before: list[Any]) -> None:
    for parameter, old in zip(parameters, before, strict=True):
        parameter.add_(parameter - old, alpha=0.05)


def one_step_lost(parameters: list[Any], before: list[Any]) -> None:
    parameters[0].copy_(before[0])


def second_step_skipped() -> Patch:
    optimizer, calls = engine("optimizer"), []

    def norm(*arguments, real=optimizer.gradient_norm):
        calls.append(real(*arguments))
        return (math.inf, False) if len(calls) == 2 else calls[-1]

    return mock.patch.object(optimizer, "gradient_norm", norm)


def a_copy_drifts() -> Patch:
    """After the first step one rank's copy of a norm is off by a part in a million."""
    import torch
    import torch.distributed as dist

    policy = engine("policy")

    def apply(self, *rest, real=policy.PolicyEngine._apply):
        result = real(self, *rest)
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.chunks[0].decoder.layers[0].input_layernorm.weight.mul_(1 + 1e-6)
        return result

    return mock.patch.object(policy.PolicyEngine, "_apply", apply)


def head_norms_not_summed() -> Patch:
    """Without sequence parallelism Megatron tells the norms of queries and keys by `qk_layernorm` alone."""
    policy = engine("policy")

    def finalize(model, *rest, real=policy.finalize_model_grads, **options):
        config = model[0].config
        with mock.patch.object(config, "qk_layernorm", False):
            return real(model, *rest, **options)

    return mock.patch.object(policy, "finalize_model_grads", finalize)


def tied_embeddings_not_summed() -> Patch:
    finalize = megatron("distributed.finalize_model_grads")
    return mock.patch.object(finalize, "_allreduce_word_embedding_grads", lambda *arguments, **options: None)


def loss_times_ranks() -> Patch:
    """Every gradient is twice what it should be, which Adam and a clip hide."""
    policy = engine("policy")

    def of(self, *arguments, real=policy.PolicyEngine.accumulate_gradients, **options):
        scale = self.megatron_config.grad_scale_func
        self.megatron_config.grad_scale_func = lambda loss: 2 * scale(loss)
        try:
            return real(self, *arguments, **options)
        finally:
            self.megatron_config.grad_scale_func = scale

    return mock.patch.object(policy.PolicyEngine, "accumulate_gradients", of)


def expert_bias_on_one_rank() -> Patch:
    import torch
    import torch.distributed as dist

    bias = engine("expert_bias")

    def update(self, real=bias.ExpertBias.update):
        kept = [(router, router.expert_bias.clone()) for _, router in self._routers.all()]
        found = real(self)
        if dist.get_rank() == 1:
            with torch.no_grad():
                for router, values in kept:
                    router.expert_bias.copy_(values)
        return found

    return mock.patch.object(bias.ExpertBias, "update", update)


def loads_counted_twice() -> Patch:
    """One rank counts its experts' tokens twice."""
    import torch.distributed as dist

    bias = engine("expert_bias")

    def count(self, micro_batches, routes, real=bias.ExpertBias.count):
        real(self, micro_batches, routes)
        if dist.get_rank() == 1 and self._counts is not None:
            self._counts *= 2

    return mock.patch.object(bias.ExpertBias, "count", count)


def moments_decay_otherwise() -> Patch:
    return stepped(group_has("betas", 0.999))()


def rotary_differs() -> Patch:
    """One rank's wavelengths are off by a part in ten million, which changes nearly nothing."""
    import torch.distributed as dist

    model = engine("model")

    def mark_parameters(spec, groups, chunks, real=model.mark_parameters):
        real(spec, groups, chunks)
        if dist.get_rank() == 1:
            for chunk in chunks:
                chunk.rotary_pos_emb.inv_freq = chunk.rotary_pos_emb.inv_freq * (1 + 2e-7)

    return mock.patch.object(model, "mark_parameters", mark_parameters)


# --- router losses: of configs/certify_balanced.yaml ----------------------------------------------------------


def padding_mask_under_tensor_ranks() -> Patch:
    """Megatron's own path with a padding mask, in which nothing is masked."""
    import torch

    layer = megatron("transformer.moe.moe_layer")

    def route(self, hidden_states, padding_mask=None, real=layer.MoELayer.route):
        nothing = torch.zeros(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        return real(self, hidden_states, nothing)

    return mock.patch.object(layer.MoELayer, "route", route)


def router_losses_forget_their_parts() -> Patch:
    balancing = engine("balancing")
    other = not balancing.router_losses_know_their_parts()
    return mock.patch.object(balancing, "router_losses_know_their_parts", lambda: other)


def reported_loss_of_one_rank() -> Patch:
    """The gradient is right; the value that is reported counts one rank's part twice."""
    import torch.distributed as dist

    balancing = engine("balancing")

    def sums(self, real=balancing.LoadBalancing.sums):
        found = real(self)
        return {name: value * (1 + dist.get_rank()) for name, value in found.items()}

    return mock.patch.object(balancing.LoadBalancing, "sums", sums)


DENSE, TIED, MOE = (f"configs/models/certify_{name}.json" for name in ("llama", "qwen2", "mixtral"))
QWEN3, GATED, OSS, LATENT = (f"configs/models/certify_{name}.json" for name in ("dense", "qwen2_moe", "gpt_oss", "mla"))
FAULTS: dict[str, Fault] = {
    "sinks without a mark": Fault(
        marked(("softmax_offset",), tensor_model_parallel=False), OSS, TP_EP, ("norm",), f"{MEGATRON}7452, 8"
    ),
    "biases of experts counted by the tensor group": Fault(
        counted_by_the_tensor_group, OSS, TP_EP, ("norm",), f"{MEGATRON}5916"
    ),
    "experts counted by the tensor group": Fault(
        lambda: _both(counted_by_the_tensor_group(), marked((".linear_fc2.weight",), tensor_model_parallel=False)()),
        MOE,
        TP_EP,
        ("norm",),
        f"{MEGATRON}5916",
    ),
    "norms marked as cut": Fault(
        marked(("layernorm.weight",), tensor_model_parallel=True), DENSE, TP, ("norm",), "TransformerEngine's Linear"
    ),
    "latents marked as cut": Fault(
        marked(("down_proj.weight",), tensor_model_parallel=True),
        LATENT,
        TP_EP,
        ("norm",),
        "TransformerEngine's Linear",
    ),
    "norms not summed": Fault(
        marked(("layernorm.weight",), sequence_parallel=False), DENSE, TP, ("gradient", "state"), f"{MEGATRON}1446"
    ),
    "routers not summed": Fault(
        marked(("router.weight",), sequence_parallel=False), MOE, TP_EP, ("gradient", "state"), f"{MEGATRON}619"
    ),
    "gate of shared experts not summed": Fault(
        marked((".gate_weight",), sequence_parallel=False),
        GATED,
        TP_EP,
        ("gradient", "state"),
        "Pai-Megatron-Patch 397",
    ),
    "latents not summed": Fault(
        marked(("down_proj.weight",), sequence_parallel=False),
        LATENT,
        TP_EP,
        ("gradient", "state"),
        "Pai-Megatron-Patch 397",
    ),
    "biases of experts summed": Fault(
        marked((".linear_fc2.bias",), sequence_parallel=True), OSS, TP_EP, ("gradient",), "Megatron's own mark"
    ),
    "norms of heads not summed": Fault(
        head_norms_not_summed, QWEN3, TP_PLAIN, ("gradient", "state"), f"{MEGATRON}7452, 11"
    ),
    "tied embeddings not summed": Fault(
        tied_embeddings_not_summed, TIED, {"parallel.pipeline": 2}, ("gradient", "state"), f"{MEGATRON}844"
    ),
    "loss times context ranks": Fault(
        loss_times_ranks, DENSE, {"parallel.context": 2}, ("gradient", "norm"), f"{MEGATRON}673"
    ),
    "clipped by another norm": Fault(clipped_by_another_norm, DENSE, TP, ("norm", "steps"), ""),
    "one gradient scaled after clipping": Fault(one_gradient_scaled, DENSE, {}, ("norm", "steps"), ""),
    "a rate of one group": Fault(stepped(group_has("lr", 1.01)), DENSE, TP, ("state",), ""),
    "a decay of one group": Fault(stepped(group_has("weight_decay", 2.0)), DENSE, TP, ("state",), ""),
    "betas of one group": Fault(moments_decay_otherwise, DENSE, TP, ("state", "steps"), ""),
    "eps of one group": Fault(stepped(group_has("eps", 2.0)), DENSE, TP, ("state",), ""),
    "norm of one rank": Fault(norm_of_one_rank, DENSE, TP, ("norm",), ""),
    "copies that step otherwise": Fault(a_copy_steps_otherwise, DENSE, TP, ("state",), ""),
    "steps of vectors are longer": Fault(within_the_step(longer_steps), DENSE, {}, ("weights",), ""),
    "one vector is not stepped": Fault(within_the_step(one_step_lost), DENSE, {}, ("weights",), ""),
    "a skipped step": Fault(second_step_skipped, DENSE, TP, ("state", "norm"), ""),
    "a copy that drifts": Fault(a_copy_drifts, DENSE, TP, ("state",), ""),
    "a buffer of one rank": Fault(rotary_differs, DENSE, TP, ("state",), ""),
}
# This needs a bias that moves.
BIAS_FAULTS: dict[str, Fault] = {
    "expert bias moved on one rank": Fault(expert_bias_on_one_rank, LATENT, TP_EP, ("state",), ""),
    "loads counted twice": Fault(loads_counted_twice, LATENT, TP_EP, ("steps",), ""),
}
# These need losses of routers.
BALANCED_FAULTS: dict[str, Fault] = {
    "a padding mask under tensor ranks": Fault(
        padding_mask_under_tensor_ranks, "configs/models/certify_moe.json", TP_EP, ("gradient",), f"{MEGATRON}7452, 10"
    ),
    "router losses forget tensor ranks": Fault(
        router_losses_forget_their_parts, "configs/models/certify_moe.json", TP_EP, ("gradient",), f"{MEGATRON}5047"
    ),
    "router losses forget context ranks": Fault(
        router_losses_forget_their_parts,
        "configs/models/certify_moe.json",
        {"parallel.context": 2},
        ("gradient",),
        f"{MEGATRON}2217",
    ),
    "a reported loss counted twice": Fault(
        reported_loss_of_one_rank, "configs/models/certify_moe.json", TP_EP, ("steps",), f"{MEGATRON}1585"
    ),
}


def _both(*patches: Patch) -> Patch:
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def in_its_case() -> None:
    """Each case runs with the fault of its name, and no other does."""
    import gspo_mega.verify.certify.ranks as ranks

    def run_case(context, config, case, reference, is_reference, real=ranks.run_case):
        fault = (FAULTS | BIAS_FAULTS | BALANCED_FAULTS).get(case.name)
        with fault.make() if fault else contextlib.nullcontext():
            return real(context, config, case, reference, is_reference)

    ranks.run_case = run_case


def cases(faults: dict[str, Fault], **more: Any) -> Iterator[dict[str, Any]]:
    """The cases of a configuration in which every fault of `faults` acts."""
    for name, fault in faults.items():
        ranks = 2 if fault.layout else 1
        yield dict(name=name, ranks=ranks, set={"model.path": fault.model, **fault.layout}, **more)


def main(words: list[str]) -> None:
    """Does not return."""
    from gspo_mega.base.garbage import uncollected

    with uncollected():
        import gspo_mega.engine  # noqa: F401  the CPU backend comes first
        from gspo_mega.train import worker

    in_its_case()
    worker.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
