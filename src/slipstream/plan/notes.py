"""Notes and warnings of a plan: what follows from a config that is allowed."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from slipstream.config.rules.estimators import first_ratio_to_sampler
from slipstream.config.schema import Config
from slipstream.engines.native.config import position_note
from slipstream.objective.method import Method, method_of
from slipstream.pipeline.schedules import schedule_of
from slipstream.plan.engines import sampler_settings
from slipstream.plan.facts import Facts
from slipstream.plan.placement import inner_width
from slipstream.plan.rules.machine import on_cpu
from slipstream.sandbox.cgroups import in_force, writable

TOO_FAST = 0.1
"""Smallest learning rate that causes a warning, because training of any model would diverge."""
MOST_ROUNDED_BETA = 0.99
"""Largest decay rate of the second moment at which bfloat16 does not round all its decay away."""
NEWEST_TESTED = {"datasets": "5.2", "peft": "0.21", "torch": "2.14", "transformers": "5.24"}
"""Newest versions, as major and minor number, that pass `make test-newest`."""
LARGE = 1 << 18
"""Minimum number of weights of a perceptron's matrix for which formats are compared; smaller ones gain little."""
FASTER, SLOWER = 1.5, 0.8
"""Speeds of bfloat16, as multiples of that of float32, beyond which it is recommended or warned of."""


def model_notes(config: Config, facts: Facts) -> Iterator[str]:
    lengths = {facts.student: config.sampler.max_length}
    lengths |= {model: config.teachers[name].max_length for name, model in facts.teachers.items()}
    positions = {model.name: position_note(model.config, longest) for model, longest in lengths.items() if longest}
    yield from (f"{name}: {note}" for name, note in positions.items() if note)
    if config.policy is not None and config.policy.advantage == "remax":
        group = config.sampler.group
        yield (
            f'policy.advantage = "remax" answers every prompt once more, greedily, for the reward alone: {group + 1} '
            f"answers are drawn where {group} are trained on"
        )
    draws, vocabulary = config.loss.spec.draws, facts.student.vocabulary
    if config.loss.weight and draws > vocabulary:
        yield (
            f'loss.m = {draws} draws of {vocabulary} tokens: loss.kind = "reverse_kl" computes all of them, exactly '
            "and at less cost"
        )


def running_notes(config: Config, facts: Facts) -> Iterator[str]:
    yield from (f"{kind}: one at first, up to {n} as the run needs them" for kind, n in config.most_workers.items())
    checkpoint = config.checkpoint
    times = [f"every {checkpoint.every} updates"] if checkpoint.every else []
    times += [f"every {checkpoint.minutes:g} minutes"] if checkpoint.minutes else []
    if times:
        yield f"checkpoints {', '.join(times)} and at the end, of which {checkpoint.keep} are kept"
    yield from sandbox_notes(config)


def sandbox_notes(config: Config) -> list[str]:
    every = config.every_environment.values()
    judged = any(each.gateway is not None and each.gateway.verify is not None for each in every)
    named = [config.task.sandbox, *(each.sandbox for each in every if each.gateway is None)]
    return [in_force(writable())] if judged or "bubblewrap" in named else []


def clip_notes(config: Config, facts: Facts) -> Iterator[str]:
    """Yield a note for each clip setting without effect: ratios are 1 if every update is one on-policy step."""
    schedule = schedule_of(config.schedule, config.groups_per_update, config.reuse)
    if not schedule.on_policy or config.learner.minibatches * config.learner.epochs > 1:
        return
    policy, loss = config.policy, config.loss
    given = [f"policy.options.{name}" for name in (policy.options if policy else ()) if name.startswith("clip")]
    bounds = ("clip", "dual_clip", "ratio_cap")
    given += [f"loss.{name}" for name in bounds if loss.weight and getattr(loss, name, None) is not None]
    for name in given:
        yield (
            f"{name} has almost no effect: every update is one step on answers of its own weights, so that ratios are "
            "1 up to rounding"
        )


