"""The metrics of a run: pure functions from sample headers and times to numbers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb, sqrt
from statistics import fmean
from typing import Any

from slipstream.metric_names import extreme
from slipstream.records import Header

Metrics = dict[str, float]
Interval = tuple[float, float]
Workers = dict[str, list[Interval]]
"""Busy intervals of each worker of a stage."""
WARMUP = 5
"""Number of first updates that averages over a run leave out."""
NO_ADVANTAGE = "no advantage"
"""Reason in the ledger for groups whose rewards are all alike, and which policy.refill replaced."""
STAGE_ENDED = "supervised stage ended"
"""Reason in the ledger for groups in flight when a supervised update passed the bound sft.until."""
INTENDED = (f"dropped/{NO_ADVANTAGE}", f"dropped/{STAGE_ENDED}")
"""Metrics of groups that were dropped because the config asks for it."""
WINDOW = 10
"""Number of updates in a mean: of a reward that may collapse, and of each length that a trend compares."""
COLLAPSED, COLLAPSE_LASTS, LOWEST_PEAK = 0.7, 100, 0.05
"""Collapse of a reward: the mean of WINDOW updates is at most COLLAPSED of its best, for COLLAPSE_LASTS updates or to
the end. A best mean below LOWEST_PEAK cannot fall."""
TREND_UPDATES = 100 + WINDOW
"""Number of updates of a trend, which compares the lengths of the first and the last WINDOW of them."""


def lag_metrics(headers: Iterable[Header], version: int) -> Metrics:
    """Return mean, maximum and histogram of the lags of trained tokens: learner's `version` minus token's version."""
    lags: Counter[int] = Counter()
    for header in drawn_by_student(headers):
        for made_at, count in header.versions:
            lags[version - made_at] += count
    tokens = lags.total()
    histogram = {f"lag/tokens_{lag}": float(count) for lag, count in sorted(lags.items()) if count}
    mean = sum(lag * count for lag, count in lags.items()) / max(tokens, 1)
    return {"lag/mean": mean, "lag/max": float(max((lag for lag in lags if lags[lag]), default=0)), **histogram}


def drawn_by_student(headers: Iterable[Header]) -> list[Header]:
    return [header for header in headers if not header.source]


def off_policy_metrics(headers: Sequence[Header]) -> Metrics:
    """Return the shares of trained tokens that the student did not draw, by their origin; {} if it drew all."""
    if not any(header.source for header in headers):
        return {}
    tokens = Counter[str]()
    for header in headers:
        tokens[header.source] += header.trained_tokens
    total = max(tokens.total(), 1)
    return {f"off_policy/{source}": count / total for source, count in sorted(tokens.items()) if source}


def prefix_metrics(headers: Sequence[Header]) -> Metrics:
    """Return the share of the responses' tokens that were given to the student as prefixes; {} if there are none."""
    given = sum(header.prefix for header in headers)
    return {"mix/prefix": given / sum(header.tokens for header in headers)} if given else {}


def replacement_metrics(headers: Sequence[Header]) -> Metrics:
    """Return the share of tokens that the teacher replaced while the student drew; {} if it was not asked."""
    asked = [header for header in headers if header.replaced is not None]
    replaced = sum(header.replaced or 0 for header in asked)
    return {"sampler/replaced": replaced / max(sum(header.trained_tokens for header in asked), 1)} if asked else {}


def mean_lag(header: Header, version: int) -> float:
    return sum((version - made_at) * count for made_at, count in header.versions) / max(header.trained_tokens, 1)


def sample_metrics(headers: Sequence[Header], *, several_teachers: bool = False) -> Metrics:
    """Return metrics of samples and episodes; an episode's reward counts once, even with branches.

    With several teachers in a run, those in the headers have numbers of their own, also if only one is there.
    """
    episodes = {(header.number, header.episode): header for header in drawn_by_student(headers)}.values()
    lengths = [header.tokens for header in headers]
    numbers: Metrics = {
        "samples": float(len(headers)),
        "tokens": float(sum(lengths)),
        "length/mean": fmean(lengths),
        "length/max": float(max(lengths)),
        "truncated": fmean(header.finish == "length" for header in headers),
    }
    by_teacher = Counter[str]()
    for header in headers:
        by_teacher[header.teacher] += header.tokens
    if several_teachers or len(by_teacher) > 1:
        numbers |= {f"teacher/{name}/tokens": float(count) for name, count in sorted(by_teacher.items())}
    if own := drawn_by_student(headers):
        numbers["student/repeated"] = fmean(header.repeated for header in own)
        numbers["student/distinct"] = fmean(header.distinct for header in own)
    rewards = means_where_reported((header.environment, header.rewards) for header in episodes)
    return (
        numbers
        | {f"reward/{name}": mean for name, mean in rewards.items()}
        | episode_metrics(headers, several_teachers)
    )


