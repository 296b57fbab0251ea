"""The two passes over a tile: against plain formulas in torch, and Triton's kernels in its interpreter on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.estimators.logprobs import tiles
from slipstream.estimators.logprobs.tiles import Bend


@pytest.mark.parametrize("part", [1, 12, 1 << 20])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bend", [Bend(), Bend(0.7), Bend(0.7, 0.25), Bend(1.3, 2.0, 1.5)], ids=str)
def test_fold_and_gradient_by_parts_are_softmax_and_its_gradient(
    part: int, entropy: bool, bend: Bend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PART_LOGITS", part)
    torch.manual_seed(0)
    tile, bias = torch.randn(4, 11, dtype=torch.float64).requires_grad_(), torch.randn(11, dtype=torch.float64)
    weights, upstream = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    logits = (tile + bias) * bend.scale
    if bend.cap is not None:
        logits = bend.cap * torch.tanh(logits / bend.cap)
    logits = logits / bend.temperature
    logp = logits.log_softmax(1)
    h = -(logp.exp() * logp).sum(1)

    lse, mean = tiles.fold(tile.detach(), bias, bend, entropy=entropy)
    torch.testing.assert_close(lse, logits.logsumexp(1))
    torch.testing.assert_close(mean, (logp.exp() * logits).sum(1) if entropy else torch.zeros_like(mean))

    # −Σ_i total_i · lse_i is what log-probs with gradients that sum to total leave beside the chosen ids
    loss = -(weights * logits.logsumexp(1)).sum() + ((upstream * h).sum() if entropy else 0)
    (expected,) = torch.autograd.grad(loss, tile)
    found = tile.detach().clone()
    tiles.to_gradient(
        found,
        bias,
        bend,
        lse_C=lse,
        total_C=weights,
        entropy_C=h.detach() if entropy else None,
        grad_entropy_C=upstream if entropy else None,
    )
    torch.testing.assert_close(found, expected)


def test_merging_two_tiles_is_folding_them_as_one() -> None:
    tile = torch.randn(3, 10, dtype=torch.float64) * 5
    left, right = (tiles.fold(half, None, Bend(), entropy=True) for half in (tile[:, :4], tile[:, 4:]))
    for ours, whole in zip(tiles.merge(*left, *right), tiles.fold(tile, None, Bend(), entropy=True), strict=True):
        torch.testing.assert_close(ours, whole)


def test_triton_kernels_agree_with_the_portable_path() -> None:
    """In a process of its own, because Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, Path(__file__)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "agree"


def compare_with_triton() -> None:
    from slipstream.estimators import logprobs
    from slipstream.estimators.logprobs import tiles_triton

    tiles_triton.TRITON_BLOCK = 16  # several blocks, the last one not full
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5, 8), torch.randn(37, 8), torch.randn(37)
    ids = torch.randint(0, 37, (5, 3))
    ids[1, 2] = -1
    target = torch.randn(5, 3)

    def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return (logp - target[rows]).square().sum(), {}

    def everything(dtype: torch.dtype, offset: Tensor | None, bend: Bend) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        options = {"bias": None if offset is None else offset.to(dtype), **bend._asdict(), "chunk": 60}
        logp, entropy = logprobs.logprobs_and_entropy_at(*inputs, ids, **options)
        plain = torch.autograd.grad((logp * target).sum() + entropy.square().sum(), inputs)
        loss, _ = logprobs.fused_loss(*inputs, ids, loss_fn, **options)
        return [logp.detach(), entropy.detach(), *plain, loss.detach(), *torch.autograd.grad(loss, inputs)]

    portable = logprobs.backend
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-7)):
        for offset, bend in ((None, Bend()), (bias, Bend(0.7)), (bias, Bend(0.7, 0.5, 3.0))):
            expected = everything(dtype, offset, bend)
            logprobs.backend = lambda like: tiles_triton
            found = everything(dtype, offset, bend)
            logprobs.backend = portable
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    print("agree")


if __name__ == "__main__":
    compare_with_triton()
