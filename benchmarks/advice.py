"""Does `slipstream advise` name what was done to a run, and is it silent where nothing was?

    python benchmarks/advice.py [planted] [healthy] [--runs DIR] [--only NAME …]
    python benchmarks/advice.py --real
    python benchmarks/advice.py --studies runs/mismatch runs/clock …

Planted: runs of the built-in models with one thing wrong each, by a setting, or by an engine that stands around the
real one and does what it is called. They begin without checks, which would refuse some of them. Healthy: twenty runs
of other seeds, losses and schedules. One run at a time, a minute each on two cores; those that are in DIR already are
read, and not made again. `--real`: the same with a real model and its student after the supervised start, both of
`make real`, in the number format that this processor multiplies fastest; `python benchmarks/honest.py --runs 0` makes
the student without fifteen layers. Of finished studies it is told what is said of their runs, which no rule was made
by.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.reporting.advice.tree import Advice, advise, read
from slipstream.studies.results import Sweep

HERE = Path(__file__).resolve()
Config = dict[str, Any]


# --- rewards of planted runs, which a grading process reads from this file --------------------------------------------


def longer(text: str, ground_truth: str) -> float:
    return len(text) / 100


def ten_eights(text: str, ground_truth: str) -> float:
    """One answer, which can be learned by and by."""
    return min(text.count("8"), 10) / 10 - abs(len(text) - 10) / 20


# --- configs ----------------------------------------------------------------------------------------------------------


BUILT_IN: Config = {
    "student": "builtin:student",
    "updates": 50,
    "teachers": {"main": {"model": "builtin:teacher"}},
    "data": {"eval": "builtin:arithmetic"},
    "sampler": {"max_tokens": 80},
    "learner": {"batch_size": 32, "lr": 1e-3, "warmup": 10},
    "task": {"reward": "exact"},
    "eval": {"every": 10, "prompts": 100},
}
REAL: Config = {
    "student": "runs/real/checkpoints/20",
    "updates": 16,
    "teachers": {"main": {"model": "build/real/teacher.gguf"}},
    "data": {"train": "build/real/train.jsonl", "chat": True},
    "sampler": {"max_tokens": 32},
    "loss": {"kind": "reverse_kl_mc", "m": 16},
    "learner": {"batch_size": 16, "lr": 5e-5, "warmup": 2},
    "checkpoint": {"minutes": 0},
}


def config_of(seed: int, changes: Config, task: Config = BUILT_IN) -> Config:
    """Return the task with these keys changed; None takes a key away."""
    return merged({**task, "seed": seed}, changes)


def merged(tree: Config, changes: Config) -> Config:
    """Return a tree of settings with changes at any depth; None takes a key away."""
    both = {**tree, **changes}
    for name in tree.keys() & changes.keys():
        if isinstance(tree[name], dict) and isinstance(changes[name], dict):
            both[name] = merged(tree[name], changes[name])
    return {name: value for name, value in both.items() if value is not None}


def real_task() -> Config:
    """Return the real pair in the number format that this processor multiplies fastest."""
    sys.path.insert(0, str(HERE.parents[1] / "tools"))
    from fastest_format import fastest_format

    return merged(REAL, formats(fastest_format()))


def formats(name: str) -> Config:
    return {"teachers": {"main": {"dtype": name}}, "sampler": {"dtype": name}, "learner": {"compute_dtype": name}}


def schedule(kind: str, **settings: Any) -> Config:
    return {"schedule": {"kind": kind, **settings}}


GROUPS = {"sampler": {"max_tokens": 80, "group": 8}}
BY_REWARD = {"teachers": None, "loss": {"weight": 0.0}, "policy": {"loss": "vanilla"}, **GROUPS}
TOOLS = {
    "student": "builtin:tool_student",
    "teachers": {"main": {"model": "builtin:tool_teacher"}},
    "data": {"train": "builtin:table", "eval": "builtin:table"},
    "environment": {"use": "table", "calls": 10, "turns": 12},
    "sampler": {"max_tokens": 192},
    "learner": {"lr": 2e-3},
    "updates": 40,
}
HEALTHY: dict[str, Config] = {
    "reverse_kl_mc, async(4)": {},
    "reverse_kl_mc, sync": schedule("sync"),
    "reverse_kl_mc, periodic": schedule("periodic"),
    "reverse_kl_mc, step_off(1)": schedule("step_off", k=1),
    "reverse_kl_mc, step_off(2)": schedule("step_off", k=2),
    "reverse_kl_mc, async(auto)": schedule("async", tau="auto"),
    "reverse_kl_mc m = 64, async(1)": {"loss": {"kind": "reverse_kl_mc", "m": 64}, **schedule("async", tau=1)},
    "reverse_kl_mc, replay(4)": schedule("replay", k=4),
    "reverse_kl_mc, bfloat16 rollouts": {"sampler": {"dtype": "bfloat16"}},
    "forward_kl top-32, async(4)": {"loss": {"kind": "forward_kl"}},
    "forward_kl exact, async(4)": {"loss": {"kind": "forward_kl", "cache": "hidden"}},
    "reverse_kl exact, async(4)": {"loss": {"kind": "reverse_kl"}},
    "jsd, sync": {"loss": {"kind": "jsd"}, **schedule("sync")},
    "k2, sync": {"loss": {"kind": "k2"}, **schedule("sync")},
    "reverse_kl_topk k = 16, async(1)": {"loss": {"kind": "reverse_kl_topk", "k": 16}, **schedule("async", tau=1)},
    "m2po, async(4)": {"loss": {"kind": "m2po"}},
    "decoupled_ppo, sync, 2 minibatches": {
        "loss": {"kind": "decoupled_ppo"},
        "learner": {"minibatches": 2},
        **schedule("sync"),
    },
    "freshness, async(8)": {"freshness": {}, "sampler": {"slots": 512}, **schedule("async", tau=8)},
    "grpo and teacher, async(1)": {"loss": {"weight": 0.5}, "policy": {}, **GROUPS, **schedule("async", tau=1)},
    "tools, async(4)": TOOLS,
}


# --- engines that do something wrong ----------------------------------------------------------------------------------


class Around:
    """A real engine, and all that it does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Hotter(Around):
    """Draws at another temperature than the config says."""

    async def generate(self, prompt: Any, sampling: Any, begun: Any = ()) -> Any:
        return await self.inner.generate(prompt, replace(sampling, temperature=1.4), begun)


