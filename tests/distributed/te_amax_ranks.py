"""On each rank: tensorwise quantisation whose amax is that of all ranks' parts."""

import torch
import torch.distributed as dist


def quantise_a_part(whole: list[list[float]], reduced: bool, dtype: str = "kFloat8E4M3") -> tuple[list, list]:
    """(codes, scale_inv) of this rank's rows of `whole`, with the amax of all ranks where `reduced`."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    group = dist.group.WORLD if reduced else None
    quantizer = Float8CurrentScalingQuantizer(
        DType[dtype], torch.device("cpu"), with_amax_reduction=reduced, amax_reduction_group=group
    )
    part = torch.tensor(whole).chunk(dist.get_world_size())[dist.get_rank()]
    quantised = quantizer(part)
    return quantised._data.tolist(), quantised._scale_inv.tolist()