def means_where_reported(found: Iterable[tuple[str, Mapping[str, float]]]) -> Metrics:
    """Return means of named numbers over episodes, each with its environment.

    A number counts in environments that report it, and is 0 for those of their episodes that do not.
    """
    episodes, reporting = list(found), dict[str, set[str]]()
    for environment, numbers in episodes:
        for name in numbers:
            reporting.setdefault(name, set()).add(environment)
    return {
        name: fmean(numbers.get(name, 0.0) for environment, numbers in episodes if environment in environments)
        for name, environments in sorted(reporting.items())
    }


EPISODE_COUNTS = ("turns", "calls", "failed", "looped", "premature", "seconds", "failures", "branches", "crashed")
"""Counts of each episode that are reported as means."""
EPISODE_LIMITS = {"out_of_turns": "turns", "out_of_time": "time"}
"""Finish reason of an episode that reached a limit other than length, by metric name."""
OWN_COUNTS = "own/"
"""Prefix of the counts that an environment defines itself."""


def episode_metrics(headers: Sequence[Header], several_teachers: bool = False) -> Metrics:
    episodes = list({(h.number, h.episode): h for h in headers if "turns" in h.outcome}.values())
    if not episodes:
        return {}
    numbers = {f"episode/{name}": fmean(h.outcome.get(name, 0.0) for h in episodes) for name in EPISODE_COUNTS}
    outcomes = means_where_reported((header.environment, header.outcome) for header in episodes)
    own = {
        f"environment/{name.removeprefix(OWN_COUNTS)}": mean
        for name, mean in outcomes.items()
        if name.startswith(OWN_COUNTS)
    }
    teachers = sorted({header.teacher for header in episodes})
    for name in teachers if several_teachers or len(teachers) > 1 else ():
        its = (header.outcome.get("calls", 0.0) for header in episodes if header.teacher == name)
        numbers[f"teacher/{name}/calls"] = fmean(its)
    return {
        **numbers,
        "episode/invalid": fmean(h.outcome.get("invalid", 0.0) > 0 for h in episodes),
        "episode/observed": 1 - sum(h.trained_tokens for h in headers) / sum(h.tokens for h in headers),
        **{f"episode/{limit}": fmean(h.finish == end for h in episodes) for limit, end in EPISODE_LIMITS.items()},
        **own,
        **by_environment(episodes),
    }


def by_environment(episodes: Iterable[Header]) -> Metrics:
    """Return number, turns and rewards of the episodes of each environment; {} unless environments have names."""
    numbers, named = Metrics(), dict[str, list[Header]]()
    for header in episodes:
        named.setdefault(header.environment, []).append(header)
    for environment, own in sorted(named.items()) if "" not in named else ():
        prefix = f"environments/{environment}"
        numbers |= {
            f"{prefix}/episodes": float(len(own)),
            f"{prefix}/turns": fmean(header.outcome["turns"] for header in own),
        }
        for name in sorted({name for header in own for name in header.rewards}):
            numbers[f"{prefix}/reward/{name}"] = fmean(header.rewards.get(name, 0.0) for header in own)
    return numbers


def failed_shares(headers: Iterable[Header], failed: Mapping[str, int]) -> Metrics:
    """Return the share of episodes that failed, by environment: `failed` are their numbers, `headers` the others."""
    ended = Counter(environment for _, _, environment in {(h.number, h.episode, h.environment) for h in headers})
    names = sorted(name for name in ended.keys() | failed.keys() if name)
    return {f"environments/{name}/failed": failed.get(name, 0) / (ended[name] + failed.get(name, 0)) for name in names}


