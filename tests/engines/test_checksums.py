"""Checksums: their definition, the agreement of devices and threads, and the changes that they show."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.engines import checksums as module
from slipstream.engines.checksums import (
    BLOCK_WORDS,
    LOWER,
    PIECE_BLOCKS,
    UPPER,
    checksum,
    raw,
    sums_in_memory,
    sums_on_device,
)


def random(size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def test_a_checksum_is_the_hash_of_two_sums_for_each_block() -> None:
    words = [2**63 - 1, -(2**63), -1, 12345678901234567, 3]  # -1 >> 32 is -1
    lower = signed(sum(int(a) * w for a, w in zip(LOWER, words, strict=False)))
    upper = signed(sum(int(b) * (w >> 32) for b, w in zip(UPPER, words, strict=False)))
    sums = np.array([lower, upper], np.int64)
    expected = int.from_bytes(hashlib.blake2b(sums.tobytes(), digest_size=8).digest(), "little")
    assert checksum(torch.tensor(words)) == expected


@given(
    st.integers(0, 3 * 8 * BLOCK_WORDS),
    st.integers(0, 9),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
)
def test_devices_and_host_memory_have_the_same_sums(size: int, start: int, dtype: torch.dtype) -> None:
    size //= dtype.itemsize
    tensor = random(size + start, dtype)[start:]  # also where words are not aligned
    sums = sums_in_memory(raw(tensor))
    np.testing.assert_array_equal(sums_on_device(tensor), sums)
    assert len(sums) == -(-size * dtype.itemsize // (8 * BLOCK_WORDS))


def test_threads_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(4 * BLOCK_WORDS * (PIECE_BLOCKS + 1) + 3)
    expected = checksum(weight), checksum(weight, torch.float32)
    monkeypatch.setattr(module, "PIECE_BLOCKS", 3)
    monkeypatch.setattr(module, "MOVED_BLOCKS", 7)
    assert (checksum(weight), checksum(weight, torch.float32)) == expected
    turned = random(33 * 65).view(33, 65).T
    assert checksum(turned) == checksum(turned.contiguous()) != checksum(turned.T)


@pytest.mark.parametrize("change", ["two signs", "rows", "experts", "transposed", "half old", "one bit"])
def test_accidents_show(change: str) -> None:
    weight = random(4 * 256 * 256).view(4, 256, 256)
    wrong = weight.clone()
    match change:
        case "two signs":  # the highest bits of two words: their plain sum is the same
            wrong.view(-1)[[3, 7]] *= -1
        case "rows":
            wrong[0, [0, 1]] = weight[0, [1, 0]]
        case "experts":  # four blocks each
            wrong[[0, 1]] = weight[[1, 0]]
        case "transposed":
            wrong = weight.mT
        case "half old":
            wrong[:2] = random(2 * 256 * 256, seed=1).view(2, 256, 256)
        case "one bit":
            wrong.view(torch.int16).view(-1)[12345] ^= 1
    assert checksum(wrong) != checksum(weight)
