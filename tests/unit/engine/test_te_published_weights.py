"""One quantiser on both sides: what Transformer Engine multiplies is what servers of FP8 blocks are sent, to the bit."""

import json
from pathlib import Path

import pytest
import torch
from te_process import in_te_process

MODEL = Path(__file__).parents[3] / "configs/models/certify_moe.json"
SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, head_dim=128)
SIZES |= dict(moe_intermediate_size=256)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("head_dim, tensor_parallel", [(128, 1), (128, 2), (64, 1), (32, 2)])
@in_te_process
def test_equal_to_the_bit_where_the_rule_says_so_and_only_there(head_dim, tensor_parallel, power_of_two):
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from gspo_mega.checkpoint.hf_export import tensor_digest
    from gspo_mega.checkpoint.quantized import PublishedForm
    from gspo_mega.models.block_fp8 import is_quantizable
    from gspo_mega.models.huggingface import spec_from_config
    from gspo_mega.models.spec import BlockFp8
    from gspo_mega.models.tensors import hf_tensors, parameter_blocks, parameter_shape
    from gspo_mega.verify.mismatch.findings import block_difference

    spec = spec_from_config(json.loads(MODEL.read_text()) | SIZES | dict(head_dim=head_dim))
    rule = "power_of_two" if power_of_two else "float32"
    form = PublishedForm(torch.bfloat16, torch.bfloat16, BlockFp8(power_of_two=power_of_two), rule)
    entries = [e for e in hf_tensors(spec) if is_quantizable(e) and (e.expert or 0) == 0]
    generator = torch.Generator().manual_seed(0)
    whole = {
        e.name: torch.randn(e.shape, generator=generator).to(torch.bfloat16)
        * torch.exp(3 * torch.randn(e.shape[0], 1, generator=generator)).to(torch.bfloat16)
        for e in entries
    }
    quantizer = Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2, force_pow_2_scales=power_of_two
    )
    equal = {}
    for entry in entries:
        found = torch.empty(entry.shape, dtype=torch.uint8)
        for rank in range(tensor_parallel):
            local = torch.zeros(parameter_shape(spec, entry, tensor_parallel), dtype=torch.bfloat16)
            for one in (e for e in entries if e.parameter == entry.parameter):
                for b in parameter_blocks(spec, one, tensor_parallel, rank):
                    local.narrow(b.dim, b.local_start, b.length).copy_(whole[one.name].narrow(b.dim, b.start, b.length))
            data = quantizer(local)._rowwise_data
            for b in parameter_blocks(spec, entry, tensor_parallel, rank):
                found.narrow(b.dim, b.start, b.length).copy_(data.narrow(b.dim, b.local_start, b.length))
        sent = dict(form.tensors(entry, whole[entry.name]))[entry.name]
        equal[entry.name] = tensor_digest(found) == tensor_digest(sent.view(torch.uint8))
        expected = block_difference(spec, entry, tensor_parallel) is None
        assert equal[entry.name] or not expected, (entry.name, block_difference(spec, entry, tensor_parallel))
    assert all(equal.values()) == (head_dim == 128), "interleaved heads of another size mix in a block"
