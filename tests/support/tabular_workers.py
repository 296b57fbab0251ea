"""Builders of tabular engines, which workers of any runtime can import."""

from typing import Any

from slipstream.protocols import GradingSampler
from support import tabular_engines as toy

VOCAB = 6


class ToyRollouts(GradingSampler):
    def __init__(self) -> None:
        super().__init__(toy.ToySampler(toy.random_table(VOCAB, seed=0)), toy.ToyGrader())


class EndlessRollouts(GradingSampler):
    """No response ends before its limit."""

    def __init__(self) -> None:
        table = toy.random_table(VOCAB, seed=0)
        table[:, toy.EOS] = -1e9
        super().__init__(toy.ToySampler(table), toy.ToyGrader())


def toy_scorer() -> Any:
    return toy.ToyScorer(toy.random_table(VOCAB, seed=1, scale=2.0))


def toy_learner() -> Any:
    return toy.ToyLearner(toy.random_table(VOCAB, seed=0))