def freshness_notes(config: Config, facts: Facts) -> Iterator[str]:
    if config.freshness is None:
        return
    if schedule_of(config.schedule, config.groups_per_update, config.reuse).on_policy:
        several = config.learner.minibatches * config.learner.epochs > 1
        anchored = ", apart from the anchor" if several and config.freshness.anchor else ""
        yield (
            f"[freshness] has almost no effect{anchored}: every update trains on answers of its own weights, so that "
            "their freshness is 1"
        )
    elif all(teacher.relabel == "never" for teacher in config.teachers.values()):
        yield "freshness: no teacher scores answers again (relabel), so that supervision drift is taken to be 0"
    else:
        known = f"{config.loss.spec.k} tokens" if config.loss.spec.k else "the emitted token"
        for name, teacher in config.teachers.items():
            if teacher.base_url is not None and teacher.relabel != "never":
                what = f"supervision drift of teachers.{name} is a lower bound"
                yield f"freshness: {what}, as its endpoint scores {known} only"


def off_policy_notes(config: Config, facts: Facts) -> Iterator[str]:
    sft, mix = config.sft, config.mix
    if k := config.sampler.teacher_replaces:
        yield f"tokens outside of the teacher's {k} most likely are replaced by its draws (SKD)"
    if fusion := config.sampler.fusion:
        end = "" if fusion.updates is None else f", which falls to 0 in {fusion.updates} updates"
        by = " times the difficulty of the prompt" if fusion.difficulty else ""
        yield f"rollouts are of a mixture: {fusion.alpha:g}{by} of the teacher's logits{end}"
    names = {"data": "answers of the data", "teacher": "rollouts of the teacher"}
    if sft is not None:
        responses = names.get(sft.source, f"responses of {sft.path}")
        end = "" if sft.until is None else f", until distill/student_mass is {sft.until:g}"
        yield f"first {sft.updates} updates{end}: {sft.loss.kind} on {responses}, without rollouts"
    if mix is not None:
        change = "" if mix.final is None else f" to {mix.final:.0%}"
        kind = "groups that the student does not draw"
        if mix.prefix is not None:
            kind = f"groups that begin with up to {mix.prefix:.0%} of a known response"
        yield f"{kind}: {mix.share:.0%}{change} of an update, {names.get(mix.source, mix.path)}"


def beyond_embeddings(config: Config, facts: Facts) -> Iterator[str]:
    vocabulary, tokenizer = facts.student.vocabulary, facts.student.tokenizer
    beyond = sorted(index for index in tokenizer.get_vocab().values() if index >= vocabulary)
    if beyond:
        yield (
            f"the tokenizer of {config.student} has {len(beyond)} tokens beyond the {vocabulary} embeddings of the "
            f"model, {tokenizer.convert_ids_to_tokens(beyond[0])!r} first: prompts with such a token are refused"
        )


