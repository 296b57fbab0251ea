"""Rules between the sampler, the learner, the environment, the clock and the runtime."""

from slipstream.config.base import HALVES
from slipstream.config.engines import ENGINES, reserved
from slipstream.config.sections import Clashes, Sections


def batches(c: Sections) -> Clashes:
    group, batch = c.sampler.group, c.learner.batch_size
    if batch % group:
        yield f"learner.batch_size = {batch} is not a multiple of sampler.group = {group}"


def features(c: Sections) -> Clashes:
    """Yield what an engine refuses, and settings of weights that exclude each other."""
    bounded = {"keep_mask"} if c.sampler.engine == "vllm" and c.sampler.top_k else set[str]()
    for feature, why in ENGINES[c.sampler.engine].sampler_refuses.items():
        if feature in c.sampler_features - bounded:
            yield why
    if c.sampler.quantisation is not None and c.learner.lora is not None:
        yield "[learner.lora] publishes adapters, and sampler.quantisation quantises published weights: drop one"
    if c.learner.quantised and c.sampler.quantisation is None:
        yield 'learner.quantised rounds as the sampler does: write sampler.quantisation = "int8"'


def sampling(c: Sections) -> Clashes:
    for where, each in c.workers.items():
        yield from reserved(where, "student" if where == "sampler" else f"{where}.model", each.engine_args)
    if c.sampler.keep_mask and not c.sampler.truncation:
        yield "sampler.keep_mask does nothing: top_p, top_k and min_p leave out no token; drop it"
    if c.sampler.speculation is not None and c.sampler.max_tokens < 3:
        yield (
            "sampler.speculation proposes tokens between the first and the last of a response, and "
            f"sampler.max_tokens = {c.sampler.max_tokens} leaves none: drop it"
        )
    if c.sampler.on_publish == "reuse" and getattr(c.schedule, "on_publish", None) != "keep":
        yield (
            'sampler.on_publish = "reuse" does nothing: no response continues under new weights; drop it, or write '
            'schedule.kind = "async" with on_publish = "keep"'
        )
    if c.sampler.group > c.sampler.slots:
        yield f"sampler.group = {c.sampler.group} needs sampler.slots of at least {c.sampler.group}"


def limits(c: Sections) -> Clashes:
    if c.task.overlong is not None and c.task.overlong.buffer > c.sampler.max_tokens:
        yield (
            f"task.overlong.buffer = {c.task.overlong.buffer} is more than sampler.max_tokens = "
            f"{c.sampler.max_tokens}: every response would be punished; lower it"
        )
    if c.runtime.kind != "ray" and c.runtime.address is not None:
        yield 'runtime.address names a Ray cluster: write runtime.kind = "ray", or drop one of them'
    if c.runtime.kind == "inline" and c.most_workers:
        yield (
            'replicas = "auto": with runtime.kind = "inline" no worker can be added: write a number, or '
            'runtime.kind = "local"'
        )


def learner(c: Sections) -> Clashes:
    learner, groups = c.learner, c.new_groups
    if groups % learner.minibatches:
        yield (f"learner.minibatches = {learner.minibatches} does not divide the {groups} groups of an update")
    if groups // learner.minibatches < learner.ranks:
        yield (
            f"learner.ranks = {learner.ranks} is more than the {groups // learner.minibatches} groups of one step: "
            "some would have nothing to do; lower it, or raise learner.batch_size"
        )
    narrow, weights = learner.compute_dtype, {"learner": learner.dtype}
    if c.critic is not None and c.critic.dtype is not None:
        weights["critic"] = c.critic.dtype
    other = "float32" if narrow in HALVES else narrow
    for where, wide in weights.items():
        if narrow not in (None, wide) and not (wide == "float32" and narrow in HALVES):
            yield (
                f'learner.compute_dtype = "{narrow}" does nothing over weights in {wide}: autocast makes products of '
                f'float32 weights in bfloat16 or float16, and no others; drop it, or write {where}.dtype = "{other}"'
            )
    for name in ("dtype", "optimizer_dtype"):
        if getattr(learner, name) == "float16":
            yield (
                f'learner.{name} = "float16" would round small steps and squares of gradients to 0: write '
                f'"float32", and learner.compute_dtype = "float16"'
            )
    distils = c.loss.weight > 0 and getattr(c.loss, "use", "loss") != "advantage"
    if learner.perturbation is not None and (distils or c.sft is not None):
        yield (
            '[learner.perturbation] is for policy losses: write loss.weight = 0 or loss.use = "advantage", and no [sft]'
        )
    if learner.perturbation is not None and learner.ranks > 1:
        yield "[learner.perturbation] needs learner.ranks = 1: drop it"
    if learner.ranks > 1 and c.runtime.kind == "inline":
        yield 'learner.ranks needs a process for each: write runtime.kind = "local"'


