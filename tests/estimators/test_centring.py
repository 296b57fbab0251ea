"""Score centering, by enumeration of every draw of a small vocabulary: what it removes, and what it leaves."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.estimators.centring import centre_of_draws, centre_of_support, centre_of_top_k
from slipstream.estimators.correction import truncate
from slipstream.estimators.policy import policy_loss

V, M = 5, 3
DTYPE = torch.float64
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": torch.ones_like,
    "whole": lambda ratio: ratio,
    "truncated": lambda ratio: truncate(ratio, 1.1),
    "icepop": lambda ratio: truncate(ratio, (0.3, 3.0)),
}


def policies(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return log-probs of the current policy and of the one that drew, which is far from it."""
    generator = torch.Generator().manual_seed(seed)
    current, drew = torch.randn(2, V, generator=generator, dtype=DTYPE)
    return current.log_softmax(-1), drew.log_softmax(-1)


def score(logp_V: Tensor) -> Tensor:
    """Return ∇log p of every token, by the logits, [V, V]."""
    return torch.eye(V, dtype=DTYPE) - logp_V.exp()


def all_draws(logp_V: Tensor, drew_V: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ids of every possible row of draws, [M], and its probability."""
    for ids in product(range(V), repeat=M):
        ids_M = torch.tensor(ids)
        yield ids_M, drew_V[ids_M].sum().exp()


def centred(logp_V: Tensor, drew_V: Tensor, weigh: Callable[[Tensor], Tensor], ids_M: Tensor) -> Tensor:
    """Return the gradient w_a s_a − μ̂ of one row of draws, [V]."""
    coefficient_M = centre_of_draws(logp_V[ids_M][None], drew_V[ids_M][None], weigh)[0]
    emitted = ids_M[0]
    weight = weigh((logp_V - drew_V).exp())[emitted]
    return weight * score(logp_V)[emitted] - coefficient_M @ score(logp_V)[ids_M]


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_advantage_that_all_tokens_share_teaches_nothing(name: str) -> None:
    logp_V, drew_V = policies()
    weigh = WEIGHTS[name]
    mean_V = sum(chance * centred(logp_V, drew_V, weigh, ids_M) for ids_M, chance in all_draws(logp_V, drew_V))
    torch.testing.assert_close(mean_V, torch.zeros(V, dtype=DTYPE), rtol=0, atol=1e-12)
    weight_V = weigh((logp_V - drew_V).exp())
    drift_V = (drew_V.exp() * weight_V) @ score(logp_V)
    assert (drift_V.norm() < 1e-12) == (name == "whole"), "without centering it teaches, unless the weights are whole"


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_constant_added_to_the_advantages_changes_no_expected_gradient(name: str) -> None:
    logp_V, drew_V = policies(1)
    advantage_V = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=DTYPE)
    weigh, means = WEIGHTS[name], list[Tensor]()
    for constant in (0.0, 7.0):
        rows = all_draws(logp_V, drew_V)
        each = [p * (advantage_V[ids[0]] + constant) * centred(logp_V, drew_V, weigh, ids) for ids, p in rows]
        means.append(torch.stack(each).sum(0))
    torch.testing.assert_close(*means, rtol=0, atol=1e-11)


def test_whole_weights_need_no_centre() -> None:
    logp_V, drew_V = policies(2)
    advantage_V, weigh = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0], dtype=DTYPE), WEIGHTS["whole"]
    rows = all_draws(logp_V, drew_V)
    mean_V = sum(p * advantage_V[ids[0]] * centred(logp_V, drew_V, weigh, ids) for ids, p in rows)
    torch.testing.assert_close(mean_V, (logp_V.exp() * advantage_V) @ score(logp_V))
    coefficient_V = centre_of_top_k(logp_V[None], drew_V[None], weigh)[0, 1:]
    torch.testing.assert_close(coefficient_V @ score(logp_V), torch.zeros(V, dtype=DTYPE), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_centre_of_draws_has_the_mean_of_the_exact_one_and_a_variance_of_one_over_its_draws(name: str) -> None:
    logp_V, drew_V = policies(3)
    weigh = WEIGHTS[name]
    exact_V = (drew_V.exp() * weigh((logp_V - drew_V).exp())) @ score(logp_V)
    variance = []
    for m in (2, 3):
        mean_V, square = torch.zeros(V, dtype=DTYPE), torch.zeros((), dtype=DTYPE)
        for ids in product(range(V), repeat=m):
            ids_M = torch.tensor(ids)
            coefficient_M = centre_of_draws(logp_V[ids_M][None], drew_V[ids_M][None], weigh)[0]
            assert coefficient_M[0] == 0, "a token is not its own baseline"
            centre_V, chance = coefficient_M @ score(logp_V)[ids_M], drew_V[ids_M].sum().exp()
            mean_V, square = mean_V + chance * centre_V, square + chance * (centre_V - exact_V).square().sum()
        torch.testing.assert_close(mean_V, exact_V)
        variance.append(square)
    torch.testing.assert_close(variance[0] / variance[1], torch.tensor(2.0, dtype=DTYPE))


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_centre_of_the_most_likely_tokens_is_exact_if_they_are_all_or_the_others_keep_their_proportions(
    name: str,
) -> None:
    logp_V, drew_V = policies(4)
    weigh = WEIGHTS[name]
    exact_V = (drew_V.exp() * weigh((logp_V - drew_V).exp())) @ score(logp_V)
    coefficient_V = centre_of_top_k(logp_V[None], drew_V[None], weigh)[0]
    assert coefficient_V[0] == 0
    torch.testing.assert_close(coefficient_V[1:] @ score(logp_V), exact_V)
    best_K = drew_V.topk(3).indices
    rest_V = ~one_hot(best_K, V).sum(0).bool()
    p_V, q_V = logp_V.exp(), drew_V.exp()
    q_V = torch.where(rest_V, p_V * q_V[rest_V].sum() / p_V[rest_V].sum(), q_V)
    exact_V = (q_V * weigh(p_V / q_V)) @ score(logp_V)
    coefficient_K = centre_of_top_k(logp_V[best_K][None], q_V.log()[best_K][None], weigh)[0, 1:]
    torch.testing.assert_close(coefficient_K @ score(logp_V)[best_K], exact_V)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_centre_of_the_support_is_exact_and_ignores_what_could_not_be_drawn(name: str) -> None:
    logits_V, drew_V = policies(5)
    weigh, outside_V = WEIGHTS[name], torch.tensor([False, True, False, False, True])
    p_V, q_V = (each.masked_fill(outside_V, -torch.inf).softmax(-1) for each in (logits_V, drew_V))
    q_K, p_K, logits_K = (each_V[~outside_V] for each_V in (q_V, p_V, logits_V))
    exact = (q_K * weigh(p_K / q_K) * (logits_K - logits_K.logsumexp(-1))).sum()
    on_support_V = logits_V - logits_V[~outside_V].logsumexp(-1)  # finite outside, as the learner computes it
    coefficient_V = centre_of_support(on_support_V[None], q_V.log()[None], weigh)[0]
    assert coefficient_V[0] == 0 and not coefficient_V[1:][outside_V].any()
    torch.testing.assert_close(coefficient_V[1:] @ on_support_V, exact)


def test_most_likely_tokens_without_a_rest_have_no_tail() -> None:
    logp_V, drew_V = torch.tensor([[0.9, 0.1 - 1e-8]]).log(), torch.tensor([[0.5, 0.4]]).log()
    found = centre_of_top_k(logp_V, drew_V, torch.ones_like)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 0.4]], dtype=DTYPE), rtol=1e-6, atol=0)


def test_the_loss_is_the_weighted_one_and_the_centre_times_the_advantage() -> None:
    generator = torch.Generator().manual_seed(0)
    logp_BT, centre_BT = -torch.rand(2, 2, 3, generator=generator, dtype=DTYPE)
    advantage_BT, weights_BT = torch.randn(2, 2, 3, generator=generator, dtype=DTYPE)
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss, metrics = policy_loss(
        "reinforce", logp_BT, logp_BT, advantage_BT, mask_BT, weights=weights_BT, centre=centre_BT
    )
    each_BT = -advantage_BT * (weights_BT * logp_BT - centre_BT) * mask_BT
    torch.testing.assert_close(loss, each_BT.sum() / 5)
    torch.testing.assert_close(metrics["centred"], (advantage_BT * centre_BT * mask_BT).sum() / 5)
    with pytest.raises(ValueError, match="vanilla has a ratio: score centering is for losses without"):
        policy_loss("vanilla", logp_BT, logp_BT, advantage_BT, mask_BT, centre=centre_BT)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_centre_of_the_most_likely_tokens_errs_at_most_by_the_mass_of_the_others(name: str) -> None:
    """In any proportions of the others: no score is longer than √2, and no weight larger than the largest."""
    for seed in range(20):
        logp_V, drew_V = policies(seed)
        best_K, weigh = drew_V.topk(3).indices, WEIGHTS[name]
        weight_V = weigh((logp_V - drew_V).exp())
        exact_V = (drew_V.exp() * weight_V) @ score(logp_V)
        coefficient_K = centre_of_top_k(logp_V[best_K][None], drew_V[best_K][None], weigh)[0, 1:]
        rest = 1 - drew_V[best_K].exp().sum()
        mean_of_rest = weigh((1 - logp_V[best_K].exp().sum()) / rest)
        most = max(float(weight_V.max()), float(mean_of_rest))
        error = (coefficient_K @ score(logp_V)[best_K] - exact_V).norm()
        assert error <= 2 * 2**0.5 * most * rest
