"""The learner's step alone: speed and agreement against TRL, memory at a large vocabulary. FLOP utilisation: gpu.py.

    python3 -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl==1.16.0
    python benchmarks/learner.py --trl-python /tmp/trl/bin/python [--case long] [--threads 1]
    python benchmarks/learner.py --memory [--trl-python /tmp/trl/bin/python]

Speed: the same 64 samples in every update, rolled out once by the native sampler; forward, loss, backward, clipping and
AdamW in float32, without rollout. `draws` is the default loss on 16 draws, `exact` sums over the whole vocabulary and
applies the teacher's head itself, as TRL does: these two must agree in loss, gradient norm and trained weights. Scores
are ready when the step begins: from TRL's time the forward pass of the teacher's backbone is taken away. The second
table has it, and on our side the scorer's pass. TRL pads all samples to the longest prompt and response; it runs with
the micro-batch that suits it best. Contenders take turns, each in a process of its own; of a process the median update
counts. On a shared machine the ratio of CPU seconds is steadier than that of seconds.
"""

import argparse
import asyncio
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from head import resident
from learner_trl import Saved
from slipstream.config.data import DataConfig
from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ForwardKL, LossConfig, LossSpec, ReverseKL, ReverseKLMC
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows, load_tokenizer, stop_ids
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel, load_model, split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.settings import LearnerSettings, SamplerSettings, ScorerSettings
from slipstream.estimators.logprobs import HELD
from slipstream.models.resolve import model_path
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import Metrics, Sampling
from slipstream.records import Batch, Handle, Prompt, Rollout, Scored, header_of, one_turn, total

