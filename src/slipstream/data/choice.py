"""The prompt of every submission number: by a fixed order, or by what earlier answers have shown.

Checkpoints hold the row of every group in flight: these groups keep their prompts if a resumed run changes the order.
An adaptive choice is a function of the seed, the number, and the state in this module. The state changes only when an
update is finished, except for the numbers that were submitted since. So a `sync` run is reproducible, and a checkpoint
with this state resumes exactly.
"""

from collections.abc import Container, Mapping
from typing import Any, Literal

import numpy as np

from slipstream.data.prompts import Prompts
from slipstream.metrics import Metrics
from slipstream.records import Group, Prompt, derive_seed


class Choice:
    """Prompts by submission number in the order of `Prompts`, which no answer changes."""

    def __init__(self, prompts: Prompts, before: Mapping[str, Any] | None = None) -> None:
        """Begin a run, or continue from the state `before`, which counts only for the same prompts."""
        self.prompts = prompts
        self.before = before if before and before["prompts"] == prompts.digest else {}
        self.chosen = {int(number): int(row) for number, row in self.before.get("chosen", {}).items()}
        """Row of every group that is in flight or was submitted since the last update, by number."""

    @property
    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"prompts": self.prompts.digest, "chosen": dict(self.chosen)}

    @property
    def metrics(self) -> Metrics:
        return {}

    def source(self, number: int) -> str:
        """Return the mixture component of a group that is being submitted; called once for every number, in order."""
        self.chosen[number] = self._next(number)
        return self.prompts.component(self.chosen[number], number)

    def _next(self, number: int) -> int:
        return self.prompts.order.at(number)

    def prompt(self, number: int) -> Prompt:
        return self.prompts.row(self.row(number), number)

    def row(self, number: int) -> int:
        """Return the row of a group; groups of checkpoints without rows had the fixed order."""
        return self.chosen[number] if number in self.chosen else self.prompts.order.at(number)

    def difficulty(self, number: int) -> float:
        """Return 1 minus the mean reward of earlier answers to a group's prompt; 1 if rewards are not measured."""
        return 1.0

    def note(self, group: Group) -> None:
        """Remember what the answers of an ended group show about its prompt."""

    def update(self, live: Container[int]) -> None:
        """Let later choices see all noted groups; `live` contains the groups that have not ended."""
        self.chosen = {number: row for number, row in self.chosen.items() if number in live}


class AdaptiveChoice(Choice):
    """Draw prompts with a weight that depends on the answers so far.

    weight_by = "reward": p·(1 − p), with p the mean reward of the prompt, each reward limited to 0 … 1.
    weight_by = "kl": the mean KL per token to the teacher. A prompt counts as if one more answer had shown the prior:
    p = ½, or the mean KL of all prompts. Earlier answers count half as much after every `half_life` updates, so
    estimates return to the prior.

    A prompt is drawn with probability u / R + (1 − u) · weight / sum of weights, for R rows of its source and
    u = `uniform_share`. Prompts that were chosen for a group in flight, or since the last update, are left out while
    there are others. So every other prompt is drawn within R / u draws from its source, in expectation.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        weight_by: Literal["reward", "kl"],
        reward: str,
        half_life: float,
        uniform_share: float,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin without any answers, or continue from the state `before`; `reward` names the reward to use."""
        super().__init__(prompts, before)
        self.weight_by, self.reward = weight_by, reward
        self.half_life, self.uniform_share = half_life, uniform_share
        self.sums, self.counts = np.zeros(len(prompts.rows)), np.zeros(len(prompts.rows))
        """Discounted sum of the values that answers to each row have shown, and discounted number of these answers."""
        noted = self.before.get("noted", {})
        self.noted: dict[int, tuple[float, int]] = {int(number): (x, k) for number, (x, k) in noted.items()}
        """Sum of values and number of answers of the groups that ended since the last update, by number."""
        for row, (value, count) in self.before.get("seen", {}).items():
            self.sums[int(row)], self.counts[int(row)] = value, count
        self._weigh()

    @property
    def state(self) -> dict[str, Any]:
        seen = {int(row): (float(self.sums[row]), float(self.counts[row])) for row in np.flatnonzero(self.counts)}
        return super().state | {"noted": dict(self.noted), "seen": seen}

    @property
    def metrics(self) -> Metrics:
        effective = float(self.weights.sum() ** 2 / max((self.weights**2).sum(), 1e-300))
        return {"prompts/tried": float((self.counts > 0).sum()), "prompts/effective": effective}

    def _next(self, number: int) -> int:
        source, _ = self.prompts.order.place(number)
        rows = np.array(self.prompts.order.orders[source].rows)
        free = ~np.isin(rows, list(self.chosen.values()))
        rows = rows[free] if free.any() else rows
        weights = self.weights[rows]
        total = weights.sum()
        share = self.uniform_share
        odds = np.cumsum((1 - share) * weights / total + share / len(rows) if total else np.ones(len(rows)))
        drawn = derive_seed(self.prompts.seed, "choice", number) / 2**63 * odds[-1]
        return int(rows[min(int(np.searchsorted(odds, drawn, side="right")), len(rows) - 1)])

    def difficulty(self, number: int) -> float:
        return 1.0 - float(self.level[self.row(number)]) if self.weight_by == "reward" else 1.0

    def note(self, group: Group) -> None:
        if group[0].header.source or group[0].header.prefix:  # the student did not draw a whole answer
            return
        headers = {handle.header.episode: handle.header for handle in group}.values()
        if self.weight_by == "reward":
            values = [min(max(header.rewards[self.reward], 0.0), 1.0) for header in headers]
        else:
            values = [header.gap / header.compared_tokens for header in headers if header.compared_tokens]
        self.noted[group[0].header.number] = sum(values), len(values)

    def update(self, live: Container[int]) -> None:
        fade = 0.5 ** (1 / self.half_life)
        self.sums, self.counts = self.sums * fade, self.counts * fade
        for number in sorted(self.noted):  # sorted, so that rounding does not depend on the order in which groups end
            value, count = self.noted[number]
            self.sums[self.row(number)] += value
            self.counts[self.row(number)] += count
        self.noted = {}
        super().update(live)
        self._weigh()

    def _weigh(self) -> None:
        seen = self.counts.sum()
        prior = 0.5 if self.weight_by == "reward" else self.sums.sum() / seen if seen else 1.0
        self.level = level = (self.sums + prior) / (self.counts + 1)
        """Estimate of each row's mean reward or KL."""
        self.weights = level * (1 - level) if self.weight_by == "reward" else np.maximum(level, 0.0)