class Shaken(Around):
    """Load weights that differ slightly from the published ones."""

    async def publish(self, weights: Any, mode: Any) -> Any:
        import torch

        loaded, generator = await self.inner.publish(weights, mode), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.inner.sampler.lm.model.parameters():
                weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
        return loaded


class Scaled(Around):
    """Records log-probs that are closer to 0 than those it draws by."""

    async def generate(self, *asked: Any) -> Any:
        return [
            replace(h, body=replace(h.body, logp=0.9 * h.body.logp, action_logp=0.9 * h.body.action_logp))
            for h in await self.inner.generate(*asked)
        ]


class Stuck(Around):
    """Says that it loaded what was published, and keeps its first weights."""

    async def publish(self, weights: Any, mode: Any) -> Any:
        import torch

        model = self.inner.sampler.lm.model
        before = [weight.detach().clone() for weight in model.parameters()]
        loaded = await self.inner.publish(weights, mode)
        with torch.no_grad():
            for weight, old in zip(model.parameters(), before, strict=True):
                weight.copy_(old)
        return loaded


class Ascending(Around):
    """Every step has the wrong sign."""

    async def step(self, *asked: Any) -> Any:
        for weight in self.inner.lm.model.parameters():
            if weight.grad is not None:
                weight.grad.neg_()
        return await self.inner.step(*asked)


