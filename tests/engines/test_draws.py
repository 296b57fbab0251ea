"""Which token is drawn: the random numbers, the processed distribution, and the inversion."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.draws import draw, process, uniforms
from slipstream.errors import NonFiniteError
from slipstream.protocols import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]], dtype=torch.float64)


def test_uniforms_are_a_pure_function_of_seed_position_and_column() -> None:
    seeds, positions = torch.tensor([7, 8, 7]), torch.tensor([0, 0, 5])
    together = uniforms(seeds, positions, 4)
    for row in range(3):
        alone = uniforms(seeds[row : row + 1], positions[row : row + 1], 9)
        assert torch.equal(alone[0, :4], together[row]), "neither neighbours nor the number of draws may matter"
    assert len(torch.unique(together)) == 12


def test_uniforms_are_splitmix64_in_unsigned_arithmetic() -> None:
    """The same hash in Python's integers: int64 tensors must wrap and shift as uint64 does."""
    word = (1 << 64) - 1

    def scramble(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        return x ^ x >> 31

    for seed, position, column in [(0, 0, 0), (123, 4, 1), (2**63 - 1, 10_000, 15)]:
        state = scramble(seed + 0x9E3779B97F4A7C15 * (position + 1) & word)
        expected = (scramble(state + 0x9E3779B97F4A7C15 * (column + 1) & word) >> 12) / 2**52
        assert uniforms(torch.tensor([seed]), torch.tensor([position]), column + 1)[0, column].item() == expected


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds = torch.arange(2000)
    u = uniforms(seeds, torch.zeros_like(seeds), 8).numpy()
    assert u.min() >= 0 and u.max() < 1
    counts, _ = np.histogram(u, bins=20, range=(0, 1))
    expected = u.size / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8, "chi-square, 19 degrees of freedom, p = 0.001"
    assert np.abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.09


def test_draws_have_exactly_the_probabilities_of_the_distribution() -> None:
    """The unit interval on a fine grid falls into the tokens in proportion to their probabilities."""
    logp = LOGITS.log_softmax(-1)
    n = 100_000
    grid = (torch.arange(n, dtype=torch.float64) + 0.5)[None] / n
    ids, found = draw(logp, grid)
    share = torch.bincount(ids[0], minlength=5) / n
    torch.testing.assert_close(share.double(), logp[0].exp(), atol=2 / n, rtol=0)
    assert torch.equal(found, logp.gather(1, ids))


def test_draw_never_lands_on_a_token_that_was_cut() -> None:
    logp = torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]]).log_softmax(-1)
    edge = torch.tensor([[0.0, 0.5, 1 - 2.0**-52]], dtype=torch.float64)
    assert draw(logp, edge)[0].tolist() == [[1, 3, 3]]


def test_draw_leaves_its_input_alone() -> None:
    logp = LOGITS.log_softmax(-1)
    before = logp.clone()
    draw(logp, torch.tensor([[0.3]], dtype=torch.float64))
    assert torch.equal(logp, before)


def reference(sampling: Sampling) -> np.ndarray:
    """The processed distribution, token by token and in plain words."""
    p = np.exp(LOGITS[0].numpy() / sampling.temperature)
    p /= p.sum()
    if sampling.min_p:
        p[p < sampling.min_p * p.max()] = 0
        p /= p.sum()
    if sampling.top_k:
        p[p < np.sort(p)[-sampling.top_k]] = 0
        p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for i in np.argsort(-p):
        if mass < sampling.top_p:
            kept[i] = p[i]
        mass += p[i]
    return kept / kept.sum()


@given(
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.6, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 5, 9]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_processed_distribution_matches_its_definition(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    top_k_known = min(top_k, 5)
    sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected = reference(Sampling(1, temperature=temperature, top_p=top_p, top_k=top_k_known, min_p=min_p))
    np.testing.assert_allclose(process(LOGITS, sampling).exp()[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("row", [[float("nan"), 1.0, 0.0], [-torch.inf] * 3, [1.0, torch.inf, 0.0]], ids=str)
def test_logits_that_are_not_finite_are_an_error_however_a_token_is_drawn(row: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.5, 2.0, -torch.inf], row])
    with pytest.raises(NonFiniteError, match="the student's logits are not finite: has training diverged"):
        draw(process(logits, Sampling(max_tokens=1, temperature=temperature)), torch.full((2, 1), 0.5))


def test_of_equally_likely_tokens_no_more_than_top_k_are_kept() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5, 0.5, 0.5, -1.0], [1.0] * 7])
    kept = process(logits, Sampling(max_tokens=1, top_k=4)) > -torch.inf
    assert kept.sum(-1).tolist() == [4, 4] and kept[0, :3].all() and kept[0, 3:6].sum() == 1
    few = process(logits, Sampling(max_tokens=1, top_k=4, min_p=0.5)) > -torch.inf
    assert few.sum(-1).tolist() == [1, 4]


def test_a_greedy_token_is_drawn_where_others_are_cut() -> None:
    logp = process(torch.tensor([[-torch.inf, 2.0, -torch.inf]]), Sampling(max_tokens=1, temperature=0))
    ids, found = draw(logp, torch.full((1, 1), 0.5))
    assert ids.tolist() == [[1]] and found.tolist() == [[0.0]]


def test_temperature_zero_is_greedy_with_certainty() -> None:
    logp = process(LOGITS, Sampling(max_tokens=1, temperature=0))
    ids, found = draw(logp, torch.tensor([[0.0, 0.99]], dtype=torch.float64))
    assert ids.tolist() == [[0, 0]] and found.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_processed_in_float32(dtype: torch.dtype) -> None:
    assert process(LOGITS.to(dtype), Sampling(max_tokens=1)).dtype == torch.float32
