"""Rules between the config and its models: their files, sizes, adapters and layers. No weight is loaded."""

from collections.abc import Mapping
from typing import Any

from slipstream.config.engines import ENGINES
from slipstream.config.learner import LoraConfig
from slipstream.config.losses import DistillationLoss
from slipstream.config.schema import Config
from slipstream.data.tokenizers import check_same_vocabulary
from slipstream.engines.native.config import check_there
from slipstream.engines.sampling_options import centre_size
from slipstream.errors import ConfigError, ModelError
from slipstream.models.resolve import model_path
from slipstream.plan.facts import Facts, ModelFacts
from slipstream.plan.lengths import sampler_context, teacher_context
from slipstream.plan.placement import adapted, shape_of


def check_adapter_engines(config: Config, facts: Facts) -> None:
    """Raise ConfigError if an adapter is a model of an engine that takes only whole models."""
    engines: list[tuple[ModelFacts, str]] = [
        (facts.teachers[name], config.teachers[name].engine) for name in facts.teachers
    ]
    if config.sampler.engine != "vllm":  # its sampler takes the adapters that a learner trains, and so the student's
        engines.append((facts.student, config.sampler.engine))
    for model, engine in engines:
        if not ENGINES[engine].loads_adapters and model.is_adapter:
            what = {"vllm": "vLLM", "server": "a rollout server"}[engine]
            raise ConfigError(
                f'{model.name} is an adapter, and {what} takes only whole models here: write engine = "native"'
            )


def check_models(config: Config, facts: Facts) -> None:
    """Check that models are there, and that their attention heads can be split as vLLM's arguments ask."""
    for model in facts.models:
        check_there(model.name)
    check_split_heads(facts.student, config.sampler.engine_args, "sampler")
    for name, teacher in config.teachers.items():
        if teacher.engine_args:
            check_split_heads(facts.teachers[name], teacher.engine_args, f"teachers.{name}")
        if teacher.tokenizer is not None:
            model_path(teacher.tokenizer)


def check_split_heads(model: ModelFacts, args: Mapping[str, Any], section: str) -> None:
    """Raise ConfigError if tensor parallelism by these arguments of vLLM would cut an attention head."""
    devices, where = args.get("tensor_parallel_size", 1), f"{section}.engine_args.tensor_parallel_size"
    if devices == 1:
        return
    heads = getattr(model.text, "num_attention_heads", None) or devices
    if heads % devices:
        fitting = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
        raise ConfigError(
            f"{where} = {devices} does not divide the {heads} heads of {model.name}: write one of {fitting}"
        )


def check_heads(config: Config, facts: Facts) -> None:
    """Raise ModelError if attention heads cannot share heads of keys and values, or do not divide the width."""
    for model in facts.models:
        name, text = model.name, model.text
        heads, grouped = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
        if heads and grouped and heads % grouped:
            raise ModelError(f"{name}: {heads} attention heads cannot share {grouped} heads of keys and values evenly")
        if heads and not getattr(text, "head_dim", None) and text.hidden_size % heads:
            raise ModelError(f"{name}: a width of {text.hidden_size} cannot be divided by {heads} attention heads")


