"""Kill and stop the processes of a real run: `python tests/chaos.py --job tools --faults 100`.

`slipstream train` learns while its processes are killed (SIGKILL) and stopped (SIGSTOP): engines, graders, hosts of
environments, the launcher, and the coordinator, after whose death `slipstream resume` goes on. `--job` says what is
trained: `arithmetic`, `tools` (the same in an environment with tools), `scale` (arithmetic while `slipstream scale`
changes the number of workers) or `ranks` (arithmetic with two learner ranks). At the end the laws are checked and
printed, one line for each. The accuracy is compared with that of a run without faults. `test_chaos.py` runs short
stories of this kind; `make chaos` runs long ones. The seed decides at which update each fault comes, so the same seed
gives the same faults. Which process has made how much progress by then differs from run to run.
"""

import argparse
import getpass
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, RunDirError
from slipstream.pipeline.checkpoint import Checkpoints
from slipstream.run_dir.writing import read_lines
from slipstream.runs.control_socket import scale
from support.coordinators import Coordinators, below, semaphores

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
VICTIMS = {
    "local": ("coordinator", "launcher", "learner", "sampler", "scorer", "grader"),
    "ray": ("coordinator", "actor", "grader"),
}
HEARTBEAT, EVERY, TAU, GROUPS, PROMPTS = 5.0, 3, 2, 16, 400
DEATHS = 10
"""Kills of the coordinator in a whole trial, unless fewer faults are asked for."""
TORCH = f"torchinductor_{getpass.getuser()}"
"""The cache of all programs that import torch's compiler; it is empty."""
LATE = 600.0
"""Seconds in which a run must have come to its next update, whatever happened to it."""
ARITHMETIC = {"student": "student", "teacher": "teacher", "data": "arithmetic", "tokens": 48, "environment": ""}
TOOLS = {
    "student": "tool_student",
    "teacher": "tool_teacher",
    "data": "table",
    "tokens": 192,
    "environment": '[environment]\nuse = "table"\ncalls = 10\nturns = 12\nprocesses = 2',
}
CONFIG = f"""
student = "builtin:{{student}}"
updates = {{updates}}
seed = {{seed}}
output = "run"
[data]
train = "builtin:{{data}}"
eval = "builtin:{{data}}"
[teachers.main]
model = "builtin:{{teacher}}"
{{environment}}
[sampler]
max_tokens = {{tokens}}
replicas = 2
[schedule]
kind = "async"
tau = {TAU}
order = "submission"
[loss]
m = 32
[learner]
batch_size = {GROUPS}
ranks = {{ranks}}
lr = 1e-3
warmup = 10
decay = "cosine"
[task]
reward = "exact"
timeout = 2
[eval]
every = {{updates}}
prompts = {{prompts}}
[checkpoint]
every = {EVERY}
[runtime]
kind = "{{kind}}"
restarts = 1000
heartbeat = {HEARTBEAT}
"""


@dataclass(frozen=True)
class Job:
    """A run's training task, and the processes that may be killed."""

    task: dict[str, Any]
    ranks: int = 1
    victims: tuple[str, ...] = ()
    """Kinds of processes that only this job has."""
    scales: bool = False
    """True: the number of samplers and scorers changes during the run."""

    def struck(self, kind: str) -> tuple[str, ...]:
        return (*VICTIMS[kind], *self.victims)


JOBS = {
    "arithmetic": Job(ARITHMETIC),
    "tools": Job(TOOLS, victims=("environment",)),
    "scale": Job(ARITHMETIC, scales=True),
    "ranks": Job(ARITHMETIC, ranks=2),
}


@dataclass(frozen=True)
class Fault:
    update: int
    victim: str
    how: signal.Signals
    which: float
    """Choice among several processes, and moment within the update, from 0 to 1."""

    def __str__(self) -> str:
        return f"after update {self.update}: {self.how.name} to {self.victim}"


@dataclass(frozen=True)
class Change:
    """A request of `slipstream scale`."""

    update: int
    asked: tuple[str, ...]

    def __str__(self) -> str:
        return f"after update {self.update}: scale {' '.join(self.asked)}"


