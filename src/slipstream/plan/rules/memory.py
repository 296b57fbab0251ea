"""Rules about memory: what every engine of a plan needs must fit its device and the host."""

from collections.abc import Sequence

from slipstream.config.running import RuntimeConfig
from slipstream.errors import ConfigError
from slipstream.plan.engine_plans import EnginesPlan, LearnerPlan, SamplerPlan
from slipstream.plan.facts import Facts
from slipstream.plan.placement import (
    Need,
    hidden_states,
    host_memory,
    memory,
    needs,
    other_loss,
    pass_tokens,
    record_lines,
    sampler,
    size,
)

LESS_MEMORY = "use smaller models, fewer sampler.slots, learner.lora, learner.checkpointing, or more devices"


def room_warnings(plan: EnginesPlan, facts: Facts) -> list[str]:
    """Check the memory of this machine, or that of the run's GPUs if it is known; return warnings."""
    if facts.gpus is None:
        return check_room(plan) if "machine" in facts.kinds else []
    return check_room(plan, room) if (room := facts.gpus.room(plan.runtime)) else []


def check_room(plan: EnginesPlan, room: tuple[float, float] | None = None) -> list[str]:
    """Raise ConfigError if the exact parts exceed the memory; return warnings if exact and estimated parts do.

    `room`: bytes of memory of each GPU and of all GPUs of the run. None: the memory of this machine.
    """
    if room is None and plan.runtime.address is not None:  # the devices are on a cluster
        return []
    needed, (each, available) = needs(plan, gpu=None if room is None else True), room or memory(plan.runtime)
    check_longest(plan.learner, needed[0], each)
    for need in needed:
        if need.counted > each * need.share:
            raise ConfigError(f"{need}, and its device has {size(each * need.share)}: {need.advice}")
    if room is None:
        check_host(needed, plan)
        check_update(plan)
    if not plan.runtime.time_share and (counted := sum(need.counted * need.devices for need in needed)) > available:
        hint = ", or runtime.time_share" if plan.runtime.kind == "inline" and plan.runtime.device != "cpu" else ""
        raise ConfigError(
            f"all engines together need {size(counted)}, and there are {size(available)}: {LESS_MEMORY}{hint}"
        )
    tight = [
        f"{need}, and its device has {size(each * need.share)}: {need.advice}"
        for need in needed
        if need.total > each * need.share
    ]
    if room is None and hidden_states(plan) > host_memory():
        tight += [f"{line}; there are {size(host_memory())}" for line in record_lines(plan)]
    if plan.runtime.time_share:
        return tight
    if not tight and (wanted := sum(need.total * need.devices for need in needed)) > available:
        tight = [f"all engines together need about {size(wanted)}, and there are {size(available)}: {LESS_MEMORY}"]
    return tight


def check_update(plan: EnginesPlan) -> None:
    """Raise ConfigError if the hidden states of one update exceed the host memory."""
    method, batch = plan.learner.method, plan.learner.settings.batch_size
    most, room = hidden_states(plan, batch * method.max_tokens), host_memory()
    if most > room:
        raise ConfigError(
            f"the hidden states of an update of {batch} samples need up to {size(most)}, and there are {size(room)} of "
            f"host memory: write {other_loss(plan)}, or lower learner.batch_size or sampler.max_tokens"
        )


def check_longest(plan: LearnerPlan, need: Need, room: float) -> None:
    """Raise ConfigError if the longest sequence alone does not fit the learner's device."""
    longest, per_token = plan.student.max_length, need.parts["~activations"] / pass_tokens(plan)
    left = room - need.counted
    if longest is None or left <= 0 or longest * per_token <= left:
        return
    ways = ["a smaller sampler.max_tokens", "more learner.ranks"]
    if plan.settings.lora is None:
        ways.insert(0, "learner.lora")
    if "optimizer" not in plan.settings.offload:
        ways.insert(0, 'learner.offload = ["optimizer"]')
    if not plan.settings.checkpointing:
        ways.insert(0, "learner.checkpointing = true")
    elif "activations" not in plan.settings.offload:
        ways.insert(0, 'learner.offload = ["activations"]')
    raise ConfigError(
        f"learner: a sequence may have {longest:,} tokens, and about {int(left / per_token):,} fit its device, because "
        f"{size(need.counted)} of {size(room)} hold weights and states; a sequence is not split over ranks: write "
        f"{', '.join(ways[:-1])} or {ways[-1]}"
    )


def check_host(needed: Sequence[Need], plan: EnginesPlan) -> None:
    """Raise ConfigError if the host memory does not suffice for all that waits in it."""
    turns, ranks = plan.runtime.time_share, plan.learner.settings.ranks
    parked = [need.parked for need in needed]
    if turns and plan.runtime.kind == "local":  # all ranks wait, or all samplers
        parked = [sum(parked[:ranks]), sum(parked[ranks : ranks + plan.sampler.replicas])]
    most = sum(need.kept for need in needed) + (sum(parked) - min(parked) if turns else 0)
    if most > host_memory():
        what = "engines that wait for their turn" if turns else "weights and states in host memory"
        raise ConfigError(
            f"{what} need {size(most)} of host memory, and there are {size(host_memory())}: "
            "use smaller models, learner.lora or more memory"
        )


def check_alone(plan: SamplerPlan, device: str) -> None:
    """Raise ConfigError if an evaluation's sampler does not fit into the device's memory."""
    need, (each, _) = Need("sampler", device, sampler(plan)), memory(RuntimeConfig(kind="inline", device=device))
    if need.counted > each:
        raise ConfigError(f"{need}, and its device has {size(each)}: lower -n or --max-tokens")
