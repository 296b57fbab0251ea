"""A walk through the zoo: one family of each kind of attention and of memory. `make zoo` sees them all."""

import pytest

from support.slow_cases import with_slow
from zoo import families
from zoo.__main__ import BEGIN, PAGE
from zoo.trial import LIMIT, TRIALS, attempt

WALK = [
    "gpt_oss",  # sinks, windows, experts
    "deepseek_v3",  # latent attention: values of another size than keys
]
SLOW = [
    "falcon_h1",  # attention and state space in one layer
    "gemma2, small caps",
    "llama4_text",  # chunks, no positions in some layers
    "afmoe",
    "stablelm",  # hands no arguments on
    "cohere, norms",  # scaled logits
    "lfm2",
    "gemma4",  # a text model under a config of images and sounds
]


@pytest.mark.parametrize("name", with_slow([*WALK, *SLOW], quick=WALK))
def test_a_family_is_exact(name: str) -> None:
    model = families.make(name)
    for trial in ("generates", "packed", "padded", "adapters", "saved"):
        outcome = attempt(model, trial)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, str):
            assert trial == "packed" and "recurrent layers would carry one sequence into the next" in outcome
        else:
            assert outcome <= LIMIT[trial], trial


def marks() -> dict[str, dict[str, str]]:
    """Return the marks of the page's table, by family and trial."""
    rows = [
        line.split("|")[1:-1] for line in PAGE.read_text().partition(BEGIN)[2].splitlines() if line.startswith("| ")
    ]
    return {
        name.strip(): dict(zip(TRIALS, [cell.strip() for cell in cells], strict=True))
        for *cells, names in rows
        for name in names.split(";")
    }


def test_the_page_knows_every_family_of_these_transformers() -> None:
    page = PAGE.read_text().partition(BEGIN)[2]
    for name in families.names():
        assert any(f"{before}{name}{after}" in page for before in " *" for after in " ;,*"), name


@pytest.mark.parametrize("name", [*WALK, *SLOW])
def test_the_page_says_what_is_so(name: str) -> None:
    cells = marks()[name]
    assert cells["generates"] == cells["padded"] == "✓"
    outcome = attempt(families.make(name), "router")
    assert cells["router"] == ("" if outcome is None else "–" if isinstance(outcome, str) else "✓")
    assert cells["packed"] == ("–" if name in ("falcon_h1", "lfm2") else "✓")
