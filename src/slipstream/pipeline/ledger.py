"""The ledger entries of a run (how each group ended) and its metrics line for each update."""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from slipstream.metrics import (
    TREND_UPDATES,
    Metrics,
    failed_shares,
    lag_metrics,
    mean_lag,
    off_policy_metrics,
    prefix_metrics,
    relabel_metrics,
    replacement_metrics,
    sample_metrics,
    spelling_metrics,
    trend,
    trust_metrics,
    usage,
)
from slipstream.pipeline.admission import Admission
from slipstream.pipeline.failures import Restarts
from slipstream.pipeline.trace import Trace
from slipstream.protocols import Quote, SampleFreshness
from slipstream.records import Batch, Group, Header, Prompt
from slipstream.run_dir.writing import RunLog

TOTALS = ("thrown_tokens", "refilled_tokens", "greedy_tokens", "failed_samples", "failed/", "ungraded/")
"""Names of the counts of a whole run, or their beginnings; `metric_names` describes each."""


class Ledger:
    def __init__(
        self,
        log: RunLog,
        trace: Trace,
        admission: Admission,
        restarts: Restarts,
        controllers: Callable[[], Metrics],
        traffic: Callable[[], Mapping[str, int]],
        devices: int,
        size: int,
        several_teachers: bool,
        notes: Mapping[str, Any],
    ) -> None:
        """Start or continue the records of a run; `controllers` returns metrics, `traffic` the bytes so far by path.

        `size` is the number of members of a complete group. `notes` are those of a checkpoint.
        """
        self.log, self.trace, self.admission, self.restarts = log, trace, admission, restarts
        self.controllers, self.traffic, self.devices, self.size = controllers, traffic, devices, size
        self.several_teachers = several_teachers
        self.counts = Counter[str]({name: round(n) for name, n in log.last.items() if name.startswith(TOTALS)})
        """Counts of the whole run by metric name."""
        self.failed_in = Counter[str]()
        """Number of failed members by environment, since the last update."""
        self.lengths = deque[float](maxlen=TREND_UPDATES)
        """Mean lengths of the last updates; without the first ones, in which only short responses had finished."""
        for line in log.lines("train"):
            self._note_length(line)
        self.publish: Metrics = {}
        """Metrics of the publish since the last update; empty if there was none."""
        self.teachers: Metrics = {}
        """Weights version of each teacher that follows the student, by metric name."""
        self.moves: Metrics = {}
        """Seconds that each such teacher took to load new weights since the last update, by metric name."""
        self.unusable, self.reported = Counter[str](), set[str]()
        """Unusable responses by teacher since teachers last had metrics, and the teachers already reported for it."""
        self.causes: dict[int, list[str]] = {int(number): each for number, each in notes.get("causes", {}).items()}
        """Causes of failed members, by the number of a group that is still in use."""
        self.redone: dict[int, str] = {int(number): worker for number, worker in notes.get("redone", {}).items()}
        """Worker whose answer was not trusted, by the number of the group that was answered again."""
        self.again: list[float] = []
        """Largest difference of the two scores of each group that was scored twice, since the last update."""
        self.differed = 0
        """Number of groups whose two scores differ by more than the teacher promises, since the last update."""
        self._tokens = Counter[str]()
        """Tokens of each stage until the last update."""
        self._traffic = Counter[str]()
        """Bytes of each path until the last update."""

    @property
    def notes(self) -> dict[str, Any]:
        """Known failures in groups that are still in use, for a checkpoint."""
        return {"causes": {number: [*each] for number, each in self.causes.items()}, "redone": {**self.redone}}

    def write_trained(
        self, ended: Iterable[tuple[Group, list[int]]], weighed: Mapping[tuple[int, int], SampleFreshness]
    ) -> None:
        """Write a ledger entry for each trained group, from the updates that learned from it; its lag is at the last.

        `weighed` has the freshness of samples in the update that was just made, by group number and index.
        """
        entries = list[dict[str, Any]]()
        for group, uses in ended:
            update, version = uses[-1], uses[-1] - 1
            headers = [handle.header for handle in group]
            number, teacher_versions = headers[0].number, [header.teacher_version for header in headers]
            optional = {
                "source": headers[0].source,
                "prefix": headers[0].prefix,
                "teacher_version": teacher_versions if any(teacher_versions) else [],
                **freshness_columns([weighed[h.number, h.index] for h in headers if (h.number, h.index) in weighed]),
                "uses": uses if len(uses) > 1 else [],
                "failed": sorted(
                    set(range(0 if headers[0].source in ("data", "file") else self.size)) - {h.episode for h in headers}
                ),
                "causes": self.causes.pop(number, []),
                "distrusted": self.redone.pop(number, ""),
            }
            entry = {
                "number": number,
                "prompt": headers[0].prompt,
                "end": "trained",
                "update": update,
                "version": version,
                **lag_columns(headers, version),
                "tokens": [header.tokens for header in headers],
                "rewards": [header.rewards for header in headers],
            }
            entries.append(entry | {name: value for name, value in optional.items() if value})
        self.log.ledger(*entries)

    def reuse_metrics(self, headers: Sequence[Header], new: Container[int]) -> Metrics:
        """Return the share of samples and the tokens of an update that are new, and the store's size; {} without it."""
        if self.admission.schedule.reuse is None:
            return {}
        fresh = [header for header in headers if header.number in new]
        tokens = float(sum(header.tokens for header in fresh))
        store = self.admission.store.metrics
        return {"reuse/share": 1 - len(fresh) / len(headers), "reuse/new_tokens": tokens, **store}

    def count_failed(self, number: int, members: Iterable[Header], say: Callable[[str], None]) -> None:
        """Count the members that an engine failed to answer; report the first failure of each kind."""
        for header in members:
            if header.finish != "error":
                continue
            self.counts["failed_samples"] += 1
            kinds = [name for name in header.outcome if name.startswith("failed/")]
            for kind in kinds:
                if kind not in self.counts:
                    say(f"an episode of {header.prompt} is left out: {header.cause}")
                self.counts[kind] += 1
            if kinds:
                self.failed_in[header.environment] += 1
                self.causes.setdefault(number, []).append(header.cause)

    def count_ungraded(self, number: int, members: Iterable[Header], say: Callable[[str], None]) -> None:
        """Count the members of a rolled-out group whose grading failed; report the first failure of each cause."""
        self.causes.pop(number, None)
        for header in members:
            if header.ungraded is None:
                continue
            if (name := f"ungraded/{header.ungraded.cause}") not in self.counts:
                say(f"an answer to {header.prompt} has no reward and is dropped: {header.ungraded.text}")
            self.counts[name] += 1
            self.counts["thrown_tokens"] += header.tokens
            self.failed_in[header.environment] += 1
            self.causes.setdefault(number, []).append(header.ungraded.text)

    def count_unscored(self, group: Group, say: Callable[[str], None]) -> None:
        """Count the members that could not be scored; report only the first failure of each teacher."""
        failed = [handle.header for handle in group if handle.header.finish == "error"]
        self.unusable.update(header.teacher for header in failed)
        if len(failed) < len(group):  # else the whole group is dropped, and `Groups.discard` counts its tokens
            self.counts["thrown_tokens"] += sum(header.tokens for header in failed)
        for header in failed:
            if header.teacher not in self.reported:
                self.reported.add(header.teacher)
                say(f"{header.cause}: this response to prompt {header.prompt} is left out, and later ones silently")
            self.causes.setdefault(header.number, []).append(header.cause)

    def count_recheck(self, group: Group, say: Callable[[str], None], *, promised: float) -> None:
        difference = max(inf if h.header.finish == "error" else h.header.differs for h in group)
        self.again.append(difference)
        if difference > promised:
            self.differed += 1
            header = group[0].header
            say(
                f"teacher {header.teacher} scored group {header.number} twice, and its log-probs are {difference:.2g} "
                f"apart (root mean square); rounding explains at most {promised:g}"
            )

    def write_dropped(self, prompt: Prompt, reason: str, cause: str = "") -> None:
        """Write the ledger entry of a dropped group; omit `row` (file and line) if it is unknown or the prompt's id."""
        self.causes.pop(prompt.number, None)
        self.redone.pop(prompt.number, None)
        entry = {"number": prompt.number, "prompt": prompt.id, "end": "dropped", "reason": reason}
        known = {"row": prompt.place if prompt.place != prompt.id else "", "cause": cause}
        self.log.ledger(entry | {"version": self.admission.version} | {name: v for name, v in known.items() if v})

    def add_publish(self, numbers: Metrics) -> None:
        self.publish = numbers
        self.counts["thrown_tokens"] += round(numbers.pop("thrown_tokens"))

    def add_evaluation(self, seconds: float) -> None:
        """Record the duration of the evaluation after a publish, for which the learner waited."""
        self.publish["seconds/eval"] = seconds

    def add_move(self, teacher: str, version: int, seconds: float) -> None:
        """Record that all scorers of a teacher have the weights of update `version`, after `seconds` of publishing."""
        self.teachers[f"teacher/{teacher}/version"] = float(version)
        self.moves[f"teacher/{teacher}/seconds/publish"] = seconds

    def write_samples(self, quotes: Sequence[Quote], *, update: int) -> None:
        if quotes:
            self.log.samples(quotes, update=update)

    def _note_length(self, line: Metrics) -> None:
        if line["lag/max"] < line["update"] - self.admission.supervised - 1:
            self.lengths.append(line["length/mean"])

    @property
    def totals(self) -> Metrics:
        """Counts of the whole run until now."""
        counts = {name: float(count) for name, count in sorted(self.counts.items()) if count}
        return {"thrown_tokens": 0.0, "failed_samples": 0.0, **counts, **self.restarts.metrics}

    def write_update(self, batch: Batch, numbers: Metrics, seconds: Metrics) -> Metrics:
        """Write and return the metrics of an update, including how long each worker was busy since the last update."""
        admission, window = self.admission, self.trace.busy_window()
        samples = sample_metrics(batch.headers, several_teachers=self.several_teachers)
        wall = max(window.seconds, 1e-9)
        tokens = Counter[str]()
        for track in self.trace.tracks:
            tokens[track.stage] += track.tokens
        before, self._tokens = self._tokens, tokens
        earlier, self._traffic = self._traffic, Counter(self.traffic())
        lags = lag_metrics(batch.headers, batch.update - 1)
        self._note_length({"update": batch.update, **samples, **lags})
        places = ("rolling", "waiting", "scoring", "ready")
        line = {
            **numbers,
            **samples,
            **failed_shares(batch.headers, self.failed_in),
            **trend(list(self.lengths)),
            **self._trust(batch),
            **relabel_metrics(batch.headers),
            **spelling_metrics(batch.headers),
            **off_policy_metrics(batch.headers),
            **prefix_metrics(batch.headers),
            **replacement_metrics(batch.headers),
            **({"sft": float(batch.update <= admission.supervised)} if admission.supervised else {}),
            **lags,
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "seconds/update": wall,
            "samples_per_s": samples["samples"] / wall,
            "tokens_per_s": samples["tokens"] / wall,
            "tokens_per_s/device": samples["tokens"] / wall / self.devices,
            **{f"bytes/{path}": float(count - earlier[path]) for path, count in self._traffic.items()},
            **self.publish,
            **self.teachers,
            **self.moves,
            **usage(window.busy, window.stages, wall),
            **{f"tokens_per_s/{stage}": (count - before[stage]) / wall for stage, count in tokens.items()},
            **{f"groups/{place}": float(len(getattr(admission, place))) for place in places},
            "credits": float(admission.in_use),
            "dropped": float(admission.dropped.total()),
            **{f"dropped/{reason}": float(count) for reason, count in sorted(admission.dropped.items())},
            "restarted": float(admission.restarted),
            **self.totals,
            **self.controllers(),
            "version": float(batch.update),
            "time": self.trace.now(),
        }
        self.log.metrics("train", line, update=batch.update)
        self.publish, self.moves = {}, {}
        self.failed_in.clear()
        return line

    def _trust(self, batch: Batch) -> Metrics:
        found = trust_metrics(batch.headers, several_teachers=self.several_teachers)
        if found:
            found |= {
                "teacher/invalid": float(self.unusable.total()),
                "teacher/rechecked": float(len(self.again)),
                "teacher/differed": float(self.differed),
                **({"teacher/recheck_max": max(known)} if (known := [x for x in self.again if x < inf]) else {}),
            }
            if self.several_teachers:
                names = ({header.teacher for header in batch.headers} | self.unusable.keys()) - {""}
                found |= {f"teacher/{name}/invalid": float(self.unusable[name]) for name in sorted(names)}
            self.unusable, self.again, self.differed = Counter(), [], 0
        return found


def lag_columns(headers: Sequence[Header], version: int) -> dict[str, list[float]]:
    """Return the lag columns of a group; empty if the student drew no token of it, so that there is no lag."""
    if headers[0].source:
        return {}
    return {
        "lag": [version - header.oldest if header.trained_tokens else 0 for header in headers],
        "mean_lag": [round(mean_lag(header, version), 4) for header in headers],
    }


def freshness_columns(weighed: Sequence[SampleFreshness]) -> dict[str, list[float | None]]:
    """Return the freshness columns of a group, one value per member; None for unknown values."""
    names = ("f", "w", "roll", "sup", "roll_coverage", "sup_coverage")
    columns = {name: [getattr(each, name) for each in weighed] for name in names}
    return {name: [round(x, 6) if x < inf else None for x in column] for name, column in columns.items() if column}
