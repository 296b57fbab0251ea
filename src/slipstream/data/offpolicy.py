"""Decide which groups have responses that the student does not draw, and where these responses come from.

The origin of a group's responses depends only on the seed and the number of the group. So a run can resume at any
group, and no restart, delay or order of completion changes the origin.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

from slipstream.config.offpolicy import MixConfig
from slipstream.records import Given, Ints, Prompt, derive_seed


@dataclass(frozen=True)
class OffPolicy:
    """The origin of every group's responses, and the responses of the data and of a file, by the index of their row."""

    seed: int
    supervised: str
    """Origin of the responses of the supervised updates; empty without [sft]."""
    first: int
    """Number of groups of the supervised updates."""
    mix: MixConfig | None
    groups: int
    """Number of groups of one update."""
    updates: int
    """Number of updates after the supervised ones."""
    group: int
    """Number of responses of a group."""
    answers: Sequence[Given] = ()
    trajectories: Mapping[int, Sequence[Given]] = field(default_factory=dict)
    """Responses of the file of [mix]."""
    lessons: Mapping[int, Sequence[Given]] = field(default_factory=dict)
    """Responses of the file of [sft]."""

    def source(self, number: int) -> str:
        """Return the origin of a group outside of the supervised updates; empty if the student draws it.

        An update of B groups has share · B others on average: the integer part, and one more by chance. Which of the B
        groups these are is random, too. Dropped groups move later groups to earlier updates, but never change them.
        """
        update, place = divmod(number - self.first, self.groups)
        if self.mix is None or update < 0:
            return ""
        rng = random.Random(derive_seed(self.seed, "mix", update))
        others = floor(self.mix.share_at(update, self.updates) * self.groups + rng.random())
        return self.mix.source if place in rng.sample(range(self.groups), min(others, self.groups)) else ""

    def prefix(self, number: int, row: int, visits: int) -> Ints | None:
        """Return the start of a known response with which a mixed-in group of this row begins; None if it is empty."""
        assert self.mix is not None and self.mix.prefix is not None
        known = [self.answers[row]] if self.mix.source == "data" else self.trajectories[row]
        tokens = known[visits % len(known)].tokens
        share = self.mix.prefix * random.Random(derive_seed(self.seed, "prefix", number)).random()
        return tokens[: int(share * len(tokens))] if share * len(tokens) >= 1 else None

    @property
    def digest(self) -> str:
        """Return a hash of the responses that exist before the run; empty if there are none."""
        files = (self.trajectories, self.lessons)
        known = [*self.answers, *(given for file in files for index in sorted(file) for given in file[index])]
        found = hashlib.sha256()
        for given in known:
            found.update(len(given.tokens).to_bytes(8, "little"))
            found.update(given.tokens.tobytes())
            found.update(given.logp.tobytes())
        return found.hexdigest() if known else ""

    def responses(self, prompt: Prompt, row: int, visits: int) -> Sequence[Given]:
        """Return the known responses of a group: the answer of its row, or at each visit its next trajectories."""
        if prompt.source == "data":
            return [self.answers[row]]
        known = (self.lessons if prompt.supervised else self.trajectories)[row]
        size = min(self.group, len(known))
        return [known[(visits * size + index) % len(known)] for index in range(size)]