def check_contexts(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a length that the config sets exceeds the context of its model."""
    settings = {"sampler": (config.sampler.max_length, sampler_context(config, facts), facts.student)}
    for name, model in facts.teachers.items():
        settings[f"teachers.{name}"] = config.teachers[name].max_length, teacher_context(config, facts, name), model
    for section, (longest, context, model) in settings.items():
        if longest is not None and longest > context:
            raise ConfigError(
                f"{section}.max_length = {longest} exceeds the context of {context} of {model.name}: lower it"
            )


def check_reward_model(config: Config, facts: Facts) -> None:
    """Raise ConfigError if task.model is no model whose only label is a reward."""
    if (model := config.task.model) is None:
        return
    check_there(model.path)
    files = ModelFacts(model.path)
    names = files.config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"task.model.path: {model.path} holds {', '.join(names) or 'another model'}: a reward model is one for "
            "sequence classification"
        )
    if files.config.num_labels != 1:
        raise ConfigError(f"task.model.path: {model.path} has {files.config.num_labels} labels: a reward model has one")
    if model.max_length is not None and model.max_length > files.context:
        raise ConfigError(
            f"task.model.max_length = {model.max_length} exceeds the context of {files.context} of {model.path}"
        )


def check_weights(config: Config, facts: Facts) -> None:
    """Raise ModelError unless all weight files exist. Read those of vLLM teachers: vLLM does not check for NaN."""
    from slipstream.engines.native.files import check_complete, read_through
    from slipstream.engines.native.files import check_quantisation as check_stored_format

    native = {model for name, model in facts.teachers.items() if config.teachers[name].engine == "native"}
    for model in facts.models:
        if model in (facts.student, facts.critic) or model in native:  # the learner always is native
            check_stored_format(model.name)
    for model in facts.models:
        check_complete(model.name)
    for name, model in facts.teachers.items():
        if not ENGINES[config.teachers[name].engine].checks_weights:
            read_through(model.name)


def check_base_precision(config: Config, facts: Facts) -> None:
    """Raise ConfigError if engines round the weights beside the adapters differently, which no publish contains."""
    from slipstream.engines.native.files import only_bfloat16

    if config.learner.lora is None or config.learner.dtype != "bfloat16":
        return
    dtypes = {"sampler": config.sampler.dtype}
    dtypes |= {f"teachers.{name}": each.dtype for name, each in config.teachers.items() if each.follow is not None}
    other = next((name for name, dtype in dtypes.items() if dtype != "bfloat16"), None)
    if other is not None and not only_bfloat16(config.student):
        raise ConfigError(
            f'[learner.lora] publishes adapters alone: learner.dtype = "bfloat16" rounds the other weights of '
            f'{config.student}, and {other}.dtype = "{dtypes[other]}" does not: write "bfloat16" there, too, or '
            'learner.compute_dtype = "bfloat16" instead of learner.dtype'
        )


def check_adapters(config: Config, facts: Facts) -> None:
    """Check that adapters fit the models that learn, and that every model that is an adapter fits its base model."""
    from slipstream.engines.native.adapters import check_base
    from slipstream.engines.native.files import empty_model

    for model in facts.models:
        if model.adapter is not None:
            check_base(model.adapter, empty_model(model.name))
    critic = config.critic
    check_lora(facts.student, config.learner.lora, "learner.lora")
    if critic is not None and facts.critic is not None:
        if critic.lora is not None and facts.critic.is_adapter:
            raise ConfigError(
                f"critic.lora: {critic.model} is an adapter, which is merged before training: write its base model, or "
                "drop critic.lora"
            )
        check_lora(facts.critic, critic.lora, "critic.lora")


def check_lora(model: ModelFacts, lora: LoraConfig | None, where: str) -> None:
    """Check that the adapters of a section fit a model, and the adapter that the model is."""
    if lora is None:
        return
    layers, begun = adapted(model.name, lora, where), model.adapter
    if not layers:
        raise ConfigError(f"{where}: {model.name} has no linear layers beside its head: drop [{where}]")
    most = max(min(part.in_features, part.out_features) for part in layers.values())
    if lora.rank > most:
        raise ConfigError(
            f"{where}.rank = {lora.rank} is more than the width of any of these layers of {model.name}: write {most} "
            f"or less, or drop [{where}] to train all weights"
        )
    if begun and (other := sorted(layers.keys() ^ begun.layers.keys())):
        raise ModelError(
            f"{model.name}: has an adapter for some of the layers named {other[0].rpartition('.')[2]}, but none for "
            f"{other[0]}, which cannot be trained here: merge the adapter into its base model"
        )


def check_vocabulary(config: Config, facts: Facts) -> None:
    """Raise ConfigError if more tokens are compared at a position than the vocabularies have."""
    vocabulary = facts.student.vocabulary
    own = [model for name, model in facts.teachers.items() if config.teachers[name].spelling == "own"]
    losses: dict[str, DistillationLoss] = {"loss": config.loss} if config.loss.weight else {}
    if config.sft is not None:
        losses["sft.loss"] = config.sft.loss
    for name, loss in losses.items():
        if loss.spec.k > (most := min([vocabulary, *(model.vocabulary for model in own)])):
            raise ConfigError(f"{name}.k = {loss.spec.k} is more than the vocabulary of {most}: write that or less")
    for kind, key in ("top_k", "policy.centre_size"), ("support", "sampler.top_k"):
        if (best := centre_size(config, kind)) > vocabulary:
            raise ConfigError(f"{key} = {best} is more than the vocabulary of {vocabulary}: write that or less")
    if config.sampler.teacher_replaces >= vocabulary:
        raise ConfigError(
            f"sampler.teacher_replaces = {config.sampler.teacher_replaces} replaces no token, because the vocabulary "
            f"has {vocabulary}: write less"
        )


def check_quantisation(config: Config, facts: Facts) -> None:
    if config.sampler.quantisation is None:
        return
    student = facts.student
    if student.is_adapter:
        raise ConfigError(
            f"sampler.quantisation quantises published weights, and {student.name} is an adapter, which is published "
            "alone: drop it"
        )
    if not student.linear:
        raise ConfigError(f"sampler.quantisation: {student.name} has no linear layers beside its head: drop it")


def check_router(config: Config, facts: Facts) -> None:
    """Raise ConfigError if [learner] names routers that the student does not have, or a loss that it lacks."""
    learner, student = config.learner, facts.student
    for key in learner.changed("router", "router_aux"):
        if not student.experts:
            raise ConfigError(f"learner.{key} is for a mixture of experts, and {student.name} has no experts: drop it")
    if learner.router_aux is not None and getattr(student.text, "router_aux_loss_coef", None) is None:
        raise ConfigError(
            f"learner.router_aux: the config of {student.name} has no router_aux_loss_coef, as its routers are not "
            "balanced by this loss: drop it"
        )


def check_speculation(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a model that a sampler runs has states, which tokens that are not accepted would change."""
    if config.sampler.speculation is None:
        return
    teachers = config.sampler.asks_teacher or "teacher" in config.offpolicy_sources
    models = (facts.student, *facts.teachers.values()) if teachers else (facts.student,)
    if model := next((model for model in models if model.is_recurrent), None):
        raise ConfigError(
            f"sampler.speculation: {model.name} has recurrent layers, whose states cannot forget a proposed token "
            "that is not accepted: drop it"
        )


def check_dropout(config: Config, facts: Facts) -> None:
    if not config.learner.dropout:
        return
    settings = facts.student.text.to_dict().items()
    if not any(value > 0 for name, value in settings if "drop" in name and isinstance(value, float)):
        raise ConfigError(f"learner.dropout does nothing: the config of {config.student} names none; drop it")


def check_critic(config: Config, facts: Facts) -> None:
    """Raise ModelError if the token ids of the critic's own model differ from the student's."""
    if (critic := facts.critic) is not None:
        names, hint = (config.student, critic.name), "write a critic.model with the student's tokenizer"
        check_same_vocabulary(facts.student.tokenizer, critic.tokenizer, names=names, other="critic", hint=hint)


def check_selection(config: Config, facts: Facts) -> None:
    """Raise ConfigError if sequences are so long that a sparse attention selects keys by scores with ties."""
    lengths = {"learner": (facts.student, config.sampler.max_length)}
    if facts.critic is not None:
        lengths["critic"] = facts.critic, config.sampler.max_length
    for name, model in facts.teachers.items():
        if config.teachers[name].engine == "native":
            lengths[f"teachers.{name}"] = model, config.teachers[name].max_length
    for where, (model, max_length) in lengths.items():
        most = model.attended
        if most is not None and max_length is not None and max_length > most:
            raise ConfigError(
                f"{where}: sequences have up to {max_length} tokens, and {model.name} attends to {most} selected keys: "
                "beyond that the log-probs of a sequence depend on the others in its pass: lower sampler.max_tokens, "
                "or use shorter prompts"
            )


def check_embeddings(config: Config, facts: Facts) -> None:
    """Raise ModelError if the critic's model, or a teacher that reads the student's tokens, has fewer embeddings."""
    if facts.critic is not None and facts.critic.vocabulary < facts.student.vocabulary:
        ours, theirs = facts.student.vocabulary, facts.critic.vocabulary
        raise ModelError(
            f"critic.model: {facts.critic.name} has {theirs} embeddings, {config.student} has {ours}: the critic "
            "could not read all tokens that the student may sample: write a model with the student's tokenizer"
        )
    for name, teacher in facts.teachers.items():
        ours, theirs = facts.student.vocabulary, teacher.vocabulary
        if ours > theirs and config.teachers[name].spelling == "same":
            raise ModelError(
                f"teachers.{name}: {teacher.name} has {theirs} embeddings, {config.student} has {ours}: the teacher "
                "could not score all tokens that the student may sample"
            )


def check_layers(config: Config, facts: Facts) -> None:
    """Raise ConfigError if a teacher is split over more devices than it has layers."""
    for name, teacher in facts.teachers.items():
        devices = config.teachers[name].devices
        if devices > 1 and devices > (most := len(shape_of(teacher.name).sizes[1])):
            raise ConfigError(
                f"teachers.{name}.devices = {devices}: {teacher.name} has {most} layers to split: write {most} or less"
            )
