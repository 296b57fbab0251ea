"""Right answers that misbehave when they are read, to be sent to a real grading process."""

import os


class Endless:
    def __str__(self) -> str:
        while True:
            try:
                while True:
                    pass
            except Exception:  # as verifiers do, it goes on whatever happens
                pass


class Deadly:
    """Kills the process that compares it with an answer that begins with a full stop."""

    def __str__(self) -> str:
        os._exit(1)
