"""Rounding of tensors to fewer bits, exactly as the kernels of trainer and server do it: plain torch, any device."""
