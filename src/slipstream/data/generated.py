"""Sources whose rows another package makes, in a child process: `reasoning_gym:NAME` and others.

Child processes have a fixed hash seed, so that a source has the same rows in every process.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from slipstream.children import STARTED, Child, first_message
from slipstream.config.integrations import fault_of, integration_of
from slipstream.errors import DataError
from slipstream.user_code import describe_error, file_of, load_object

GENERATED_ROWS = 2_000
"""Number of rows of a source if `data.limit` is not set."""
ROWS_PER_MESSAGE = 16
"""Number of rows in one message. Each may take as long as the start of a child."""


def serve(parent: Connection) -> None:
    """Send the rows that the parent asks for in chunks, then an empty chunk, or the error that ended them."""
    maker, source, split, count = first_message(parent)
    make = load_object(maker)
    parent.send(True)
    try:
        rows = make(source.partition(":")[2], split, count)
        while chunk := list(islice(rows, ROWS_PER_MESSAGE)):
            parent.send(chunk)
        parent.send([])
    except DataError as error:
        parent.send(DataError(f"{source}: {error}"))
    except Exception as error:  # the package of somebody else may raise anything
        parent.send(DataError(f"{source}: {describe_error(error, file_of(make))}"))


class RowMaker(Child):
    def __init__(self, source: str, split: str, count: int) -> None:
        integration = integration_of(source)
        assert integration is not None
        super().__init__("slipstream.data.generated", (integration.rows, source, split, count))
        self.source = source

    def lost(self, how: str, *, late: bool) -> Exception:
        return DataError(
            f"{self.source}: the process that makes its rows {'needs more than' if late else 'ends:'} {how}"
        )

    def chunk(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] | DataError = self.receive(STARTED)
        except TimeoutError:
            raise DataError(
                f"{self.source}: takes more than {STARTED:.0f} s to make {ROWS_PER_MESSAGE} rows: use another"
            ) from None
        except EOFError:
            raise self.lost(self.end(), late=False) from None
        if isinstance(found, DataError):
            raise found
        return found


def rows_of(source: str, split: str, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield pairs of place and row; raise DataError if the source cannot be used."""
    check_there(source)
    maker, number = RowMaker(source, split, count), 0
    try:
        maker.ready()
        while chunk := maker.chunk():
            for fields in chunk:
                yield f"{source}[{split}]:{(number := number + 1)}", fields
    finally:
        maker.close()


def check_there(source: str) -> None:
    """Raise DataError if the package of a source is not installed."""
    if fault := fault_of(source):
        raise DataError(f"{source}: {fault}")


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # the parent may end before its first message
        serve(Connection(int(sys.argv[1])))
