"""The chunked head against the dense log-softmax: values, gradients, padding, memory layout."""

import pytest
import torch
from torch import Tensor

from slipstream.estimators.logprobs import (
    Metrics,
    fused_loss,
    logprobs_and_entropy_at,
    logprobs_at,
    merge_metrics,
)

N, H, V, M = 11, 5, 17, 4


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype), torch.randn(V).to(dtype)
    ids = torch.randint(0, V, (N, M))
    ids[0] = 3  # the same id four times in a row
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), ids


def dense(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    *,
    scale: float = 1.0,
    cap: float | None = None,
) -> Tensor:
    logits = (hidden @ weight.T + (bias if bias is not None else 0)) * scale
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    return (logits / temperature).log_softmax(-1)


BENDS = [{}, {"scale": 0.0625}, {"cap": 2.0}, {"scale": 3.0, "cap": 1.5}]
"""Changes that models make to the head's products: none, a scale (Cohere, Granite), a soft cap (Gemma), both."""


@pytest.mark.parametrize("chunk", [None, 1, 20, 60, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("bend", BENDS, ids=str)
def test_values_and_gradients_equal_the_dense_path(
    chunk: int | None, temperature: float, with_bias: bool, bend: dict[str, float]
) -> None:
    hidden, weight, bias, ids = make()
    offset = bias if with_bias else None
    inputs = [hidden, weight] + ([bias] if with_bias else [])
    upstream, upstream_entropy = torch.randn(N, M, dtype=torch.float64), torch.randn(N, dtype=torch.float64)

    options = {"bias": offset, "temperature": temperature, "chunk": chunk, **bend}
    logp, entropy = logprobs_and_entropy_at(hidden, weight, ids, **options)
    found = torch.autograd.grad((logp * upstream).sum() + (entropy * upstream_entropy).sum(), inputs)

    full = dense(hidden, weight, offset, temperature, **bend)
    full_entropy = -(full.exp() * full).sum(-1)
    torch.testing.assert_close(logp, full.gather(1, ids))
    torch.testing.assert_close(entropy, full_entropy)
    expected = torch.autograd.grad(
        (full.gather(1, ids) * upstream).sum() + (full_entropy * upstream_entropy).sum(), inputs
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck() -> None:
    hidden, weight, bias, ids = make()
    assert torch.autograd.gradcheck(
        lambda h, w, b: logprobs_and_entropy_at(h, w, ids, bias=b, temperature=1.3, chunk=40), (hidden, weight, bias)
    )


@pytest.mark.parametrize("chunk", [None, 40])
def test_padding_ids_give_zero_and_no_gradient(chunk: int | None) -> None:
    hidden, weight, _, ids = make()
    ids[2], ids[5, 1:] = -1, -1
    logp = logprobs_at(hidden, weight, ids, chunk=chunk)
    assert (logp[ids < 0] == 0).all()
    (logp[2].sum() * 7 + logp[5, 1:].sum()).backward()
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize("chunk", [None, 1, 40])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("whole_vocabulary", [False, True])
@pytest.mark.parametrize("bend", BENDS, ids=str)
def test_fused_loss_equals_the_dense_loss(
    chunk: int | None, temperature: float, whole_vocabulary: bool, bend: dict[str, float]
) -> None:
    """A loss that is not linear in the log-probs, scaled by what comes from above."""
    hidden, weight, bias, ids = make()
    target = torch.randn(N, V if whole_vocabulary else M, dtype=torch.float64)

    def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
        loss = ((logp - target[rows]) ** 2).sum()
        return loss, {"loss": loss.detach(), "top_max": logp.detach().max()}

    options = {"bias": bias, "temperature": temperature, "chunk": chunk, **bend}
    loss, metrics = fused_loss(hidden, weight, None if whole_vocabulary else ids, loss_fn, **options)
    found = torch.autograd.grad(3 * loss, (hidden, weight, bias))

    full = dense(hidden, weight, bias, temperature, **bend)
    seen = full if whole_vocabulary else full.gather(1, ids)
    expected_loss = ((seen - target) ** 2).sum()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(metrics["loss"], expected_loss.detach())
    torch.testing.assert_close(metrics["top_max"], seen.detach().max())
    for ours, theirs in zip(found, torch.autograd.grad(3 * expected_loss, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [None, 1, 40])
@pytest.mark.parametrize("bend", BENDS, ids=str)
def test_fused_loss_shows_entropies_and_the_likeliest_ids(chunk: int | None, bend: dict[str, float]) -> None:
    hidden, weight, bias, ids = make()
    logp = dense(hidden, weight, bias, 0.7, **bend).detach()
    seen: list[tuple[Tensor, Tensor]] = []

    def loss_fn(at: Tensor, rows: slice, *, entropy: Tensor, best_ids: Tensor) -> tuple[Tensor, Metrics]:
        seen.append((entropy, best_ids))
        return at.sum(), {}

    options = {"bias": bias, "temperature": 0.7, "chunk": chunk, **bend}
    loss, _ = fused_loss(hidden, weight, ids, loss_fn, best=3, entropy=True, **options)
    entropy, best = (torch.cat(parts) for parts in zip(*seen, strict=True))
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))
    torch.testing.assert_close(best, logp.topk(3, -1).indices)
    torch.testing.assert_close(loss, logp.gather(1, ids).sum())


def test_entropies_that_are_only_looked_at_change_no_gradient() -> None:
    hidden, weight, bias, ids = make()
    logp, entropy = logprobs_and_entropy_at(hidden, weight, ids, bias=bias)
    found = torch.autograd.grad(logp.square().sum(), (hidden, weight, bias), retain_graph=True)
    alone = torch.autograd.grad(logprobs_at(hidden, weight, ids, bias=bias).square().sum(), (hidden, weight, bias))
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs)
    full = dense(hidden, weight, bias, 1.0)
    expected = torch.autograd.grad(-(full.exp() * full).sum(), (hidden, weight, bias))
    for ours, theirs in zip(torch.autograd.grad(entropy.sum(), (hidden, weight, bias)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_bias_of_a_head_in_bfloat16_is_added_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*size).bfloat16() * 3 for size in ((8, 64), (512, 64), (512,)))
    found = dict[str, Tensor]()

    def keep(logp: Tensor, rows: slice, best_ids: Tensor) -> tuple[Tensor, Metrics]:
        found["logp"], found["best"] = logp.detach().clone(), best_ids
        return logp.sum() * 0, {}

    fused_loss(hidden, weight, None, keep, bias=bias, best=3)
    every = torch.arange(512).expand(8, -1)
    torch.testing.assert_close(found["logp"], logprobs_at(hidden, weight, every, bias=bias), rtol=0, atol=1e-5)
    torch.testing.assert_close(found["logp"].exp().sum(-1), torch.ones(8), rtol=0, atol=1e-5)
    assert torch.equal(found["best"], found["logp"].topk(3, -1).indices)


def test_fused_loss_ignores_padding_ids() -> None:
    hidden, weight, _, ids = make()
    ids[:, 2:] = -1

    def loss_fn(logp: Tensor, rows: slice) -> tuple[Tensor, Metrics]:
        return (logp * 2).sum(), {}

    loss, _ = fused_loss(hidden, weight, ids, loss_fn, chunk=40)
    expected = 2 * dense(hidden, weight, None, 1.0).gather(1, ids[:, :2]).sum()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_tied_weights_gather_both_gradients() -> None:
    """The same matrix as embedding and head, as small models have it."""
    _, weight, _, ids = make()
    tokens = torch.randint(0, V, (N,))
    logprobs_at(weight[tokens].tanh(), weight, ids, chunk=40).sum().backward()
    copy = weight.detach().clone().requires_grad_()
    dense(copy[tokens].tanh(), copy, None, 1.0).gather(1, ids).sum().backward()
    torch.testing.assert_close(weight.grad, copy.grad)


def test_low_precision_is_computed_in_float32_from_the_logits_on() -> None:
    hidden, weight, _, ids = make(torch.bfloat16)
    logp = logprobs_at(hidden, weight, ids)
    assert logp.dtype == torch.float32
    expected = (hidden @ weight.T).float().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(logp, expected)
    logp.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and hidden.grad.isfinite().all()


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    logp = logprobs_at(hidden, torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[0, 1], [0, 1]]))
    assert logp.tolist() == [[0.0, -20000.0], [-20000.0, 0.0]]
    logp.sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_low_precision_weights_are_summed_in_float32(fused: bool) -> None:
    """Thousands of rows in small tiles: rounded to bfloat16 after every tile, the sum would lose its small parts."""
    torch.manual_seed(0)
    hidden, weight = (torch.rand(4096, H) + 0.5).bfloat16(), torch.randn(V, H).bfloat16().requires_grad_()
    ids = torch.randint(0, V, (4096, 1))
    if fused:
        loss, _ = fused_loss(hidden, weight, ids, lambda logp, rows: (logp.sum(), {}), chunk=8 * V)
    else:
        loss = logprobs_at(hidden, weight, ids, chunk=8 * V).sum()
    (found,) = torch.autograd.grad(loss, weight)
    exact = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(dense(hidden.double(), exact, None, 1.0).gather(1, ids).sum(), exact)
    assert (found.double() - expected).abs().max() < 2**-7 * expected.abs().max()