def setting_warnings(config: Config, facts: Facts) -> Iterator[str]:
    never = {
        "checkpoint.every": (config.checkpoint.every, "only what checkpoint.minutes asks for is saved, and the end"),
        "eval.every": (config.eval.shortest, "only the first and the final student are evaluated"),
        "learner.warmup": (config.learner.warmup, "learner.lr is never reached"),
    }
    for setting, (every, effect) in never.items():
        if every > config.updates:
            yield f"{setting} = {every} is more than updates = {config.updates}: {effect}"
    to_host = {
        "reference.host = true": config.reference is not None and config.reference.host,
        f"learner.offload = {list(config.learner.offload)}": bool(config.learner.offload),
    }
    if on_cpu(config, facts):
        named = (key for key, is_set in to_host.items() if is_set)
        yield from (f"{key} does nothing on a CPU, whose memory is the host's" for key in named)
    if not config.checkpoint.every and not config.checkpoint.minutes:
        yield "checkpoint.every = 0 and checkpoint.minutes = 0: a run that is killed loses everything"
    if len(config.teachers) > 1 and not config.data.shuffle:
        yield "several teachers and data.shuffle = false: updates may hold prompts of one of them only"
    if config.loss.weight and config.reference is not None:
        yield "the loss has both a teacher and a reference; drop [reference] if that is not intended"
    spec, schedule = config.loss.spec, schedule_of(config.schedule, config.groups_per_update)
    unweighed = config.loss.weight and spec.cache == "sampled" and not spec.compares
    if unweighed and not schedule.on_policy and config.reuse is None:  # reuse refuses such losses
        yield (
            f'loss.kind = "{config.loss.kind}" takes every token for a draw of the current student, and '
            f'{config.schedule.label} learns from older ones: write "reverse_kl_mc" with importance weights, or '
            'schedule.kind = "periodic"'
        )
    if config.learner.lr >= TOO_FAST:
        yield (
            f"learner.lr = {config.learner.lr:g}: an AdamW update changes every weight by about this much, which is "
            "more than most weights: write 1e-3 or less, 1e-6 to 1e-5 for a whole language model"
        )
    if config.learner.dtype == "bfloat16":
        yield "learner.dtype = 'bfloat16' rounds small updates away: write compute_dtype = 'bfloat16' instead"
    elif config.critic is not None and config.critic.dtype == "bfloat16":
        yield "critic.dtype = 'bfloat16' rounds small updates away: write learner.compute_dtype = 'bfloat16' instead"
    if config.learner.optimizer_dtype == "bfloat16" and config.learner.betas[1] > MOST_ROUNDED_BETA:
        yield (
            f"learner.optimizer_dtype = 'bfloat16' with betas[1] = {config.learner.betas[1]:g}: the second moment "
            f"cannot fall, because its changes are rounded away: write at most {MOST_ROUNDED_BETA}, or float32"
        )
    proximal = config.loss.weight and "proximal" in config.loss.spec.takes
    if proximal and config.learner.minibatches * config.learner.epochs == 1:
        yield (
            f'loss.kind = "{config.loss.kind}" clips the steps of an update around its first, and there is one: set '
            "learner.minibatches, or learner.epochs"
        )


def precision_notes(config: Config, facts: Facts) -> Iterator[str]:
    yield from precision_advice(config, facts)[0]


def precision_warnings(config: Config, facts: Facts) -> Iterator[str]:
    yield from precision_advice(config, facts)[1]


def library_warnings(config: Config, facts: Facts) -> list[str]:
    return version_warnings(facts.versions(NEWEST_TESTED))


def precision_advice(config: Config, facts: Facts) -> tuple[list[str], list[str]]:
    """Return notes and warnings about number formats (of all matrix products) that are slow on this processor.

    None if other processors compute, or if matrices are so small that formats hardly matter.
    """
    text, formats = facts.student.text, formats_of(config)
    width, inner = int(text.hidden_size), inner_width(text)
    elsewhere = not on_cpu(config, facts) or config.runtime.address is not None
    if elsewhere or width * inner < LARGE or not {"float32", "bfloat16"} & set(formats.values()):
        return [], []
    speed = facts.speed_of_bfloat16(width, inner)
    slow = "float32" if speed >= FASTER else "bfloat16"
    keys = [key for key, dtype in formats.items() if dtype == slow]
    if SLOWER <= speed < FASTER or not keys:
        return [], []
    fast = {"float32": "bfloat16", "bfloat16": "float32"}[slow]
    advice = (
        f"on this processor bfloat16 is {speed:.1f}× as fast as float32 in products with the student's matrices: write "
        + ", ".join(f'{key} = "{fast}"' for key in keys)
    )
    return ([f"{advice} for speed"], []) if speed >= FASTER else ([], [advice])


def version_warnings(installed: Mapping[str, str]) -> list[str]:
    """Return a warning for each library whose minor version is newer than the newest tested one."""
    return [
        f"{library} {installed[library]} is newer than {tested}, the newest version that was tested: if a check of "
        f"a model fails, run pip install '{library}=={tested}.*'"
        for library, tested in NEWEST_TESTED.items()
        if library in installed and _minor(installed[library]) > _minor(tested)
    ]


def _minor(release: str) -> tuple[int, int]:
    major, minor, *_ = release.split(".")
    return int(major), int(minor)


