"""Experts that the learner's passes use: chosen freely, or replayed from the records or from the old policy's pass.

A sample has a row of choices for each of its tokens before the last one, in the prompt and in the response: all passes
that its log-probs depend on. Rows that no record has are chosen freely.

Shapes: T flat tokens of rows, R routers, X chosen experts, E experts, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engines.native.learning.gradient_cosine import Key
from slipstream.engines.native.routers import FREE, Choices, Routers, experts_of_record, together
from slipstream.engines.native.rows import Rows
from slipstream.objective.sample_weights import key_of
from slipstream.records import Ints, Scored


class Routing:
    def __init__(self, routers: Routers, mode: str, *, keeps_logits: bool) -> None:
        self.routers, self.mode, self.keeps_logits = routers, mode, keeps_logits
        self.old: dict[Key, Ints] = {}
        """With "replay_old", the choices of the old policy for the samples of this update."""

    def choices(self, rows: Rows, samples: Sequence[Scored], *, replays: bool) -> Choices:
        """Return the choices to use in a pass over rows of these samples, which are in the order of the rows."""
        given_TRX = None
        if replays and self.mode == "replay_rollout":
            given_TRX = self._recorded(rows, samples)
        if replays and self.mode == "replay_old":
            given_TRX = self._table(rows, [self.old.get(key_of(sample)) for sample in samples])
        return Choices(self.routers, given_TRX, keeps_logits=self.keeps_logits and torch.is_grad_enabled())

    def _table(self, rows: Rows, known: Sequence[Ints | None]) -> Tensor | None:
        """Return the choices of all samples at the tokens of the rows, FREE where unknown; None if all are unknown."""
        if all(each is None for each in known):
            return None
        shape = rows.ids_RL.numel(), len(self.routers.modules), self.routers.chosen
        found_TRX = np.full(shape, FREE, np.int16)
        for at, each in zip(rows.inputs(), known, strict=True):
            if each is not None:
                found_TRX[at] = each
        return torch.from_numpy(found_TRX).to(rows.ids_RL.device)

    def _recorded(self, rows: Rows, samples: Sequence[Scored]) -> Tensor | None:
        return self._table(rows, [experts_of_record(sample.rollout) for sample in samples])

    def used(self, rows: Rows) -> Iterator[Ints]:
        """Yield for each sample of rows the experts that the pass has used, a row for each token before the last."""
        assert rows.choices is not None
        used_TRX = together(rows.choices.used).short().cpu().numpy()
        yield from (used_TRX[at] for at in rows.inputs())

    def flips(self, rows: Rows, samples: Sequence[Scored]) -> dict[str, Tensor]:
        """Count pairs of a trained token and a router, and those whose experts differ between sampler and learner."""
        table_TRX = self._recorded(rows, samples)
        if table_TRX is None or rows.choices is None:
            return {}
        own_NRX, drawn_NRX = (x[rows.predict_N].sort(-1).values for x in (together(rows.choices.own), table_TRX.long()))
        known_NR = (drawn_NRX != FREE).all(-1)
        differ_NR = (own_NRX != drawn_NRX.to(own_NRX)).any(-1) & known_NR
        return {"router/flips": differ_NR.sum().double(), PAIRS: known_NR.sum().double()}


PAIRS = "router/pairs"
"""Divisor of router/flips among the sums of a step; no metric."""
