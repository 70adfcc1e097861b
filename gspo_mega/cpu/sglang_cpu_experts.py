"""Quantized experts for SGLang on a CPU: `w13_weight` and `w2_weight` with their scales, and their product.

Owns the experts' method; the linear layers and the registration are `sglang_cpu_quantization.py`'s, the rules of
rounding `algorithm/served.py`'s. Router weights, the activation function and the sum over a token's experts are as
in SGLang's own experts without a GPU (`moe_forward_native`). Imported inside a server process only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from torch.nn import Parameter

from gspo_mega.algorithm.fp8 import dequantize_blocks
from gspo_mega.algorithm.served import Served, rounded_call, served_experts
from gspo_mega.cpu.sglang_cpu_quantization import require_loaded, values_of

if TYPE_CHECKING:
    from gspo_mega.cpu.sglang_cpu_quantization import CpuFp8Config, CpuInt8Config

_WEIGHTS = ("w13_weight", "w2_weight")


class CpuQuantizedExperts(FusedMoEMethodBase):
    """The experts of one layer. `layer.w13_operand` and `layer.w2_operand` [experts, n, k] float32 hold the weights'
    values, made when weights were loaded; no parameters, so that they are neither loaded nor checked.
    """

    def __init__(self, quant_config: CpuFp8Config | CpuInt8Config, served: Served) -> None:
        self.quant_config = quant_config
        self.served: Served = served
        self.weight_block_size = quant_config.weight_block_size

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        if with_bias:
            raise ValueError("experts with a bias have no quantized emulation on a CPU")
        in_blocks = self.served == "fp8_block"
        Fp8MoEMethod.create_fp8_moe_weight_(
            layer=layer,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            block_quant=in_blocks,
            quant_config=self.quant_config,
            use_mxfp8=False,
            is_checkpoint_fp8_serialized=in_blocks,
            is_fp4_expert=False,
            params_dtype=params_dtype,
            **extra_weight_attrs,
        )
        for name in _WEIGHTS:
            getattr(layer, f"{name}_scale_inv" if in_blocks else name).data.fill_(torch.nan)
        layer.loading = (
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            extra_weight_attrs,
        )

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """There is no kernel to choose. Raises ValueError for experts of another form than gated SiLU."""
        if (
            moe_runner_config.activation != "silu"
            or not moe_runner_config.is_gated
            or moe_runner_config.gemm1_alpha is not None
            or moe_runner_config.apply_router_weight_on_input
        ):
            raise ValueError("experts other than gated SiLU, weighted afterwards, have no quantized emulation on a CPU")

    def restore_weights_before_loading(self, layer: Any) -> None:
        if self.served != "fp8_block" and layer.w13_weight.dtype != layer.loading[3]:
            *arguments, attributes = layer.loading
            self.create_weights(layer, *arguments, **attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in _WEIGHTS:
            operand = name.replace("weight", "operand")
            if self.served == "fp8_block":
                require_loaded(layer, f"{name}_scale_inv")
                weight, scale = getattr(layer, name).data, getattr(layer, f"{name}_scale_inv").data
                setattr(layer, operand, torch.stack([dequantize_blocks(*both) for both in zip(weight, scale)]))
                continue
            require_loaded(layer, name)
            weight, scale = served_experts(getattr(layer, name).data, self.served)
            setattr(layer, name, Parameter(weight, requires_grad=False))
            setattr(layer, f"{name}_scale", Parameter(scale, requires_grad=False))
            setattr(layer, operand, values_of(weight) * scale.view(len(scale), -1, 1))

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x = dispatch_output.hidden_states
        weights, experts, _ = dispatch_output.topk_output
        output = experts_forward(x, weights, experts, layer.w13_operand, layer.w2_operand, self.served)
        return StandardCombineInput(hidden_states=output)


def experts_forward(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    served: Served,
) -> torch.Tensor:
    """The weighted sum of each token's experts, gate and up first, all inputs rounded as SGLang's kernel rounds them.

    Args:
        x: [tokens, hidden] in the server's dtype.
        weights: [tokens, k] float32, the router's.
        experts: [tokens, k] int, negative where an expert is another rank's.
        w13: [experts, 2 * intermediate, hidden] float32: gate's rows above up's.
        w2: [experts, hidden, intermediate] float32.

    Returns:
        [tokens, hidden] in x's dtype.
    """
    chosen = experts.reshape(-1).long()
    order = torch.argsort(chosen, stable=True)
    mine = order[(chosen[order] >= 0) & (chosen[order] < len(w13))]
    counts = torch.bincount(chosen[mine], minlength=len(w13)).tolist()
    entering = rounded_call(x, served).index_select(0, mine // experts.shape[1])
    gate_up = _by_expert(entering, w13, counts).to(x.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    between = rounded_call(F.silu(gate) * up, served)
    each = x.new_zeros(len(chosen), x.shape[1])
    each[mine] = _by_expert(between, w2, counts).to(x.dtype)
    weighted = each.view(*experts.shape, -1).to(weights.dtype) * weights[:, :, None]
    return weighted.sum(dim=1).to(x.dtype)


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Each expert's rows times its weight: `rows` [n, in], sorted by expert, `weight` [experts, out, in]."""
    parts = [F.linear(part, weight[expert]) for expert, part in enumerate(rows.split(counts)) if len(part)]
    return torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[1])