def formats_of(config: Config) -> dict[str, str]:
    """Return the number formats of all matrix products of native engines in this run, by their key."""
    learner, formats = config.learner, dict[str, str]()
    if config.sampler.engine == "native":
        formats["sampler.dtype"] = config.sampler.dtype
    native = {name: each for name, each in config.teachers.items() if each.base_url is None and each.engine == "native"}
    formats |= {f"teachers.{name}.dtype": each.dtype for name, each in native.items()}
    return formats | {"learner.compute_dtype": learner.compute_dtype or learner.dtype}


def vllm_notes(config: Config, facts: Facts) -> Iterator[str]:
    if config.sampler.engine != "vllm" or config.runtime.device == "cpu" or not facts.student.experts:
        return
    if sampler_settings(config).args.get("moe_backend") != "triton":
        yield (
            "note: vLLM's kernel of experts must keep their layout, or the run stops as it starts: on other GPUs than "
            'Hopper write sampler.engine_args = { moe_backend = "triton" }'
        )


def quantisation_notes(config: Config, facts: Facts) -> Iterator[str]:
    """Yield a line about rollouts of the quantised student, and about the part of the loss with the ratio to it."""
    kind, comparison = config.sampler.quantisation, first_ratio_to_sampler(config)
    if config.learner.quantised:
        yield f'sampler.quantisation = "{kind}": the learner computes with {kind} weights, too'
    elif kind is not None:
        corrected = f"{comparison[0]} the ratio to it" if comparison else "nothing in the loss holds the ratio to it"
        opening = f'sampler.quantisation = "{kind}": rollouts are of another policy, the student with {kind} weights; '
        yield opening + corrected


def schedule_notes(config: Config, facts: Facts) -> Iterator[str]:
    if reason := whole_batch_reason(config, method_of(config)):
        yield f"periodic: an update learns when all its groups are scored, because {reason}"


def whole_batch_reason(config: Config, method: Method) -> str:
    """Return why a periodic schedule learns only when all groups of an update are there; empty if it need not wait.

    Groups that are learned from as they come cannot be compared with later ones, and share one divisor (invariant 5).
    """
    if not config.schedule.learns_as_ready:
        return ""
    if config.learner.minibatches * config.learner.epochs > 1:
        return "learner.minibatches and learner.epochs make several steps of an update"
    if config.learner.router_aux is not None:
        return "learner.router_aux looks at the whole batch"
    if config.guards.ess is not None and method.correction.is_level is not None:
        return "guards.ess looks at the whole batch"
    for part, scope in method.scopes.items():
        if scope == "batch":
            return f"{part} looks at the whole batch"
    if method.policy is not None and method.policy.aggregation == "token-sum":
        return 'policy.aggregation = "token-sum" is divided by nothing'
    if not method.weighs_all:
        return "[freshness] divides by a mean over the weights of an update, and a part of the loss is not weighed"
    by_sequences = [method.over_samples] if method.loss.weight or method.anchored else []
    if method.policy is not None:
        by_sequences.append(method.over_sequences)
    if method.reference is not None and method.reference.into == "loss":
        by_sequences.append(method.aggregation.startswith("seq"))
    return "parts of the loss are divided by tokens, and others by sequences" if len(set(by_sequences)) > 1 else ""


Lines = Callable[[Config, Facts], Iterable[str]]
NOTES: tuple[tuple[Lines, str], ...] = (
    (vllm_notes, "shapes"),
    (model_notes, "shapes"),
    (clip_notes, "shapes"),
    (freshness_notes, "shapes"),
    (off_policy_notes, "shapes"),
    (running_notes, "machine"),
    (quantisation_notes, "shapes"),
    (schedule_notes, "shapes"),
    (precision_notes, "machine"),
)
"""Functions that return notes, with the facts that they need (see `rules.Rule`)."""
WARNINGS: tuple[tuple[Lines, str], ...] = (
    (setting_warnings, "shapes"),
    (precision_warnings, "machine"),
    (beyond_embeddings, "files"),
    (library_warnings, "packages"),
)


def lines_of(table: tuple[tuple[Lines, str], ...], config: Config, facts: Facts) -> list[str]:
    """Return the lines of all functions whose facts are there."""
    return [line for function, needs in table if needs in facts.kinds for line in function(config, facts)]
