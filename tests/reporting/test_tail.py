"""A file that somebody else writes is read once, whatever happens to it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RunDirError
from slipstream.reporting.terminal.watch import PROOF, Tail


def lines_of(*numbers: int, pad: int = 0) -> bytes:
    return b"".join(json.dumps({"n": n, "pad": "x" * pad}).encode() + b"\n" for n in numbers)


def numbers(tail: Tail) -> tuple[bool, list[int]]:
    anew, lines = tail.look()
    return anew, [line["n"] for line in lines]


@given(cuts=st.lists(st.integers(0, 600), max_size=12), zeros=st.booleans())
def test_every_line_is_told_once_and_whole_however_it_comes(
    cuts: list[int], zeros: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where zeros stand for what a network disk has not brought yet, and what comes after it is there."""
    path = tmp_path_factory.mktemp("tail") / "a.jsonl"
    data = lines_of(*range(30), pad=3)
    tail, found = Tail(path), list[int]()
    for cut in sorted({*cuts, len(data)}):
        hole = len(data) - cut if zeros else 0
        path.write_bytes(data[:cut] + b"\0" * min(hole, 40) + data[cut + min(hole, 40) :][:hole])
        anew, new = numbers(tail)
        assert not anew
        found += new
        assert found == list(range(data[:cut].count(b"\n")))
    assert found == list(range(30))


@given(
    first=st.integers(0, 40),
    kept=st.integers(0, 40),
    added=st.integers(0, 40),
    pad=st.sampled_from([0, 3 * PROOF]),
    looked=st.booleans(),
)
def test_a_file_that_was_cut_and_written_on_is_told_from_the_beginning(
    first: int, kept: int, added: int, pad: int, looked: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also when it has grown past the place up to which it was read before anybody looked."""
    path = tmp_path_factory.mktemp("tail") / "a.jsonl"
    path.write_bytes(lines_of(*range(first), pad=pad))
    tail = Tail(path)
    assert numbers(tail) == (False, list(range(first)))
    kept = min(kept, first)
    after = [*range(kept), *range(100, 100 + added)]
    with path.open("r+b") as file:
        file.truncate(len(lines_of(*range(kept), pad=pad)))
        if looked:
            assert numbers(tail) == ((kept < first), list(range(kept)) if kept < first else [])
        file.seek(0, 2)
        file.write(lines_of(*after[kept:], pad=pad))
    if looked or kept == first:
        assert numbers(tail) == (False, after[kept:])
    else:
        assert numbers(tail) == (True, after)
    assert numbers(tail) == (False, [])


def test_another_file_in_its_place_is_told_and_so_is_none(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    tail = Tail(path)
    assert numbers(tail) == (False, [])
    path.write_bytes(lines_of(1, 2))
    assert numbers(tail) == (False, [1, 2])
    other.write_bytes(lines_of(1, 2, 3))
    other.replace(path)
    assert numbers(tail) == (True, [1, 2, 3])
    path.unlink()
    assert numbers(tail) == (True, [])
    assert numbers(tail) == (False, [])


@pytest.mark.parametrize("back", [0, 1, 20, 21, 22, 41, 42, 43, 209, 210, 211])
def test_of_a_long_file_the_end_is_read_from_a_line_on(tmp_path: Path, back: int) -> None:
    """Never from the middle of one; and what comes after is read from there on."""
    path, every = tmp_path / "a", range(10, 20)
    path.write_bytes(lines_of(*every))
    length = len(lines_of(10))
    assert length == 21
    tail = Tail(path, back=back)
    whole = min(back // length, len(every))
    assert numbers(tail) == (False, list(every)[len(every) - whole :])
    with path.open("ab") as file:
        file.write(lines_of(20))
    assert numbers(tail) == (False, [20])


def test_a_look_at_what_did_not_grow_reads_next_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(lines_of(*range(1000)))
    tail = Tail(path)
    tail.look()
    assert (tail.at, len(tail.proof)) == (path.stat().st_size, PROOF)


def test_a_line_that_is_no_json_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b'{"n": 1}\n{"n": \n')
    with pytest.raises(RunDirError, match=r"a is damaged: Expecting value"):
        Tail(path).look()
    with pytest.raises(RunDirError, match=r" cannot be read: "):
        Tail(tmp_path).look()