def drawn(
    seed: int, faults: int, updates: int, victims: Sequence[str] = VICTIMS["local"], deaths: int = 0
) -> list[Fault]:
    """Draw faults in the order in which they come, none before the first checkpoint. At least so many `deaths` are
    kills of the coordinator."""
    r = random.Random(seed)
    when = sorted(r.randint(EVERY + 1, updates - 1) for _ in range(faults))
    found = [Fault(update, r.choice(victims), r.choice([KILL, STOP]), r.random()) for update in when]
    for place in r.sample(range(faults), min(deaths, faults)):
        found[place] = replace(found[place], victim="coordinator", how=KILL)
    return found


def changes(seed: int, updates: int) -> list[Change]:
    """Draw another number of samplers and of scorers for every third update."""
    r = random.Random(f"{seed} changes")
    when = range(EVERY + 1, updates - 2, 3)
    return [Change(at, (f"sampler={r.randint(1, 4)}", f"teacher.main={r.randint(1, 3)}")) for at in when]


class Chaos:
    def __init__(
        self,
        home: Path,
        *,
        seed: int,
        updates: int,
        say: Callable[[str], None],
        prompts: int = PROMPTS,
        kind: str = "local",
        job: str = "arithmetic",
    ) -> None:
        """`prompts` are held out, to measure the student."""
        self.home, self.run, self.updates, self.say = home, home / "run", updates, say
        home.mkdir(parents=True, exist_ok=True)
        self.job = JOBS[job]
        made = {"updates": updates, "seed": seed, "prompts": prompts, "kind": kind, "ranks": self.job.ranks}
        (home / "run.toml").write_text(CONFIG.format(**made, **self.job.task))
        self.coordinators, self.pid = Coordinators(home), 0
        self.shared, self.said, self.left = set[str](), "", list[str]()
        self.parts = 0
        self.struck = Counter[tuple[str, str]]()
        """Faults that hit a process, by victim and signal."""
        self.changed, self.unchanged = 0, 0
        """Changes of the number of workers that the run took, and that came too late for it."""

    def live(self, story: Sequence[Fault | Change]) -> int:
        """Run it to its end; returns the exit status of the last part."""
        try:
            self.pid = self.coordinators.train()
            for event in sorted(story, key=lambda each: each.update):
                if not self.reached(event.update):
                    self.say(f"{event}: the run has ended")
                elif isinstance(event, Change):
                    self.change(event)
                else:
                    time.sleep(event.which / 2)
                    self.strike(event)
            self.reached(self.updates + 1)
            return self.ended()
        finally:
            self.coordinators.close()

    def change(self, change: Change) -> None:
        """Ask until the run answers: one that was just resumed is still starting."""
        until = time.monotonic() + LATE
        while time.monotonic() < until and not gone(self.pid):
            try:
                scale(self.run, change.asked)
            except (ConfigError, RunDirError) as error:
                if "ending" in str(error):
                    break
                assert "starting" in str(error) or isinstance(error, RunDirError), error
                time.sleep(0.1)
            else:
                self.changed += 1
                self.say(str(change))
                return
        assert time.monotonic() < until, f"the run has not answered in {LATE:.0f} s"
        self.unchanged += 1
        self.say(f"{change}: the run is ending")

    def strike(self, fault: Fault) -> None:
        victim = self.found(fault)
        if victim is None:
            self.say(f"{fault}: the run has ended")
            return
        self.shared |= semaphores_of(self.processes())
        os.kill(victim, fault.how)
        self.struck[fault.victim, fault.how.name] += 1
        self.say(f"{fault} (pid {victim})")
        if fault.victim == "coordinator":
            if fault.how == STOP:
                time.sleep(2 * HEARTBEAT * fault.which)
                os.kill(victim, signal.SIGCONT)
            else:
                self.go_on(self.ended(), -KILL)

    def go_on(self, status: int, expected: int) -> None:
        assert status == expected, f"exit status {status}: {self.said[-2000:]}"
        self.pid = self.coordinators.resume()

    def ended(self) -> int:
        """The exit status; what the part said and has left is kept."""
        status, left = self.coordinators.ask("")
        self.parts += 1
        self.said += self.coordinators.output()
        self.left += left
        self.left += [str(path) for path in self.coordinators.temporary.iterdir() if path.name != TORCH]
        return int(status)

    # --- where it is ---------------------------------------------------------------------------------------------

    def reached(self, update: int) -> bool:
        """Wait for the end of an update, and for a checkpoint; false if the run ends before."""
        until = time.monotonic() + LATE
        metrics = self.run / "metrics.jsonl"
        while time.monotonic() < until:
            if gone(self.pid):
                return False
            made = sum(1 for line in read_lines(metrics) if line["kind"] == "train") if metrics.exists() else 0
            if made >= update and Checkpoints(self.run / "checkpoints").existing():
                return True
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGQUIT)
        time.sleep(1)
        raise AssertionError(f"update {update} has not come in {LATE:.0f} s\n{self.coordinators.output()[-3000:]}")

    def processes(self) -> dict[int, str]:
        """Return the processes of the run by number, with their names."""
        found = {self.pid: "coordinator"}
        for pid in found.copy():
            found |= dict(named(pid))
        return found

    def found(self, fault: Fault) -> int | None:
        """Return the process to kill; wait for one that is being started again."""
        until = time.monotonic() + LATE
        while time.monotonic() < until and not gone(self.pid):
            these = sorted(pid for pid, name in self.processes().items() if name.startswith(fault.victim))
            if these:
                return these[int(fault.which * len(these))]
            time.sleep(0.05)
        assert gone(self.pid), f"there is no {fault.victim}"
        return None

    # --- the laws ------------------------------------------------------------------------------------------------

    def laws(self, status: int) -> Iterator[tuple[str, bool, str]]:
        """The name of each, whether it holds, and what was found."""
        yield "the run ends well", status == 0 and (self.run / "final").exists(), f"exit status {status}"
        lines = [line for line in read_lines(self.run / "metrics.jsonl") if line["kind"] == "train"]
        ledger = read_lines(self.run / "ledger.jsonl")
        numbers = sorted(entry["number"] for entry in ledger)
        trained = [entry for entry in ledger if entry["end"] == "trained"]
        once = numbers == list(range(len(numbers))) and len(trained) == self.updates * GROUPS
        yield "every group ends once", once, f"{len(numbers)} groups, {len(trained)} of them trained on"
        updates = [line["update"] for line in lines]
        yield "every update is made once", updates == list(range(1, self.updates + 1)), f"{len(updates)} updates"
        lags = [lag for entry in trained for lag in entry["lag"]]
        late = [entry for entry in trained if max(entry["lag"]) > min(TAU, entry["update"] - 1)]
        yield f"no lag is above {TAU}", min(lags) >= 0 and not late, f"{max(lags)} at most"
        yield "no process and no temporary file is left", not self.left, ", ".join(self.left) or "after any part"
        shared = sorted(name for name in self.shared if Path(name).exists())
        yield "no shared memory is left", not shared, ", ".join(shared) or f"of {len(self.shared)} names"
        words = ("Traceback", "never awaited", "was destroyed", "never retrieved")
        said = next(
            (self.said[max(0, self.said.index(word) - 500) :][:3000] for word in words if word in self.said), ""
        )
        yield "nothing is said that a user need not read", not said, said or f"in {self.parts} parts"
        if self.job.scales:
            yield "the number of workers is changed whenever asked", self.changed > 0, f"{self.changed} times"

    @property
    def deaths(self) -> int:
        """Kills of the coordinator. `reached` waits for a checkpoint first, so all come after the first one."""
        return self.struck["coordinator", KILL.name]

    @property
    def accuracy(self) -> float:
        found = [line for line in read_lines(self.run / "metrics.jsonl") if line["kind"] == "eval"]
        return float(found[-1]["accuracy"])


