"""Quantized linear layers and experts for SGLang on a CPU: SGLang's parameters and rules of rounding, plain products.

Importing this module puts its classes into SGLang's registry of quantization methods, under SGLang's own names `fp8`
and `w8a8_int8`. Only a server process imports it. SGLang's own functions make the parameters, with the names, shapes
and dtypes that its classes have on an NVIDIA GPU, so checkpoints load and published weights arrive as they do there.
Only the products differ: the rounded operands are multiplied in float32. `algorithm/rounding.py` has the rules of
rounding.

Linear layers come first, then experts (`w13_weight` and `w2_weight` with their scales). Router weights, the activation
function and the sum over a token's experts are as in SGLang's own experts without a GPU (`moe_forward_native`).

Weights that SGLang quantizes while it loads (`fp8` and `int8` of a plain checkpoint) can be loaded again here. Before
an update, the plain parameters are made anew and filled with NaN. An update that leaves NaN in one of them is refused.
SGLang's own classes cannot do that; `gspo-mega plan` says where that matters.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.layers import linear, quantization
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from torch.nn import Module, Parameter

from gspo_mega.algorithm.fp8 import dequantize_blocks, from_fp8
from gspo_mega.algorithm.rounding import (
    Served,
    rounded_expert_inputs,
    rounded_linear_inputs,
    served_experts,
    served_linear,
)

logger = logging.getLogger(__name__)

_WEIGHTS = ("w13_weight", "w2_weight")


class CpuFp8Config(Fp8Config):
    """`quantization="fp8"`: blocks where the checkpoint has them, otherwise quantized while it is loaded."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    @property
    def served(self) -> Served:
        """The configuration's name of this quantization. Raises ValueError for a form that is not emulated."""
        if not self.is_checkpoint_fp8_serialized:
            return "fp8"
        if self.use_mxfp8 or list(self.weight_block_size or ()) != [128, 128]:
            raise ValueError(
                f"quantization_config: FP8 weights in blocks of {self.weight_block_size} have no emulation on a CPU;"
                " valid: weight_block_size [128, 128], or a checkpoint that is not quantized"
            )
        return "fp8_block"

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.radix_attention import RadixAttention

        if isinstance(layer, RadixAttention):
            return Fp8KVCacheMethod(self)
        skipped = isinstance(layer, linear.LinearBase | FusedMoE) and is_layer_skipped(
            prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping
        )
        return _method(layer, self, self.served, skipped)


