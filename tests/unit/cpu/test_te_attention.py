"""What Transformer Engine's attention on a CPU refuses."""

from typing import Any, cast

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from gspo_mega.cpu.te_layers import _forward


@pytest.mark.parametrize("kind", [AttnMaskType.no_mask, AttnMaskType.padding, AttnMaskType.arbitrary, None])
def test_another_mask_than_causal_is_refused(kind):
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="packed causal sequences only"):
        _forward(cast(Any, None), x, x, x, None, kind, packed_seq_params=object())