def server(c: Sections) -> Clashes:
    sampler, server = c.sampler, c.sampler.server
    if sampler.engine != "server":
        return
    if server is None:
        yield (
            'sampler.engine = "server" needs [sampler.server]: write url = "http://HOST:PORT" and folder = '
            '"/SHARED/DIRECTORY"'
        )
        return
    if sampler.replicas != 1:
        yield (
            "sampler.replicas: one sampler serves a whole server: drop it, and start the server with data "
            "parallelism (vLLM: --data-parallel-size, SGLang: --dp-size)"
        )
    if sampler.truncation and server.api == "sglang":
        yield (
            f"sampler.{sampler.truncation[0]}: SGLang gives log-probs before truncation: drop it, or write "
            'sampler.server.api = "vllm"'
        )


def environment(c: Sections) -> Clashes:
    if c.environment is not None and c.environments:
        yield "[environment] and [environments] exclude each other: move [environment] to [environments.NAME]"
    if not c.every_environment and "environment" in c.task.reward:
        yield 'task.reward = "environment" is the reward of an environment: add [environment]'
    for name, each in c.every_environment.items():
        where, limit = f"environments.{name}" if name else "environment", c.sampler.max_tokens
        if each.gateway is not None and each.gateway.listen is not None:
            if name:
                yield f"{where}.gateway.listen is for agents of one environment: write it as [environment.gateway]"
            if c.sampler.replicas != 1:
                yield f"{where}.gateway.listen is one port, of one sampler: drop sampler.replicas"
        if each.turn_tokens is not None and each.turn_tokens >= limit:
            yield (
                f"{where}.turn_tokens = {each.turn_tokens} does nothing: sampler.max_tokens = {limit} "
                "is for a whole episode; write less, or drop it"
            )


def clock(c: Sections) -> Clashes:
    if c.runtime.clock == "real":
        return
    if c.sampler.speculation is not None:
        yield 'runtime.clock = "modelled" has no cost for sampler.speculation: drop one of them'
    for where, each in c.workers.items():
        if not ENGINES[each.engine].keeps_modelled_time:
            yield (
                f'{where} runs in real time: with runtime.clock = "modelled" write engine = "native" without base_url'
            )
    if c.task.model is not None or c.task.judge is not None:
        yield ('the rewards "model" and "judge" take real time: write runtime.clock = "real", or another task.reward')
    if c.has_agents:
        yield ('agents on environment.gateway run in real time: write runtime.clock = "real", or drop the gateway')


def time_share(c: Sections) -> Clashes:
    """Yield what prevents engines from taking turns: all of them on one device, or samplers and ranks on several."""
    if not c.runtime.time_share:
        return
    if c.runtime.kind == "ray":
        yield 'runtime.time_share is for the devices of one machine: write runtime.kind = "local"'
    if c.runtime.clock == "modelled":
        yield 'runtime.clock = "modelled" has no cost for runtime.time_share: drop one of them'
    if not c.schedule.serial:
        yield (
            f'runtime.time_share lets one engine work at a time, and the stages of schedule.kind = "'
            f'{c.schedule.kinds()[0]}" overlap: write schedule.kind = "sync"'
        )
    if c.runtime.kind == "local":  # teachers have devices of their own
        if c.sampler.engine == "server" or (c.sampler.engine == "vllm" and c.runtime.device == "cpu"):
            yield f'runtime.time_share cannot move sampler.engine = "{c.sampler.engine}" here: write "native"'
        return
    for where, each in c.workers.items():
        if getattr(each, "base_url", None) is not None:
            yield f"runtime.time_share cannot move {where}, which is an endpoint: drop one of them"
        if each.engine != "native":
            yield (
                f'runtime.time_share cannot move {where}.engine = "{each.engine}": write "native", or drop '
                "runtime.time_share"
            )
        for option in ("replicas", "devices"):
            if getattr(each, option, 1) != 1:
                yield f"runtime.time_share has one device and one worker of each kind: drop {where}.{option}"