def semaphores_of(processes: dict[int, str]) -> set[str]:
    found = set[str]()
    for pid in processes:
        try:
            found |= semaphores(pid)
        except OSError:  # it has ended meanwhile
            continue
    return found


def gone(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def named(coordinator: int) -> Iterator[tuple[int, str]]:
    """Yield all processes below a coordinator: engines by the names of their processes, and what samplers start as
    graders or environments."""

    def children(pid: int, parent: str) -> Iterator[tuple[int, str]]:
        try:
            for child in below(pid):
                name = Path(f"/proc/{child}/comm").read_text().strip()
                name = "actor" if name.startswith("ray::Actor") else name
                if parent.startswith(("sampler", "actor")):
                    command = Path(f"/proc/{child}/cmdline").read_text()
                    name = "environment" if "slipstream.environments" in command else "grader"
                yield child, name
                yield from children(child, name)
        except OSError:  # it has ended meanwhile
            return

    return children(coordinator, "coordinator")


def compared(disturbed: float, left_in_peace: float) -> tuple[str, bool, str]:
    """Four standard errors of a difference between two answers to so many prompts."""
    middle = min(max((disturbed + left_in_peace) / 2, 0.05), 0.95)
    noise = 4 * sqrt(2 * middle * (1 - middle) / PROMPTS)
    said = f"{disturbed:.1%}, and {left_in_peace:.1%} in peace (noise: {noise:.1%})"
    return "the student is as good", abs(disturbed - left_in_peace) <= noise, said


@contextmanager
def somewhere(keep: bool) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="slipstream-chaos-"))
    try:
        yield place
    except BaseException:
        print(f"all of it is in {place}")
        raise
    if keep:
        print(f"all of it is in {place}")
    else:
        shutil.rmtree(place)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--job", choices=JOBS, default="arithmetic", help="what is trained")
    options.add_argument("--faults", type=int, default=100)
    options.add_argument(
        "--deaths", type=int, default=DEATHS, help=f"faults that kill the coordinator, at the least: {DEATHS}"
    )
    options.add_argument("--updates", type=int, help="of the run: three for every fault, unless told otherwise")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--runtime", choices=VICTIMS, default="local")
    options.add_argument("--only", nargs="+", metavar="VICTIM", help="processes that are struck; all without it")
    options.add_argument("--keep", action="store_true", help="the run directories")
    given: Any = options.parse_args()
    job, updates = JOBS[given.job], given.updates or max(30, 3 * given.faults)
    victims = given.only or job.struck(given.runtime)
    deaths = min(given.deaths, given.faults) if "coordinator" in victims else 0
    story = [*drawn(given.seed, given.faults, updates, victims, deaths)]
    asked = changes(given.seed, updates) if job.scales else []
    again = f"python tests/chaos.py --job {given.job} --faults {given.faults} --deaths {given.deaths}"
    again += f" --updates {updates} --seed {given.seed} --runtime {given.runtime}"
    again += f" --only {' '.join(given.only)}" if given.only else ""
    try:
        with somewhere(given.keep) as place:
            made = {"seed": given.seed, "updates": updates, "kind": given.runtime, "job": given.job}
            peace = Chaos(place / "peace", **made, say=print)
            assert peace.live([]) == 0, peace.said
            began = time.monotonic()
            chaos = Chaos(
                place / "chaos",
                **made,
                say=lambda line: print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True),
            )
            laws = [*chaos.laws(chaos.live([*story, *asked])), compared(chaos.accuracy, peace.accuracy)]
            took = time.monotonic() - began
            found = f"{chaos.deaths} after the first checkpoint, at least {deaths} were asked for"
            laws.append(("the coordinator died often enough", chaos.deaths >= deaths, found))
            print(f"{chaos.struck.total()} faults in {took:.0f} s:")
            for (victim, how), count in sorted(chaos.struck.items()):
                print(f"  {count:3} {how} to {victim}")
            if job.scales:
                print(f"  {chaos.changed} changes of the number of workers, {chaos.unchanged} too late")
            for name, holds, said in laws:
                print(f"{'holds' if holds else 'BROKEN'}: {name}: {said}")
            broken = [name for name, holds, _ in laws if not holds]
            assert not broken, f"{len(broken)} laws are broken"
    except BaseException:
        print(f"once more: {again}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