class SlowPublish(Around):
    def __init__(self, inner: Any, seconds: float = 1.0) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def publish(self, weights: Any, mode: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return await self.inner.publish(weights, mode)


class Slow(Around):
    """One call after the other takes so much longer."""

    def __init__(self, inner: Any, seconds: float) -> None:
        super().__init__(inner)
        self.seconds, self.lock = seconds, asyncio.Lock()

    async def wait(self) -> None:
        async with self.lock:
            await asyncio.sleep(self.seconds)

    async def generate(self, *asked: Any) -> Any:
        await self.wait()
        return await self.inner.generate(*asked)

    async def score(self, *asked: Any) -> Any:
        await self.wait()
        return await self.inner.score(*asked)

    async def accumulate(self, *asked: Any) -> Any:
        await self.wait()
        return await self.inner.accumulate(*asked)


def samplers(around: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda engines: replace(engines, samplers=tuple(map(around, engines.samplers)))


def scorers(around: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda e: replace(e, scorers={name: tuple(map(around, of_one)) for name, of_one in e.scorers.items()})


def learner(around: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda engines: replace(engines, learner=around(engines.learner))


@dataclass(frozen=True)
class Plant:
    named: str
    """The answer that it must get."""
    changes: Config
    done: Callable[[Any], Any] = lambda engines: engines
    """Wrapper of the engines."""
    endpoint: bool = False
    """The teacher sits behind a slow one."""


def at(lr: float, **others: Any) -> Config:
    return {"learner": {"lr": lr, **others}}


def seen(context: str) -> Config:
    return {"teachers": {"main": {"context": context}}}


def rewarded(function: str) -> Config:
    return {**BY_REWARD, "task": {"reward": f"{HERE}:{function}"}, **schedule("async", tau=1)}


PLANTED: dict[str, Plant] = {
    "sampler at temperature 1.4": Plant("engine mismatch", {}, samplers(Hotter)),
    "sampler with other weights": Plant("engine mismatch", {}, samplers(Shaken)),
    "recorded log-probs x 0.9, sync": Plant("engine mismatch", schedule("sync"), samplers(Scaled)),
    "recorded log-probs x 0.9, async(4)": Plant("engine mismatch", {}, samplers(Scaled)),
    "publishes are not loaded, sync": Plant("engine mismatch", schedule("sync"), samplers(Stuck)),
    "publishes are not loaded, async(4)": Plant("engine mismatch", {}, samplers(Stuck)),
    "steps of the wrong sign, sync": Plant("wrong direction", {**schedule("sync"), "updates": 30}, learner(Ascending)),
    "steps of the wrong sign, async(4)": Plant("wrong direction", {"updates": 30}, learner(Ascending)),
    "publish 1 s slower": Plant("slow publish", {"updates": 25}, samplers(SlowPublish)),
    "batches 16 updates old, lr 3e-3": Plant("staleness", {**at(3e-3), **schedule("replay", k=16), "updates": 60}),
    "batches 32 updates old, lr 2e-3": Plant("staleness", {**at(2e-3), **schedule("replay", k=32), "updates": 80}),
    "decoupled_ppo on stale draws": Plant(
        "staleness", {"loss": {"kind": "decoupled_ppo"}, "learner": {"minibatches": 2}}
    ),
    "lr 2e-2, async(4)": Plant("step too large", at(2e-2)),
    "lr 2e-2, sync": Plant("step too large", {**at(2e-2), **schedule("sync")}),
    "lr 1e-2, sync": Plant("step too large", {**at(1e-2), **schedule("sync")}),
    "lr 0.2, async(4)": Plant("step too large", at(0.2)),
    "batch of 1": Plant("poor samples", {"learner": {"batch_size": 1}}),
    "draws at temperature 0.2": Plant("poor samples", {"sampler": {"temperature": 0.2}, "updates": 30}),
    "reward for length": Plant(
        "length surge", {**rewarded("longer"), "sampler": {"max_tokens": 110, "group": 8}, **at(1e-3, batch_size=64)}
    ),
    "reward for one answer": Plant(
        "entropy collapse", {**rewarded("ten_eights"), **at(3e-3, batch_size=64), "updates": 120}
    ),
    "teacher sees Q{prompt}A": Plant("wrong template", seen("Q{prompt}A")),
    "teacher sees ={prompt}=": Plant("wrong template", seen("={prompt}=")),
    "teacher sees A1B2={prompt}": Plant("wrong template", seen("A1B2={prompt}")),
    "scoring 0.1 s slower": Plant("slow teacher", {"updates": 30}, scorers(lambda each: Slow(each, 0.1))),
    "slow endpoint": Plant("slow teacher", {"updates": 15}, endpoint=True),
    "rollouts 0.1 s slower": Plant("slow sampler", {"updates": 30}, samplers(lambda each: Slow(each, 0.1))),
    "learning 0.15 s slower": Plant("slow learner", {"updates": 30}, learner(lambda each: Slow(each, 0.15))),
}


LESS = {"updates": 10}
REAL_PLANTED: dict[str, Plant] = {
    "sampler at temperature 1.4": Plant("engine mismatch", LESS, samplers(Hotter)),
    "sampler with other weights": Plant("engine mismatch", LESS, samplers(Shaken)),
    "recorded log-probs x 0.9, sync": Plant("engine mismatch", {**LESS, **schedule("sync")}, samplers(Scaled)),
    "publishes are not loaded, sync": Plant("engine mismatch", {**at(5e-4), **schedule("sync")}, samplers(Stuck)),
    "steps of the wrong sign, sync": Plant("wrong direction", {**schedule("sync"), "updates": 24}, learner(Ascending)),
    "lr 1e-2, sync": Plant("step too large", {**at(1e-2), **schedule("sync")}),
    "teacher sees Q{prompt}A": Plant("wrong template", {**seen("Q{prompt}A"), **LESS}),
    "student without fifteen layers": Plant(
        "student too far", {"student": "build/real/ruined", **at(5e-4), **schedule("sync"), "updates": 24}
    ),
    "scoring 3 s slower": Plant("slow teacher", LESS, scorers(lambda each: Slow(each, 3.0))),
    "rollouts 3 s slower": Plant("slow sampler", LESS, samplers(lambda each: Slow(each, 3.0))),
    "publish 20 s slower": Plant("slow publish", LESS, samplers(lambda each: SlowPublish(each, 20.0))),
}
REAL_HEALTHY: dict[str, Config] = {
    "reverse_kl_mc, sync": schedule("sync"),
    "reverse_kl_mc, async(4)": schedule("async", tau=4),
    "forward_kl exact, async(1)": {"loss": {"kind": "forward_kl", "m": None, "cache": "hidden"}},
    "reverse_kl_mc, sync, float32": {**formats("float32"), **schedule("sync")},
    "reverse_kl_mc, LoRA": {"learner": {"lr": 5e-4, "lora": {"rank": 8}}},
}


# --- runs -------------------------------------------------------------------------------------------------------------


def planted(plant: Plant, path: Path, task: Config, *, seed: int = 7) -> Advice:
    with behind(plant) as teachers:
        beside = {"runtime": {"kind": "inline"}, "health": {"canary": 0}}
        config = config_of(seed, plant.changes | teachers | beside, task)
        if not path.exists():
            train_with(plant.done, config, path)
    return advise(read(path))


@contextmanager
def behind(plant: Plant) -> Iterator[Config]:
    if not plant.endpoint:
        yield {}
        return
    sys.path.insert(0, str(HERE.parents[1] / "tests"))
    from slipstream.testing.endpoint import model
    from support.fake_endpoint import FakeEndpoint

    with FakeEndpoint(model("builtin:teacher")) as fake:
        fake.always, fake.seconds = "slow", 0.5
        teacher = {"model": fake.name, "base_url": fake.url, "tokenizer": "builtin:teacher", "concurrency": 4}
        yield {"teachers": {"main": teacher}, "loss": {"m": 1}}


def train_with(done: Callable[[Any], Any], config: Config, path: Path) -> None:
    """Train like `slipstream train --skip-checks`; a run that stops by itself has said enough."""
    from slipstream.config.file import parse
    from slipstream.pipeline.run import Run
    from slipstream.plan.plan import plan
    from slipstream.run_dir.writing import RunLog
    from slipstream.runtimes import inline

    made = plan(parse(config, say=str))
    engines = inline.open_engines(made.engines, made.tokenizer, say=str)
    try:
        with RunLog.create(made.config, path) as log:
            run = Run(made.config, done(engines), made.prompts, log, held_out=made.held_out, say=str)
            asyncio.run(run.train())
    except SlipstreamError as error:
        print(f"  (it stopped: {str(error)[:100]} …)", flush=True)
    finally:
        engines.close()


def healthy(changes: Config, path: Path, task: Config, *, seed: int) -> Advice:
    import slipstream

    if not path.exists():
        try:
            slipstream.train(config_of(seed, changes, task) | {"output": str(path)}, quiet=True)
        except slipstream.SlipstreamError as error:
            print(f"  (it was not: {str(error)[:100]} …)", flush=True)
    return advise(read(path))


def of(advice: Advice, *weights: str) -> str:
    return ", ".join(answer.name for answer in advice.answers if answer.weight in weights) or "–"


def report_planted(runs: Path, only: list[str], plants: dict[str, Plant], task: Config) -> None:
    print("| planted | updates | named first | named at all | what is said |\n| --- | --- | --- | --- | --- |")
    chosen = {name: plant for name, plant in plants.items() if not only or name in only}
    firsts = named = 0
    for name, plant in chosen.items():
        advice = planted(plant, runs / f"planted {name}".replace("/", "_"), task)
        first = bool(advice.answers) and advice.answers[0].name == plant.named
        any_of = first or any(plant.named in (each.name, *each.explains) for each in advice.answers)
        firsts, named = firsts + first, named + any_of
        said = of(advice, "wrong", "speed")
        print(f"| {name} | {advice.updates} | {yes(first)} | {yes(any_of)} | {said} |", flush=True)
    print(f"\nnamed first {firsts}, named {named}, of {len(chosen)}\n")


def report_healthy(runs: Path, only: list[str], seed: int, well: dict[str, Config], task: Config) -> None:
    print("| healthy | updates | errors | lost time | warnings and suggestions |\n| --- | --- | --- | --- | --- |")
    alarms = count = 0
    for number, (name, changes) in enumerate(well.items()):
        if only and name not in only:
            continue
        advice = healthy(changes, runs / f"healthy {name}", task, seed=seed + number)
        alarms, count = alarms + bool(advice.wrong), count + 1
        columns = (of(advice, "wrong"), of(advice, "speed"), of(advice, "watch", "tune"))
        print(f"| {name} | {advice.updates} | {' | '.join(columns)} |", flush=True)
    print(f"\nfalse alarms: {alarms} of {count} runs")


def report_studies(paths: Sequence[Path]) -> None:
    print("| runs of a study | of so many | what is wrong |\n| --- | --- | --- |")
    for path in paths:
        said = defaultdict[str, Counter[str]](Counter)
        for cell in Sweep(path).finished:
            advice = advise(read(cell.path))
            said[cell.point.name][advice.wrong[0].name if advice.wrong else "nothing"] += 1
        for name, counts in said.items():
            answers = ", ".join(f"{answer} {count}" for answer, count in counts.most_common())
            print(f"| {path.name}: {name} | {counts.total()} | {answers} |", flush=True)


def yes(found: bool) -> str:
    return "yes" if found else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["planted", "healthy"])
    parser.add_argument("--runs", type=Path, help="keep runs there")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--real", action="store_true", help="a real model in place of the built-in ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first healthy run; each has its own")
    parser.add_argument("--studies", nargs="+", type=Path, default=[], metavar="DIR", help="read these instead")
    args = parser.parse_args()
    if args.studies:
        report_studies(args.studies)
        return
    if unknown := set(args.what) - {"planted", "healthy"}:
        parser.error(f"{unknown.pop()!r} is neither planted nor healthy")
    runs = args.runs or Path(tempfile.mkdtemp(prefix="advice-"))
    runs.mkdir(parents=True, exist_ok=True)
    task = real_task() if args.real else BUILT_IN
    if "planted" in args.what:
        report_planted(runs, args.only, REAL_PLANTED if args.real else PLANTED, task)
    if "healthy" in args.what:
        report_healthy(runs, args.only, args.seed, REAL_HEALTHY if args.real else HEALTHY, task)


if __name__ == "__main__":
    main()