def trend(lengths: Sequence[float]) -> Metrics:
    """Return the ratio of the last 10 to the first 10 mean lengths of up to 110 updates; {} for fewer than 20."""
    lengths = lengths[-TREND_UPDATES:]
    if len(lengths) < 2 * WINDOW:
        return {}
    return {"length/trend": fmean(lengths[-WINDOW:]) / fmean(lengths[:WINDOW])}


def window_means(values: Sequence[float]) -> list[float]:
    """Return the mean of every WINDOW adjacent values."""
    return [fmean(values[i - WINDOW : i]) for i in range(WINDOW, len(values) + 1)]


def collapse(rewards: Sequence[float]) -> int | None:
    """Return the update at which a run has collapsed (see WINDOW), by its rewards update by update; None if not."""
    best, means = 0.0, window_means(rewards)
    for i, mean in enumerate(means[:-WINDOW]):  # the last window alone may be low by chance
        best = max(best, mean)
        if best >= LOWEST_PEAK and all(each <= COLLAPSED * best for each in means[i : i + COLLAPSE_LASTS]):
            return i + WINDOW
    return None


def peak_to_end(rewards: Sequence[float]) -> float | None:
    """Return the best mean of WINDOW updates minus the last one; None for fewer updates."""
    means = window_means(rewards)
    return max(means) - means[-1] if means else None


def trust_metrics(headers: Sequence[Header], *, several_teachers: bool = False) -> Metrics:
    """Return the reverse KL from the sampler to each teacher, and the number of floored teacher log-probs.

    If there are several in the run or in the headers, names contain the teacher's, and its responses are counted.

    teacher/kl is the mean of log b − log q over tokens drawn from b (b: sampler, q: teacher). Its expectation is
    KL(b ‖ q) ≥ 0. Tokens of a response are not independent, so the error is that of a ratio of sums over k responses:
    √(k/(k−1) · Σ (gap − kl·tokens)²) / Σ tokens.
    """
    by_teacher: dict[str, list[Header]] = {}
    for header in drawn_by_student(headers):
        if header.teacher and header.trained_tokens:
            by_teacher.setdefault(header.teacher, []).append(header)
    numbers: Metrics = {"teacher/floored": float(sum(header.floored for header in headers))} if by_teacher else {}
    for name, scored in sorted(by_teacher.items()):
        several = several_teachers or len(by_teacher) > 1
        prefix = f"teacher/{name}" if several else "teacher"
        kl, error = kl_and_error(scored)
        numbers |= {f"{prefix}/kl": kl, f"{prefix}/kl_error": error}
        if several:
            numbers[f"{prefix}/samples"] = float(len(scored))
    return numbers


def kl_and_error(scored: Sequence[Header]) -> tuple[float, float]:
    """Return the mean gap per compared token of scored responses, and its standard error."""
    tokens, k = max(sum(header.compared_tokens for header in scored), 1), len(scored)
    kl = sum(header.gap for header in scored) / tokens
    off = [header.gap - kl * header.compared_tokens for header in scored] if k > 1 else [scored[0].gap]
    return kl, sqrt(sum(gap**2 for gap in off) * k / max(k - 1, 1)) / tokens


def spelling_metrics(headers: Sequence[Header]) -> Metrics:
    """Return shares of trained tokens that teachers with another tokenizer left out, by reason, and mean span sizes."""
    scored = [header for header in headers if header.left_out is not None]
    if not scored:
        return {}
    tokens = max(sum(header.trained_tokens for header in scored), 1)
    counts = zip(*(header.left_out or () for header in scored), strict=True)
    names = ("open", "unwritten", "too_long", "unpaired")
    shares = {f"spelling/{name}": sum(count) / tokens for name, count in zip(names, counts, strict=True)}
    spans = max(sum(header.byte_spans for header in scored), 1)
    return shares | {"spelling/span_tokens": tokens * (1 - sum(shares.values())) / spans}