BATCH, DRAWS, WARM_UP, LR = 64, 16, 1, 1e-3
UPDATES = {"arithmetic": 8, "long": 2}
MIB = 2**20
LOSSES: dict[tuple[str, str], LossConfig] = {
    ("draws", "reverse"): ReverseKLMC(m=DRAWS),
    ("exact", "reverse"): ReverseKL(),
    ("exact", "forward"): ForwardKL(cache="hidden"),
}
TABLES = {
    "step alone": {"ours": "seconds", "trl": ("seconds", "teacher")},
    "with the teacher's forward pass": {"ours": ("seconds", "scoring"), "trl": "seconds"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", help="the Python of an environment that has TRL")
    parser.add_argument(
        "--trl-micro", type=int, help="samples of TRL's micro-batch (default: the fastest of 64, 16, 4)"
    )
    parser.add_argument("--trl-compile", action="store_true", help="torch.compile TRL's backbones")
    parser.add_argument("--case", choices=("arithmetic", "long"), default="arithmetic")
    parser.add_argument("--kl", choices=("reverse", "forward"), default="reverse")
    parser.add_argument("--updates", type=int, help=f"after {WARM_UP} to warm up (default: 8, or 2 if long)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.updates = args.updates or UPDATES[args.case]
    torch.set_num_threads(args.threads)
    if args.one:
        contend = remember if args.memory else contender
        print(json.dumps(contend(args.one, args)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            args.scratch = Path(scratch)
            (memory if args.memory else speed)(args)


# --- what is run ------------------------------------------------------------------------------------------------------


def make_learner(lm: LanguageModel, loss: LossConfig, threads: int, **options: Any) -> NativeLearner:
    head = options.pop("teacher_head", None)
    heads = None if head is None else {"teacher": TeacherHead(head)}
    config = LearnerConfig(lr=LR, **options)
    return NativeLearner(
        lm,
        LearnerSettings(method=Method(loss=loss), settings=config, updates=1, threads=threads),
        heads=heads,
    )


async def one_update(
    learner: NativeLearner, batch: Batch, between: Callable[[], None] = lambda: None
) -> tuple[Metrics, int]:
    counts = total(await learner.prepare(batch))
    await learner.accumulate(batch, counts)
    between()
    return await learner.step(), counts.n_tokens


def random_model(hidden: int, layers: int, vocabulary: int, *, seed: int = 0, **options: Any) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        **{"intermediate_size": 3 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2} | options,
        head_dim=128 if hidden >= 1024 else 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.02 if hidden >= 1024 else 0.05,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def run(command: list[str], args: argparse.Namespace) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    if args.memory:  # freed memory goes back at once, so that what is resident is what is held
        env |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_TRIM_THRESHOLD_": str(1 << 18)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(name: str, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--scratch", str(args.scratch), "--updates", str(args.updates), "--threads", str(args.threads)]
    options += ["--kl", args.kl] + ["--memory"] * args.memory
    return run([sys.executable, __file__, "--one", name, *options], args)


def theirs(micro: int, args: argparse.Namespace, updates: int) -> dict[str, Any]:
    options = ["--scratch", str(args.scratch), "--updates", str(updates), "--micro", str(micro)]
    options += ["--threads", str(args.threads), "--beta", "1" if args.kl == "reverse" else "0"]
    script = str(Path(__file__).with_name("learner_trl.py"))
    return run([args.trl_python, script, *options, *["--compile"] * args.trl_compile], args)


def write_case(scratch: Path, rollouts: list[Rollout], **case: Any) -> None:
    samples = [{"prompt": r.prompt.tokens.tolist(), "response": r.tokens.tolist()} for r in rollouts]
    (scratch / "samples.json").write_text(json.dumps(samples))
    case |= {"lr": LR, "tokenizer": model_path("builtin:student")}  # TRL pads by it, and does no more with it
    (scratch / "case.json").write_text(json.dumps(case))


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> None:
    rollouts = roll_out(args)
    prompts, responses = ([len(tokens) for tokens in each] for each in zip(*map(parts, rollouts), strict=True))
    trained, real, padded = sum(responses), sum(prompts) + sum(responses), BATCH * (max(prompts) + max(responses))
    print(
        f"{args.case}, {args.kl} KL, {args.threads} thread(s): {BATCH} samples, {trained:,} response tokens (median "
        f"{statistics.median(responses):.0f}, longest {max(responses)}), {real:,} with prompts; TRL computes {padded:,}"
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name, kl in LOSSES if kl == args.kl}
    micro = 0
    if args.trl_python:
        micro, runs["trl"] = args.trl_micro or best_micro(args), []
    for _ in range(args.repeats):
        for name, found in runs.items():
            found.append(theirs(micro, args, WARM_UP + args.updates) if name == "trl" else ours(name, args))
    for title, clocks in TABLES.items():
        print(f"\n{title}: response tokens per second, medians of {args.repeats} [ranges]")
        for name, found in runs.items():
            clock = clocks["trl" if name == "trl" else "ours"]
            walls, cpus = ([seconds(each, clock, suffix) for each in found] for suffix in ("", "_cpu"))
            line = f"{name:6} {spread([trained / s for s in walls], ',.0f')}   {1e3 * statistics.median(walls):,.0f} ms"
            if name != "trl" and micro:
                others = [[seconds(each, clocks["trl"], suffix) for each in runs["trl"]] for suffix in ("", "_cpu")]
                wall, cpu = (
                    [t / s for s, t in zip(*pair, strict=True)] for pair in zip((walls, cpus), others, strict=True)
                )
                line += f"   {spread(wall, '.2f')}× TRL, {spread(cpu, '.2f')}× by CPU seconds"
            print(line)
    if micro:
        agreement(args.scratch, runs)


def parts(rollout: Rollout) -> tuple[Any, Any]:
    return rollout.prompt.tokens, rollout.tokens


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}} … {max(values):{form}}]"


def seconds(found: dict[str, Any], clock: str | tuple[str, str], suffix: str) -> float:
    """Return the seconds of the median update; on our side the second clock is added, on TRL's subtracted."""
    names = (clock,) if isinstance(clock, str) else clock
    names = tuple("cpu" if name + suffix == "seconds_cpu" else name + suffix for name in names)
    values = np.array([found[name][WARM_UP:] for name in names])
    if len(names) == 2:
        values[1] *= -1 if names[1].startswith("teacher") else 1
    return float(np.median(values.sum(0)))


def best_micro(args: argparse.Namespace) -> int:
    tried = {
        size: seconds(theirs(size, args, WARM_UP + min(args.updates, 3)), "seconds", "_cpu") for size in (BATCH, 16, 4)
    }
    print("TRL by micro-batch, CPU seconds:", ", ".join(f"{size}: {s:.2f}" for size, s in tried.items()), flush=True)
    return min(tried, key=tried.__getitem__)


def agreement(scratch: Path, runs: dict[str, list[dict[str, Any]]]) -> None:
    print()
    for name, found in runs.items():
        first, last = ({key: found[0][key][at] for key in ("loss", "grad_norm")} for at in (0, -1))
        line = f"{name:6} first update: loss {first['loss']:.7f}, gradient norm {first['grad_norm']:.7f}; "
        line += f"update {len(found[0]['loss'])}: {last['loss']:.7f}, {last['grad_norm']:.7f}"
        if name == "exact":
            a, b = (torch.load(scratch / f"change-{each}.pt") for each in (name, "trl"))
            line += f"; change of the weights: {((a - b).norm() / b.norm()).item():.1e} from TRL's"
        print(line)


def roll_out(args: argparse.Namespace) -> list[Rollout]:
    """Samples, their scores in both caches, and the two models, into files."""
    scratch, rng = args.scratch, np.random.default_rng(0)
    if args.case == "arithmetic":
        student, teacher = (model_path(f"builtin:{name}") for name in ("student", "teacher"))
        tokenizer, rows = load_tokenizer(student), load_rows("builtin:arithmetic", limit=BATCH)
        source = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=False)
        prompts, limits = [source.at(number) for number in range(BATCH)], [80] * BATCH
        stop = stop_ids(tokenizer, load_model(student, dtype="float32", device="cpu").model.generation_config)
    else:
        student, teacher, stop = str(scratch / "student"), str(scratch / "teacher"), set[int]()
        for seed, path in enumerate((student, teacher)):
            random_model(256, 4, 4096, seed=seed).save_pretrained(path)
        limits = np.exp(rng.normal(np.log(80), 1.0, BATCH)).clip(4, 512).astype(int).tolist()
        tokens = [rng.integers(2, 4096, rng.integers(16, 65)) for _ in range(BATCH)]
        prompts = [Prompt(id=str(i), number=i, tokens=tokens[i], seed=i) for i in range(BATCH)]

    async def work() -> list[Handle]:
        lm = load_model(student, dtype="float32", device="cpu")
        sampler = NativeSampler(lm, SamplerSettings(slots=BATCH, threads=args.threads), stop_ids=stop)
        jobs = [
            sampler.generate(prompt, Sampling(max_tokens=limit, draws=DRAWS))
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        groups = await asyncio.gather(*jobs)
        sampler.close()
        return [handle for group in groups for handle in group]

    handles = asyncio.run(work())
    (scratch / "rollouts.pkl").write_bytes(pickle.dumps(handles))
    rollouts = [handle.body for handle in handles]
    write_case(scratch, rollouts, student=student, teacher=teacher, memory=False)
    return rollouts


def contender(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Updates on the same samples, and as many passes of the scorer over them."""
    case = json.loads((args.scratch / "case.json").read_text())
    groups = [[handle] for handle in pickle.loads((args.scratch / "rollouts.pkl").read_bytes())]
    teacher = load_model(case["teacher"], dtype="float32", device="cpu")
    lm = load_model(case["student"], dtype="float32", device="cpu")
    spec = LossSpec(cache="hidden" if name == "exact" else "sampled", formula="")
    scorer = NativeScorer(teacher, ScorerSettings(spec=spec, vocabulary=teacher.vocab_size, threads=args.threads))
    learner = make_learner(lm, LOSSES[name, args.kl], args.threads, teacher_head=teacher.head)
    before = torch.cat([p.detach().flatten() for p in lm.model.parameters()])
    clocks = ("seconds", "cpu", "scoring", "scoring_cpu", "loss", "grad_norm")
    found: dict[str, list[float]] = {clock: [] for clock in clocks}

    async def work() -> None:
        for update in range(1, WARM_UP + args.updates + 1):
            marks = [(time.perf_counter(), time.process_time())]
            scored = await asyncio.gather(*[scorer.score(group) for group in groups])
            marks.append((time.perf_counter(), time.process_time()))
            metrics, _ = await one_update(learner, Batch(tuple(scored), update))
            marks.append((time.perf_counter(), time.process_time()))
            (score, score_cpu), (learn, learn_cpu) = np.diff(marks, axis=0)
            values = (learn, learn_cpu, score, score_cpu, metrics["loss"], metrics["grad_norm"])
            for clock, value in zip(clocks, values, strict=True):
                found[clock].append(float(value))

    asyncio.run(work())
    torch.save(
        torch.cat([p.detach().flatten() for p in lm.model.parameters()]) - before, args.scratch / f"change-{name}.pt"
    )
    return found


# --- memory -----------------------------------------------------------------------------------------------------------

VOCABULARY, HIDDEN, LAYERS, SAMPLES, PROMPT, RESPONSE = 151_936, 256, 4, 16, 32, 224


def memory(args: argparse.Namespace) -> None:
    """Measure the peak memory of a step, by parts, against N×V logits in float32 and against TRL."""
    for seed, name in enumerate(("student", "teacher")):
        random_model(HIDDEN, LAYERS, VOCABULARY, seed=seed).save_pretrained(args.scratch / name)
    samples = synthetic(SAMPLES, PROMPT, RESPONSE, VOCABULARY, HIDDEN)
    paths = {name: str(args.scratch / name) for name in ("student", "teacher")}
    write_case(args.scratch, [sample.rollout for sample in samples], memory=True, **paths)
    tokens, rows = SAMPLES * (PROMPT + RESPONSE), SAMPLES * RESPONSE
    print(
        f"V = {VOCABULARY:,}, hidden {HIDDEN}, {LAYERS} layers, {tokens:,} tokens, N = {rows:,} predicted; float32, MiB"
    )
    for name in (name for name, kl in LOSSES if kl == args.kl):
        found = {key: value / MIB for key, value in ours(name, args).items()}
        weights = found["parameters"]
        rest = found["accumulate"] - weights - found["saved"]
        print(f"\n{name:42} computed  measured")
        for part, computed, measured in (
            ("weights", weights, found["weights"]),
            ("moments of AdamW", 2 * weights, found["moments"]),
            ("gradients, after backward", weights, found["gradients"]),
            ("activations kept for backward", activations(tokens) / MIB, found["saved"]),
        ):
            print(f"{part:42} {computed:8,.0f}  {measured:8,.0f}")
        print(f"{'logits held at a time; all else until then':42} {4 * HELD / MIB:8,.0f}  {rest:8,.0f}")
        held = found["weights"] + found["moments"]
        for part, at in (("peak of forward and backward", "accumulate"), ("peak of clipping and AdamW", "step")):
            print(f"{part:42} {'':8}  {held + found[at]:8,.0f}")
    print(f"\n{'N×V float32, once':42} {rows * VOCABULARY * 4 / MIB:8,.0f}")
    print(f"{'logits, log-probs, gradient: dense path':42} {3 * rows * VOCABULARY * 4 / MIB:8,.0f}")
    if args.trl_python:
        found = theirs(SAMPLES, args, 2)
        extra = (found["peak"][-1] - found["resident"][-1]) / MIB
        print(f"{'TRL: activations kept for backward':42} {'':8}  {found['saved'] / MIB:8,.0f}")
        print(f"{'TRL: all that its step adds at its peak':42} {'':8}  {extra:8,.0f}")
        print(f"{'TRL: with weights and moments':42} {'':8}  {extra + 3 * weights:8,.0f}")


def activations(tokens: int) -> float:
    """Bytes that HF's Qwen3 in float32 keeps for backward, with dense causal attention.

    Per layer: two norms of the hidden size, with input, normalised input and result, which is also the input of the
    products; input and normalised input of the norms of q and k; q, k, v and the result of attention; and four of the
    MLP's size: gate, silu, up and their product. Of the last norm the result is the head's.
    """
    heads, kv = 4 * 64, 2 * 64
    layer = 6 * HIDDEN + 2 * (heads + kv) + (heads + 2 * kv) + heads + 4 * 3 * HIDDEN
    return 4 * tokens * (LAYERS * layer + 2 * HIDDEN)


def synthetic(samples: int, prompt: int, response: int, vocabulary: int, hidden: int) -> list[Scored]:
    """Random tokens, uniform log-probs: nothing of what is measured with them depends on what they are."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(samples):
        actions = rng.integers(2, vocabulary, (response, DRAWS))
        logp = np.full(actions.shape, -np.log(vocabulary), np.float32)
        rollout = one_turn(
            Prompt(id=str(i), number=i, tokens=rng.integers(2, vocabulary, prompt)),
            0,
            actions=actions,
            action_logp=logp,
            versions=np.zeros(response, np.int64),
            finish="length",
        )
        found.append(Scored(rollout=rollout, teacher="teacher", teacher_logp=logp[:, 0], teacher_action_logp=logp))
    return found


def batch_of(samples: list[Scored], update: int) -> Batch:
    return Batch(tuple([Handle(header_of(sample.rollout), sample)] for sample in samples), update)


def remember(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Two updates; of the second, what is resident when, less what was resident before."""
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    samples = synthetic(SAMPLES, PROMPT, RESPONSE, VOCABULARY, HIDDEN)
    teacher_head = None
    if name == "exact":
        teacher_head = load_model(str(args.scratch / "teacher"), dtype="float32", device="cpu").head
        samples = [with_hidden(sample) for sample in samples]
    base = resident("VmRSS")
    model = random_model(HIDDEN, LAYERS, VOCABULARY)
    lm = split("random", model)
    weights = resident("VmRSS") - base
    saved = Saved(lm.backbone)
    tokens = SAMPLES * (PROMPT + RESPONSE)
    learner = make_learner(lm, LOSSES[name, args.kl], args.threads, token_budget=tokens, teacher_head=teacher_head)
    marks: dict[str, int] = {}

    def begin() -> None:
        marks["before"] = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def between() -> None:
        marks["accumulate"], marks["gradients"] = resident("VmHWM"), resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    async def work() -> None:
        for update in (1, 2):
            begin()
            await one_update(learner, batch_of(samples, update), between)

    asyncio.run(work())
    marks["step"] = resident("VmHWM")
    found = {key: float(marks[key] - marks["before"]) for key in ("accumulate", "gradients", "step")}
    parameters = 4 * sum(p.numel() for p in model.parameters())
    moments = marks["before"] - base - weights
    return found | {"weights": weights, "moments": moments, "parameters": parameters, "saved": saved.bytes}


def with_hidden(sample: Scored) -> Scored:
    hidden = np.random.default_rng(0).standard_normal((RESPONSE, HIDDEN)).astype(np.float32)
    logp = sample.teacher_logp
    return Scored(rollout=sample.rollout, teacher="teacher", teacher_logp=logp, teacher_hidden=hidden)


if __name__ == "__main__":
    main()