class CpuInt8Config(W8A8Int8Config):
    """`quantization="w8a8_int8"` of a plain checkpoint, quantized while it is loaded."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    # Read by SGLang's functions that make FP8 parameters.
    is_checkpoint_fp8_serialized = False
    activation_scheme = "dynamic"

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        if self.quant_description:
            raise ValueError(
                "quantization_config: INT8 checkpoints have no emulation on a CPU; valid: a checkpoint that is not"
                " quantized"
            )
        return _method(layer, self, "int8", skipped=False)


def _method(
    layer: Module, config: CpuFp8Config | CpuInt8Config, served: Served, skipped: bool
) -> QuantizeMethodBase | None:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    if isinstance(layer, linear.LinearBase):
        return UnquantizedLinearMethod() if skipped else CpuQuantizedLinear(config, served)
    if isinstance(layer, FusedMoE):
        return (
            UnquantizedFusedMoEMethod(layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe)
            if skipped
            else CpuQuantizedExperts(config, served)
        )
    return None


class CpuQuantizedLinear(LinearMethodBase):
    """A linear layer whose weight is rounded, and whose input is rounded by each call.

    `layer.operand` [n, k] float32 holds the weight's values, made when weights are loaded. It is no parameter, so it is
    neither loaded nor checked.
    """

    def __init__(self, quant_config: CpuFp8Config | CpuInt8Config, served: Served) -> None:
        self.quant_config = quant_config
        self.served: Served = served
        self.weight_block_size = quant_config.weight_block_size
        self.power_of_two = getattr(quant_config, "scale_fmt", None) == "ue8m0"

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        Fp8LinearMethod.create_fp8_weight_(
            layer,
            block_quant=self.served == "fp8_block",
            quant_config=self.quant_config,
            use_mxfp8=False,
            output_size_per_partition=sum(output_partition_sizes),
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            input_size=input_size,
            output_size=output_size,
            is_checkpoint_fp8_serialized=self.served == "fp8_block",
            **extra_weight_attrs,
            params_dtype=params_dtype,
        )
        if self.served == "fp8_block":
            layer.weight_scale_inv.data.fill_(torch.nan)
            return
        layer.weight.data.fill_(torch.nan)
        layer.loading = (
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            extra_weight_attrs,
        )

    def restore_weights_before_loading(self, layer: Any) -> None:
        if self.served != "fp8_block" and layer.weight.dtype != layer.loading[4]:
            *arguments, attributes = layer.loading
            self.create_weights(layer, *arguments, **attributes)
            # That of a gated delta net's projections, which takes several parts at once, is their model's own.
            layer.weight._weight_loader = layer.weight_loaded_by

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.served == "fp8_block":
            require_loaded(layer, "weight_scale_inv")
            layer.operand = dequantize_blocks(layer.weight.data, layer.weight_scale_inv.data)
            return
        require_loaded(layer, "weight")
        layer.weight_loaded_by = layer.weight.weight_loader
        weight, scale = served_linear(layer.weight.data, self.served)
        layer.weight = Parameter(weight, requires_grad=False)
        layer.weight_scale = Parameter(scale, requires_grad=False)
        layer.operand = values_of(weight.t()) * scale.view(-1, 1)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        rounded = rounded_linear_inputs(tokens, self.served, power_of_two=self.power_of_two)
        output = torch.nn.functional.linear(rounded, layer.operand, None if bias is None else bias.float())
        return output.to(x.dtype).view(*x.shape[:-1], output.shape[-1])


def require_loaded(layer: Module, name: str) -> None:
    """Raise ValueError if a part of the parameter has not been loaded."""
    if torch.isnan(getattr(layer, name).data).any():
        where = getattr(layer, "prefix", "") or type(layer).__name__
        raise ValueError(f"{where}.{name}: no value was loaded for a part of it, or it is NaN")


def values_of(data: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of FP8 or INT8 codes, of any shape, without their scale."""
    return data.float() if data.dtype == torch.int8 else from_fp8(data)


def _register() -> None:
    """Put the emulation into SGLang's registries of quantization methods."""
    for registry in (
        quantization.QUANTIZATION_METHODS,
        quantization.BASE_QUANTIZATION_METHODS,
        quantization.CPU_QUANTIZATION_METHODS,
    ):
        registry["fp8"] = CpuFp8Config
        registry["w8a8_int8"] = CpuInt8Config
    # This list's loader uses a parameter's own methods, which know blocks of scales.
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(CpuQuantizedLinear.__name__)


_register()


if TYPE_CHECKING:
    pass


class CpuQuantizedExperts(FusedMoEMethodBase):
    """The experts of one layer. `layer.w13_operand` and `layer.w2_operand` [experts, n, k] float32 hold the weights'
    values, made when weights are loaded. They are no parameters, so they are neither loaded nor checked.
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
        """Check the experts' form; there is no kernel to choose. Raises ValueError for experts of another form than
        gated SiLU.
        """
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
    """Return the weighted sum of each token's experts, gate and up first, all inputs rounded as SGLang's kernel rounds
    them.

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
    entering = rounded_expert_inputs(x, served).index_select(0, mine // experts.shape[1])
    gate_up = _by_expert(entering, w13, counts).to(x.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    between = rounded_expert_inputs(F.silu(gate) * up, served)
    each = x.new_zeros(len(chosen), x.shape[1])
    each[mine] = _by_expert(between, w2, counts).to(x.dtype)
    weighted = each.view(*experts.shape, -1).to(weights.dtype) * weights[:, :, None]
    return weighted.sum(dim=1).to(x.dtype)


def _by_expert(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Multiply each expert's rows by its weight: `rows` [n, in], sorted by expert, `weight` [experts, out, in]."""
    parts = [F.linear(part, weight[expert]) for expert, part in enumerate(rows.split(counts)) if len(part)]
    return torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[1])
