"""The CUDA kernel of ``fcg::random_bits``; files that import triton are named ``*_triton.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["random_bits_cuda", "signed32"]

_BLOCKS_PER_PROGRAM = 512
_ROUNDS = 10


# A new call site or size must not compile a new kernel, least of all during a capture, so no argument that
# changes between calls is specialized on its value.
@triton.jit(do_not_specialize=["stream_low", "stream_high", "n"])
def _philox_kernel(
    out,
    key,
    key_stride,
    stream_low,
    stream_high,
    n,
    HAS_FIRST: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    block = start + tl.arange(0, BLOCKS)
    if HAS_FIRST:
        block += tl.load(key + 2 * key_stride)
    k0 = (tl.load(key) & 0xFFFFFFFF).to(tl.uint32)
    k1 = (tl.load(key + key_stride) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros((BLOCKS,), tl.uint32)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + stream_low.to(tl.uint32, bitcast=True)
    c3 = zero + stream_high.to(tl.uint32, bitcast=True)
    c0, c1, c2, c3 = tl.philox_impl(c0, c1, c2, c3, k0, k1, ROUNDS)
    # Block i owns words 4i to 4i + 3: interleaved in registers, stored together.
    words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3)).to(tl.int32, bitcast=True)
    index = start * 4 + tl.arange(0, 4 * BLOCKS)
    # Only unmasked stores move four words at a time; all programs but a partial last one can use them.
    if (start + BLOCKS) * 4 <= n:
        tl.store(out + index, words)
    else:
        tl.store(out + index, words, mask=index < n)


def signed32(word: int) -> int:
    """Return the low 32 bits of ``word`` as a signed number: every stream has one argument type, i32."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def random_bits_cuda(key: torch.Tensor, stream: int, n: int) -> torch.Tensor:
    """Launch the kernel without a sync: the key is read on the device, the grid depends only on ``n``.

    Args:
      key: i64[2], or i64[3] with the first block; on a CUDA device.
      stream: The two upper counter words.
      n: Number of 32-bit words.

    Returns:
      i32[n] on the key's device.
    """
    out = torch.empty(n, dtype=torch.int32, device=key.device)
    if n:
        with torch.cuda.device(key.device):
            _philox_kernel[(triton.cdiv(n, 4 * _BLOCKS_PER_PROGRAM),)](
                out,
                key,
                key.stride(0),
                signed32(stream),
                signed32(stream >> 32),
                n,
                HAS_FIRST=key.shape[0] == 3,
                BLOCKS=_BLOCKS_PER_PROGRAM,
                ROUNDS=_ROUNDS,
            )
    return out