def test_autocast_rounds_the_products_of_gradients_and_nothing_else() -> None:
    hidden, weight, _, ids = make(torch.float32)
    found = dict[bool, list[Tensor]]()
    for narrow in (False, True):
        own = [each.detach().clone().requires_grad_() for each in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss, _ = fused_loss(*own, ids, lambda logp, rows: (logp.square().sum(), {}), chunk=4 * V)
        loss.backward()
        found[narrow] = [loss.detach(), *(each.grad for each in own)]
    (exact, *wide), (same, *narrow) = found[False], found[True]
    assert exact == same
    for one, other in zip(wide, narrow, strict=True):
        assert other.dtype == torch.float32
        assert 0 < (other - one).norm() / one.norm() < 0.01


def test_a_bias_of_minus_infinity_is_probability_zero() -> None:
    """Tokens beyond the vocabulary, as padded vocabularies have them."""
    hidden, weight, _, ids = make()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[V - 1] = -torch.inf
    ids = ids.clamp(max=V - 2)
    logp, entropy = logprobs_and_entropy_at(hidden, weight, ids, bias=bias, chunk=40)
    short = dense(hidden, weight[:-1], None, 1.0)
    torch.testing.assert_close(logp, short.gather(1, ids))
    torch.testing.assert_close(entropy, -(short.exp() * short).sum(1))
    (gradient,) = torch.autograd.grad(logp.sum() + entropy.sum(), weight)
    assert gradient.isfinite().all() and (gradient[-1] == 0).all()


def test_ids_and_chunks_out_of_range_are_refused() -> None:
    hidden, weight, _, ids = make()
    with pytest.raises(ValueError, match="id 17 is outside the vocabulary of 17"):
        logprobs_at(hidden, weight, ids.clone().fill_(17))
    for chunk in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            logprobs_at(hidden, weight, ids, chunk=chunk)


def test_wrong_shapes_are_named() -> None:
    hidden, weight, bias, ids = make()
    with pytest.raises(ValueError, match=r"hidden \(11, 5\) and weight \(17, 4\)"):
        logprobs_at(hidden, weight[:, :4], ids)
    with pytest.raises(ValueError, match=r"ids \(3, 4\) must be \[N, M\]"):
        logprobs_at(hidden, weight, ids[:3])
    with pytest.raises(ValueError, match="bias"):
        logprobs_at(hidden, weight, ids, bias=bias[:3])
    with pytest.raises(ValueError, match="temperature"):
        logprobs_at(hidden, weight, ids, temperature=0.0)


def test_metrics_merge_by_their_names() -> None:
    into: Metrics = {}
    for a, b, c in [(1.0, 2.0, 3.0), (4.0, 1.0, 2.0)]:
        merge_metrics(into, {"x": torch.tensor(a), "x_max": torch.tensor(b), "x_min": torch.tensor(c)})
    assert {name: value.item() for name, value in into.items()} == {"x": 5.0, "x_max": 2.0, "x_min": 2.0}
