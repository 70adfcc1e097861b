"""Gated delta nets without kernels: the three functions of flash-linear-attention (`fla`) that Megatron-Core's layer
calls, in plain PyTorch.

`causal_conv1d`, `l2norm` and `chunk_gated_delta_rule` have the names, arguments and results of fla's, and take packed
sequences by `cu_seqlens`. Autograd differentiates them. `install` hands them to Megatron.
SGLang's layers on a CPU use the same functions (`sglang_delta.py`).

The rule (Gated Delta Networks, arXiv:2412.06464, equation 10), for each head with a state S [key size, value size] that
starts at zero in every sequence:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))        o_t = scale q_t^T S_t
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens that are computed together: within a chunk by products of matrices, from chunk to chunk by the state."""
_narrowest = torch.float32  # the dtype of all computation, unless a tensor is wider


def compute_in(dtype: torch.dtype) -> None:
    """Choose, for this process, the narrowest dtype in which these functions compute: fp32, or fp64."""
    global _narrowest
    _narrowest = dtype


@contextlib.contextmanager
def chunks_of(length: int) -> Iterator[None]:
    """Let `chunk_gated_delta_rule` compute `length` tokens together, in this process; 1: token by token."""
    global CHUNK
    before, CHUNK = CHUNK, length
    try:
        yield
    finally:
        CHUNK = before


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return x / sqrt(sum of squares over the last dimension + eps), computed in fp32 or wider, in the dtype of x."""
    wide = x.to(computed_in(x))
    return (wide * torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve every channel with its own kernel over its sequence's last tokens.

    x [batch, t, channels] of a float dtype; weight [channels, width], whose last column is for the token itself; bias
    [channels]. `activation`: None, or `silu` (also called `swish`). `cu_seqlens` [S+1]: the sequences of a pack, whose
    batch is 1; a sequence does not see the one before it. `initial_state` [S or batch, channels, width]: the inputs
    before each sequence, of which the last width - 1 count; zeros if None. Returns the result, of the shape and dtype
    of x, and the last inputs of each sequence in the form of `initial_state`, or None.
    """
    bounds = _bounds(x, cu_seqlens)
    width = weight.size(1)
    dtype = computed_in(x)
    filters = weight.to(dtype)[:, None]
    outputs, states = [], []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = (x[:, start:end] if cu_seqlens is not None else x[index : index + 1]).transpose(1, 2).to(dtype)
        if initial_state is None:
            before = part.new_zeros(1, part.size(1), width)
        else:
            before = initial_state[index : index + 1].to(dtype)
        seen = torch.cat([before, part], dim=2)
        out = F.conv1d(seen[:, :, 1:], filters, None if bias is None else bias.to(dtype), groups=part.size(1))
        outputs.append((F.silu(out) if activation in ("silu", "swish") else out).transpose(1, 2))
        states.append(seen[:, :, -width:])
    result = torch.cat(outputs, dim=1 if cu_seqlens is not None else 0).to(x.dtype)
    return result, torch.cat(states).to(x.dtype) if output_final_state else None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply the gated delta rule to whole sequences.

    q, k [batch, t, key heads, key size]; v [batch, t, heads, value size]; g, the logarithm of the decay, and beta
    [batch, t, heads]. There may be several heads to a key head. `scale`: key size ** -0.5 if None. `initial_state` [S
    or batch, heads, key size, value size]: the state before each sequence. `cu_seqlens` [S+1]: the sequences of a pack,
    whose batch is 1. Everything is computed in fp32, or in fp64 if `v` has it or `compute_in` says so. Returns o, of
    the shape and dtype of v, and the states after each sequence in the dtype of the computation, or None.
    """
    dtype = computed_in(v)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q.to(dtype)), l2norm(k.to(dtype))
    bounds = _bounds(v, cu_seqlens)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if cu_seqlens is not None:
        rows = torch.nn.utils.rnn.pad_sequence(
            [torch.arange(start, end) for start, end in itertools.pairwise(bounds)], batch_first=True, padding_value=-1
        ).to(v.device)
        is_padding = rows < 0
        rows = rows.clamp(min=0)
        # Padding changes no state: its decay is exp(0), and it writes beta = 0 times something.
        q, k, v = (x[0][rows] for x in (q, k, v))
        g, beta = (x[0][rows].masked_fill(is_padding[..., None], 0) for x in (g, beta))
    shared = v.size(2) // k.size(2)
    if shared > 1:
        q, k = (x.repeat_interleave(shared, dim=2) for x in (q, k))
    query, key, value, decay, rate = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))
    factor = float(k.size(-1)) ** -0.5 if scale is None else scale
    before = None if initial_state is None else initial_state.to(dtype)
    out, state = _rectangle(query, key, value, decay, rate, factor, before)
    out = out.transpose(1, 2).to(v.dtype)
    if cu_seqlens is not None:
        out = torch.cat([out[index, :length] for index, length in enumerate(lengths)])[None]
    return out, state if output_final_state else None


def _rectangle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule for sequences of one length, in chunks: tensors [S, heads, t, size] and [S, heads, t] of one dtype.
    Returns the outputs in the form of `value`, and the last states [S, heads, key size, value size].

    Within a chunk that starts with the state S0, with G the sum of g from its start and D_ij = exp(G_i - G_j): the
    written values u solve u_i + beta_i sum_{j<i} (k_i k_j) D_ij u_j = beta_i (v_i - exp(G_i) k_i S0); the output is
    exp(G_i) q_i S0 + sum_{j<=i} (q_i k_j) D_ij u_j.
    """
    sequences, heads, length, size = key.shape
    chunk = min(CHUNK, max(length, 1))
    count = -(-length // chunk)
    padding = count * chunk - length
    query, key, value = (
        F.pad(x, (0, 0, 0, padding)).view(sequences, heads, count, chunk, x.size(-1))
        for x in (query * scale, key, value)
    )
    decay, beta = (F.pad(x, (0, padding)).view(sequences, heads, count, chunk) for x in (decay, beta))

    summed = decay.cumsum(dim=-1)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).triu(1)
    # Masked before the exponential: above the diagonal it would overflow, and infinity times 0 is no gradient.
    between = (summed[..., :, None] - summed[..., None, :]).masked_fill(above, -torch.inf).exp()
    written_key = key * beta[..., None]
    system = (written_key @ key.mT) * between  # only what is below the diagonal counts
    from_start = summed.exp()[..., None]
    both = torch.cat([value * beta[..., None], written_key * from_start], dim=-1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, of_state = both.split([value.size(-1), size], dim=-1)
    within = (query @ key.mT) * between
    read = query * from_start
    to_end = key * (summed[..., -1:] - summed).exp()[..., None]
    whole = summed[..., -1].exp()[..., None, None]

    zeros = value.new_zeros(sequences, heads, size, value.size(-1))
    current = zeros if state is None else state
    outputs = []
    for index in range(count):
        written = own[:, :, index] - of_state[:, :, index] @ current
        outputs.append(read[:, :, index] @ current + within[:, :, index] @ written)
        current = current * whole[:, :, index] + to_end[:, :, index].mT @ written
    return torch.cat(outputs, dim=2)[:, :, :length], current


def gates(
    a_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), both fp32: a, b [..., heads]."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def computed_in(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which these functions compute for `x`: fp64 if it has that, or if `compute_in` says so."""
    return torch.float64 if x.dtype == torch.float64 else _narrowest


def _bounds(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[int]:
    """The offsets of the sequences; without `cu_seqlens` every row of the batch is one, at 0, 1, 2, ... rows."""
    return list(range(x.size(0) + 1)) if cu_seqlens is None else cu_seqlens.tolist()


def install() -> None:
    """Hand these functions to Megatron-Core's layer, on a machine without a GPU. Needs Megatron on the path."""
    hand_to_megatron(causal_conv1d=causal_conv1d, l2norm=l2norm, chunk_gated_delta_rule=chunk_gated_delta_rule)


def hand_to_megatron(**functions: Any) -> None:
    """Let Megatron-Core's layer call these functions, by the names that fla has for them."""
    layer: Any = importlib.import_module("megatron.core.ssm.gated_delta_net")
    # A package since 0.19, whose layer has copies of the names.
    parts = [importlib.import_module(f"{layer.__name__}.{part}") for part in ("common", "gdn") if _is_package(layer)]
    for module in (layer, *parts):
        vars(module).update(functions, HAVE_FLA=True)


def _is_package(module: Any) -> bool:
    return hasattr(module, "__path__")
