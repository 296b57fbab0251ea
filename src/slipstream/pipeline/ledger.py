"""What a run writes of itself: how every group ended, and a line of metrics for every update."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf

from slipstream.metrics import (
    ENDS,
    TREND,
    Metrics,
    lag_metrics,
    mean_lag,
    relabel_metrics,
    sample_metrics,
    trend,
    trust_metrics,
    usage,
)
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.restarts import Restarts
from slipstream.pipeline.trace import Trace
from slipstream.protocols import Quote, Weighed
from slipstream.records import Batch, Group, Header, Prompt
from slipstream.run_dir.writing import RunLog


class Account:
    def __init__(
        self, log: RunLog, trace: Trace, admission: Admission, restarts: Restarts, steered: Callable[[], Metrics]
    ) -> None:
        """`steered` is what guards and the like do to the update in hand."""
        self.log, self.trace, self.admission, self.restarts = log, trace, admission, restarts
        self.steered = steered
        self.thrown = round(log.last.get("thrown_tokens", 0))
        """Tokens of responses that were rolled out and not learned from."""
        self.failed_samples = round(log.last.get("failed_samples", 0))
        """Members that an engine could not answer, of groups that went on without them."""
        self.failures = Counter[str]({name: round(n) for name, n in log.last.items() if name.startswith("failed/")})
        """Of these, by the cause, where it was their environment's."""
        before = {name.partition("/")[2]: round(n) for name, n in log.last.items() if name.startswith("ungraded/")}
        self.unrewarded = Counter[str](before)
        """Members whose reward could not be had, by the cause; they are not learned from."""
        self.greedy_tokens = round(log.last.get("greedy_tokens", 0))
        """Tokens of greedy answers, of which only the rewards are used."""
        self.lengths = deque((line["length/mean"] for line in log.updates()), maxlen=TREND + ENDS)
        """Mean lengths of the last updates."""
        self.publish: Metrics = {}
        """Of the publish since the last update."""
        self.teachers: Metrics = {}
        """Of those that follow the student: which weights they run."""
        self.moves: Metrics = {}
        """How long they took to move, since the last update."""
        self.unusable, self.told = 0, set[str]()
        """Responses since the last update whose scores cannot be used, and the teachers of whom that was said."""
        self.causes: dict[int, list[str]] = {}
        """Why members were left out, of the groups that go on without."""
        self.redone: dict[int, str] = {}
        """Groups that were answered again, each with the worker whose answer could not be trusted."""
        self.again: list[float] = []
        """Of every group since the last update that was scored twice: how far the two answers are apart."""
        self.differed = 0
        """How many of these are apart by more than was promised."""
        self._tokens = Counter[str]()

    def trained(
        self, groups: Iterable[Group], *, update: int, version: int, size: int, weighed: Iterable[Weighed] = ()
    ) -> None:
        """`size` is how many members a group had when it was submitted."""
        worth = iter(weighed)
        self.log.ledger(*(
            {
                "number": group[0].header.number,
                "prompt": group[0].header.prompt,
                "end": "trained",
                "update": update,
                "version": version,
                **({"teacher_version": versions} if any(versions := versions_of(group)) else {}),
                "lag": [version - h.header.oldest if h.header.trained_tokens else 0 for h in group],
                "mean_lag": [round(mean_lag(handle.header, version), 4) for handle in group],
                "tokens": [handle.header.tokens for handle in group],
                "rewards": [handle.header.rewards for handle in group],
                **worth_of(list(islice(worth, len(group)))),
                **({"failed": missing} if (missing := _missing(group, size)) else {}),
                **({"causes": causes} if (causes := self.causes.pop(group[0].header.number, None)) else {}),
                **({"distrusted": who} if (who := self.redone.pop(group[0].header.number, "")) else {}),
            }
            for group in groups
        ))  # fmt: skip

    def failed(self, number: int, members: Iterable[Header], say: Callable[[str], None]) -> None:
        """Members that an engine could not answer end here; the first of each cause is told."""
        for header in members:
            if header.finish != "error":
                continue
            self.failed_samples += 1
            kinds = [name for name in header.outcome if name.startswith("failed/")]
            for kind in kinds:
                if kind not in self.failures:
                    say(f"an episode of {header.prompt} is left out: {header.cause}")
                self.failures[kind] += 1
            if kinds:
                self.causes.setdefault(number, []).append(header.cause)

    def ungraded(self, number: int, members: Iterable[Header], say: Callable[[str], None]) -> None:
        """Members of a group that was rolled out that have no reward end here; the first of each cause is told."""
        self.causes.pop(number, None)
        for header in members:
            if header.ungraded is None:
                continue
            if header.ungraded.cause not in self.unrewarded:
                say(f"an answer to {header.prompt} has no reward and is dropped: {header.ungraded.said}")
            self.unrewarded[header.ungraded.cause] += 1
            self.causes.setdefault(number, []).append(header.ungraded.said)

    def scored(self, group: Group, say: Callable[[str], None]) -> None:
        """What a scorer returned: members that failed there end here, and the first of each teacher is told."""
        failed = [handle.header for handle in group if handle.header.finish == "error"]
        self.unusable += len(failed)
        if len(failed) < len(group):  # else all of it is dropped, and counted there
            self.thrown += sum(header.tokens for header in failed)
        for header in failed:
            if header.teacher not in self.told:
                self.told.add(header.teacher)
                say(f"{header.cause}: this response to prompt {header.prompt} is left out, as all such will be")
            self.causes.setdefault(header.number, []).append(header.cause)

    def scored_again(self, group: Group, say: Callable[[str], None], *, promised: float) -> None:
        difference = max(inf if h.header.finish == "error" else h.header.differs for h in group)
        self.again.append(difference)
        if difference > promised:
            self.differed += 1
            header = group[0].header
            say(
                f"teacher {header.teacher} scored group {header.number} twice, and its log-probs are {difference:.2g} "
                f"apart (root mean square), {promised:g} is what rounding explains"
            )

    def dropped(self, prompt: Prompt, reason: str, cause: str = "") -> None:
        """`row` names file and line, where they are known and are not the id of the prompt."""
        self.causes.pop(prompt.number, None)
        self.redone.pop(prompt.number, None)
        entry = {"number": prompt.number, "prompt": prompt.id, "end": "dropped", "reason": reason}
        known = {"row": prompt.place if prompt.place != prompt.id else "", "cause": cause}
        self.log.ledger(entry | {"version": self.admission.version} | {name: of for name, of in known.items() if of})

    def published(self, numbers: Metrics) -> None:
        self.publish = numbers
        self.thrown += round(numbers.pop("thrown_tokens"))

    def evaluated(self, seconds: float) -> None:
        """After a publish, and before the learner may go on."""
        self.publish["seconds/eval"] = seconds

    def moved(self, teacher: str, version: int, seconds: float) -> None:
        """All scorers of a teacher run the weights that follow the student after this update."""
        self.teachers[f"teacher/{teacher}/version"] = float(version)
        self.moves[f"teacher/{teacher}/seconds/publish"] = seconds

    def quoted(self, quotes: Sequence[Quote], *, update: int) -> None:
        if quotes:
            self.log.samples(quotes, update=update)

    def updated(self, batch: Batch, numbers: Metrics, seconds: Metrics) -> Metrics:
        """At the end of an update: its metrics, and what everybody did since the end of the one before."""
        admission, samples, lately = self.admission, sample_metrics(batch.headers), self.trace.lately()
        wall = max(lately.seconds, 1e-9)
        self.lengths.append(samples["length/mean"])
        places = ("rolling", "waiting", "scoring", "ready")
        line = {
            **numbers,
            **samples,
            **trend(list(self.lengths)),
            **self._trust(batch),
            **relabel_metrics(batch.headers),
            **lag_metrics(batch.headers, batch.update - 1),
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "seconds/update": wall,
            "samples_per_s": samples["samples"] / wall,
            "tokens_per_s": samples["tokens"] / wall,
            **self.publish,
            **self.teachers,
            **self.moves,
            **usage(lately.busy, lately.stages, wall),
            **{f"tokens_per_s/{stage}": count / wall for stage, count in self._tokens_since().items()},
            **{f"groups/{place}": float(len(getattr(admission, place))) for place in places},
            "credits": float(admission.in_use),
            "dropped": float(admission.dropped.total()),
            **{f"dropped/{reason}": float(count) for reason, count in sorted(admission.dropped.items())},
            "restarted": float(admission.restarted),
            "thrown_tokens": float(self.thrown),
            "failed_samples": float(self.failed_samples),
            **{kind: float(count) for kind, count in sorted(self.failures.items())},
            **{f"ungraded/{cause}": float(count) for cause, count in sorted(self.unrewarded.items())},
            **({"greedy_tokens": float(self.greedy_tokens)} if self.greedy_tokens else {}),
            **self.restarts.metrics,
            **self.steered(),
            "version": float(batch.update),
            "time": self.trace.now(),
        }
        self.log.metrics("train", line, update=batch.update)
        self.publish, self.moves = {}, {}
        return line

    def _trust(self, batch: Batch) -> Metrics:
        found = trust_metrics(batch.headers)
        if found:
            found |= {
                "teacher/invalid": float(self.unusable),
                "teacher/rechecked": float(len(self.again)),
                "teacher/differed": float(self.differed),
                **({"teacher/recheck_max": max(known)} if (known := [x for x in self.again if x < inf]) else {}),
            }
        self.unusable, self.again, self.differed = 0, [], 0
        return found

    def _tokens_since(self) -> Counter[str]:
        tokens = Counter[str]()
        for track in self.trace.tracks:
            tokens[track.stage] += track.tokens
        found = Counter({stage: tokens[stage] - self._tokens[stage] for stage in tokens})
        self._tokens = tokens
        return found


def worth_of(weighed: Sequence[Weighed]) -> dict[str, list[float | None]]:
    """What freshness made of the members of a group, each a column; none where nothing is known."""
    names = ("f", "w", "roll", "sup", "roll_coverage", "sup_coverage")
    columns = {name: [getattr(each, name) for each in weighed] for name in names}
    return {name: [round(x, 6) if x < inf else None for x in column] for name, column in columns.items() if column}


def versions_of(group: Group) -> list[int]:
    """Of the weights that scored each member."""
    return [handle.header.teacher_version for handle in group]


def _missing(group: Group, size: int) -> list[int]:
    """The episodes that failed."""
    return sorted(set(range(size)) - {handle.header.episode for handle in group})
