"""Checksums of tensors, computed on the device that holds them, and in host memory by several threads.

The bytes of a tensor are 64-bit words w in blocks of `BLOCK_WORDS`. A block has two sums modulo 2^64, Σ a·w and
Σ b·(w >> 32), with fixed random numbers a and b. Two different blocks have equal sums with probability 2^-33 at most,
whatever they hold: some word differs in its lower or its upper half, and the product of this difference with a random
number takes any one value with that probability at most. A checksum is a hash over the sums of all blocks. It detects
accidents, and no adversary, who knows a and b.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

BLOCK_WORDS = 1 << 14
"""Number of words in a block."""
PIECE_BLOCKS = 8
"""Number of blocks that a thread sums at once: 1 MiB."""
MOVED_BLOCKS = 64 * PIECE_BLOCKS
"""Number of blocks that are converted, or summed on a device, at once: 64 MiB."""
CHECKSUM_THREADS = min(8, os.cpu_count() or 1)
LOWER, UPPER = (
    np.frombuffer(hashlib.shake_128(half).digest(8 * BLOCK_WORDS), np.int64) for half in (b"lower half", b"upper half")
)
"""The fixed random numbers a and b, the same in all processes and versions of libraries."""
Bytes = np.ndarray[Any, Any]


def raw(tensor: Tensor) -> Bytes:
    """Return the bytes of a CPU tensor; a contiguous tensor is not copied."""
    return cast("Bytes", tensor.contiguous().view(-1).view(torch.uint8).numpy())


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the checksum of a tensor's bytes, converted to `dtype` if one is given."""
    dtype = dtype or tensor.dtype
    digest = hashlib.blake2b(digest_size=8)
    for part in torch.split(tensor.detach().reshape(-1), MOVED_BLOCKS * 8 * BLOCK_WORDS // dtype.itemsize):
        part = part.to(dtype)
        digest.update((sums_in_memory(raw(part)) if part.device.type == "cpu" else sums_on_device(part)).data)
    return int.from_bytes(digest.digest(), "little")


def sums_in_memory(data: Bytes) -> Bytes:
    """Return both sums of every block, computed by several threads if there are many blocks."""
    blocks = np.pad(data, (0, rest)) if (rest := -len(data) % (8 * BLOCK_WORDS)) else data
    blocks = blocks.view(np.int64).reshape(-1, BLOCK_WORDS)

    def sums(first: int) -> Bytes:
        words = blocks[first : first + PIECE_BLOCKS]
        return np.stack([words @ LOWER, (words >> 32) @ UPPER], 1)

    if len(blocks) <= PIECE_BLOCKS:
        return sums(0)
    with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
        return np.concatenate(list(threads.map(sums, range(0, len(blocks), PIECE_BLOCKS))))


def sums_on_device(part: Tensor) -> Bytes:
    """Return the same sums, of which only the result comes to host memory."""
    size = part.numel() * part.itemsize
    words = torch.zeros(-(-size // (8 * BLOCK_WORDS)), BLOCK_WORDS, dtype=torch.int64, device=part.device)
    words.view(-1).view(torch.uint8)[:size] = part.contiguous().view(torch.uint8)
    lower, upper = (torch.from_numpy(each.copy()).to(part.device) for each in (LOWER, UPPER))
    sums = torch.stack([(words * lower).sum(1), ((words >> 32) * upper).sum(1)], 1)
    return cast("Bytes", sums.cpu().numpy())
