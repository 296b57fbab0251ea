"""Cost of the start of a program in a sandbox: behind bubblewrap, in a session of it, without isolation, by URL.

python benchmarks/sandbox.py [--repeats 30]
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from slipstream.sandbox import sandbox_of
from slipstream.sandbox.base import Ran, Sandbox, Session, run_python
from support.sandbox_server import FakeSandboxFusion


async def measured(name: str, call: Callable[[], Awaitable[Ran]], repeats: int) -> None:
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        ran = await call()
        times.append(1e3 * (time.perf_counter() - began))
        assert ran.status == "ok", ran
    times = times[1:]  # what the first one read from disk, others need not
    print(f"{name:28} median {statistics.median(times):6.1f} ms   [{min(times):.1f} … {max(times):.1f}]")


async def programs(name: str, where: Sandbox | Session, repeats: int) -> None:
    await measured(f"{name}: true", lambda: where.run(["true"]), repeats)
    await measured(f"{name}: python, pass", lambda: run_python(where, "pass"), repeats)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    bubblewrap = sandbox_of("bubblewrap")
    await programs("bubblewrap", bubblewrap, repeats)
    began = time.perf_counter()
    session = await bubblewrap.session()
    print(f"{'a session':28} {1e3 * (time.perf_counter() - began):13.1f} ms")
    await programs("in a session", session, repeats)
    await session.close()
    await programs("none", sandbox_of("none"), repeats)
    with FakeSandboxFusion(bubblewrap) as fake:
        remote = sandbox_of(fake.url)
        await programs("by URL, on loopback", remote, repeats)
        await remote.close()


if __name__ == "__main__":
    asyncio.run(main())
