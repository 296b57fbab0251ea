"""Cases of a parametrised test that only `make test-slow` runs, because CI proves the same on other cases."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Return all cases of one argument; those that are not in `quick` are marked as slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
