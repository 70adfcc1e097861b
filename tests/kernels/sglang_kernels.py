"""SGLang's Triton kernels, against what stands in their place on a CPU. A script for `interpreter.py`."""

import warnings

from interpreter import mend_interpreter, report

from gspo_mega.cpu import sglang_hooks

warnings.filterwarnings("ignore")
sglang_hooks.activate()  # as a server: `sglang_layers`, `sglang_attention` and `sglang_quantization` are compared
mend_interpreter()

import sglang_adapter_cases  # noqa: E402, F401
import sglang_attention_cases  # noqa: E402, F401
import sglang_experts_cases  # noqa: E402, F401
import sglang_quantize_cases  # noqa: E402, F401
from sglang.kernels.ops.gemm import fp8_kernel  # noqa: E402
from sglang.kernels.ops.lora.dense import lora_tuning_config  # noqa: E402

# They look for the parameters that were found to be fast on a GPU of this name.
lora_tuning_config.get_device_name = fp8_kernel.get_device_name = lambda: "none"
report()