def relabel_metrics(headers: Sequence[Header]) -> Metrics:
    """Return the number of samples scored again, mean KL(new ‖ first) of their scores, and token share with a KL."""
    asked = [header for header in headers if header.moved is not None and header.trained_tokens]
    if not asked:
        return {}
    tokens = sum(header.trained_tokens for header in asked)
    aligned = sum(header.aligned * header.trained_tokens for header in asked)
    moved = sum((header.moved or 0.0) * header.aligned * header.trained_tokens for header in asked)
    return {
        "teacher/relabelled": float(len(asked)),
        "teacher/moved": moved / max(aligned, 1.0),
        "teacher/aligned": aligned / tokens,
    }


def throughput(tokens: Sequence[float], finished: Sequence[float], *, warmup: int = WARMUP) -> float:
    """Return response tokens per second over the updates after the first `warmup`: Σ_{j>w} n_j / (t_J − t_w)."""
    if len(tokens) != len(finished):
        raise ValueError(f"{len(tokens)} token counts for {len(finished)} times")
    if len(tokens) <= warmup or warmup < 1:
        return float("nan")
    return sum(tokens[warmup:]) / max(finished[-1] - finished[warmup - 1], 1e-9)


def covered_seconds(intervals: Iterable[Interval]) -> float:
    """Return the seconds that at least one interval covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def usage(busy: Mapping[str, Workers], stages: Mapping[str, Workers], seconds: float) -> Metrics:
    """Return how much the stages overlap, from the busy intervals of all workers in `seconds` of wall clock.

    overlap/stages  (T_rollout + T_score + T_learn) / T_wall of rollout, scoring and learning alone. T_rollout is the
                    mean over samplers. The other times merge the intervals of workers (AsyncOPD, 2606.24143).
    overlap/busy    the same for all work, including publishes, exports, checkpoints and evaluation
    stage/…, busy/… the parts of these sums; idle/…: share of the time in which a worker had no work
    """
    seconds, numbers, idle = max(seconds, 1e-9), Metrics(), Metrics()
    for kind, of_kind in (("stage", stages), ("busy", busy)):
        numbers |= {f"{kind}/{stage}": _together(stage, workers) / seconds for stage, workers in of_kind.items()}
    for name, intervals in [each for workers in busy.values() for each in workers.items()]:
        idle[f"idle/{name}"] = max(0.0, 1 - covered_seconds(intervals) / seconds)
    overlap = {
        "overlap/stages": sum(numbers[f"stage/{stage}"] for stage in stages),
        "overlap/busy": sum(numbers[f"busy/{stage}"] for stage in busy),
    }
    return overlap | numbers | idle


def _together(stage: str, workers: Workers) -> float:
    if stage == "rollout":
        return fmean(covered_seconds(intervals) for intervals in workers.values())
    return covered_seconds(interval for intervals in workers.values() for interval in intervals)


OVER_STEPS: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "": fmean}


def over_steps(steps: Sequence[Mapping[str, float]]) -> Metrics:
    """Combine the metrics of an update's optimizer steps: means, extremes, and drift at the first and last step.

    All steps of an update learn from data of the same age. So growth of the KL to the sampler is due to the steps.
    """
    if len(steps) == 1:
        return dict(steps[0])
    numbers: Metrics = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        numbers[name] = OVER_STEPS[extreme(name)](values)
    for name in ("drift/kl", "drift/k3_kl"):
        for place, step in ("first", steps[0]), ("last", steps[-1]):
            if name in step:  # a step without tokens of the student has no drift
                numbers[f"{name}_{place}"] = step[name]
    return numbers


DIGESTED = (
    *("time", "tokens", "samples", "lag/mean", "lag/max", "dropped", "restarted", "thrown_tokens"),
    *("overlap/stages", "overlap/busy", "busy/rollout", "busy/score", "busy/learn"),
    *("seconds/update", "seconds/data", "seconds/turn", "seconds/weights"),
)
"""Metrics that a digest reads; a missing one counts as 0."""


def new_tokens(line: Mapping[str, Any]) -> float:
    """Return the tokens of an update that no update learned from before ([reuse])."""
    return float(line.get("reuse/new_tokens", line.get("tokens", 0.0)))


def digest(lines: Iterable[Mapping[str, Any]], *, since: int = 0) -> Metrics:
    """Summarise the metrics lines of a run after warm-up; return {} for fewer than two updates after update `since`.

    `overlap/stages` (as in AsyncOPD), `lag/max`, `seconds` and counters include the warm-up; counters begin at `since`.
    """
    every = [{**dict.fromkeys(DIGESTED, 0.0), **line} for line in lines if line["kind"] == "train"]
    earlier = [line for line in every if line["update"] <= since]
    lines, before = every[len(earlier) :], (earlier or [{}])[-1]
    if len(lines) < 2:
        return {}

    def gained(name: str) -> float:
        return float(lines[-1].get(name, 0.0) - before.get(name, 0.0))

    warmup = min(WARMUP, len(lines) // 2)
    late, times = lines[warmup:], [line["time"] for line in lines]
    wall = max(sum(line["seconds/update"] for line in late), 1e-9)
    drawn = [sum(count for name, count in line.items() if name.startswith("lag/tokens_")) for line in late]
    counts = drawn if any(drawn) else [line["tokens"] for line in late]  # without a histogram: an old run
    shares = ("overlap/busy", "busy/rollout", "busy/score", "busy/learn")
    waits = ("data", "turn", "weights")
    return {
        "tokens_per_s": throughput([line["tokens"] for line in lines], times, warmup=warmup),
        "samples_per_s": throughput([line["samples"] for line in lines], times, warmup=warmup),
        **{name: sum(line[name] * line["seconds/update"] for line in late) / wall for name in shares},
        "overlap/stages": sum(line["overlap/stages"] * line["seconds/update"] for line in lines)
        / max(sum(line["seconds/update"] for line in lines), 1e-9),
        **{f"waits/{name}": sum(line[f"seconds/{name}"] for line in late) / wall for name in waits},
        "lag/mean": sum(line["lag/mean"] * n for line, n in zip(late, counts, strict=True)) / max(sum(counts), 1.0),
        "lag/max": max(line["lag/max"] for line in lines),
        "lost": gained("dropped") + gained("restarted"),
        "thrown_tokens": gained("thrown_tokens"),
        **{name: gained(name) for name in lines[-1] if name.startswith("restarts/") and gained(name)},
        "seconds": times[-1],
    }


def summary(run: Mapping[str, float], *, resumed: bool = False) -> list[str]:
    """Describe a run, or its part since a resume, in lines of text, from its digest; [] for an empty digest."""
    if not run:
        return []
    part = "since the resume" if resumed else "over the whole run"
    lines = [
        f"trained {run['tokens_per_s']:,.0f} tokens/s; busy: rollout {run['busy/rollout']:.0%}, scoring "
        f"{run['busy/score']:.0%}, learner {run['busy/learn']:.0%}",
        f"overlap {run['overlap/stages']:.2f} of the three stages {part}, {run['overlap/busy']:.2f} of all work "
        "after warm-up",
        f"lag {run['lag/mean']:.1f} updates on average, {run['lag/max']:.0f} at most; the learner waited "
        f"{run['waits/data']:.0%} of the time for data, {run['waits/turn']:.0%} for its turn, "
        f"{run['waits/weights']:.0%} for publishes and evaluations",
    ]
    if run["lost"] or run["thrown_tokens"]:  # a publish may throw away tokens and keep the groups
        lines.append(f"groups dropped or restarted: {run['lost']:.0f}, tokens thrown away: {run['thrown_tokens']:,.0f}")
    again = [f"{name.removeprefix('restarts/')} {n:.0f} ×" for name, n in run.items() if name.startswith("restarts/")]
    if again:
        lines.append(f"workers died and were restarted: {', '.join(again)}")
    return lines


def avg_at_n(correct: Sequence[Sequence[float]]) -> float:
    """Return the mean over problems of the mean over their samples."""
    return fmean(fmean(samples) for samples in correct)


def pass_at_k(correct: Sequence[Sequence[float]], k: int) -> float:
    """Return the unbiased estimate from n ≥ k samples per problem: 1 − C(n−c, k)/C(n, k) (Chen et al., 2107.03374)."""

    def one(samples: Sequence[float]) -> float:
        n, c = len(samples), sum(sample >= 1.0 for sample in samples)
        if k > n:
            raise ValueError(f"pass@{k} needs at least {k} samples of each problem, there are {n}")
        return 1.0 - comb(n - c, k) / comb(n, k)

    return fmean(one(samples) for samples in correct)
