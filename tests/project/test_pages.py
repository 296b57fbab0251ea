"""Pages of the documentation that are made from the code say what the code says."""

import pytest

import pages


@pytest.mark.parametrize("name", pages.pages())
def test_a_generated_page_is_the_one_that_the_code_makes(name: str) -> None:
    assert (pages.DOCS / name).read_text("utf-8") == pages.pages()[name], "run python tools/pages.py"
