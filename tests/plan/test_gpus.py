"""GPUs and memory of a plan, by hand arithmetic: sums, workers that must be on one machine, and unused GPUs."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, Qwen3Config

from slipstream.cli import main
from slipstream.config.file import parse
from slipstream.config.schema import Config
from slipstream.engines.vllm import VERSION
from slipstream.engines.vllm.core import Settings
from slipstream.errors import ConfigError
from slipstream.objective.method import method_of
from slipstream.plan.completion import with_lengths
from slipstream.plan.engine_plans import EnginesPlan, ModelPlan
from slipstream.plan.engines import engines_of, scorer_settings
from slipstream.plan.facts import Facts
from slipstream.plan.gpus import Crew, Gpus, crews_of, needed, problem, sum_line, unused_line
from slipstream.plan.lengths import teacher_context
from slipstream.plan.placement import Need, needs
from slipstream.plan.plan import check_shapes
from slipstream.planning.planner import PlannedConfig, Split, splits
from slipstream.runtimes.workers import worker_specs

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(teacher: dict[str, Any], **tree: Any) -> Config:
    return parse({"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"} | teacher}} | tree)


def engines(teacher: dict[str, Any], **tree: Any) -> EnginesPlan:
    config = config_of(teacher, **tree)
    return engines_of(config, method_of(config))


VLLM = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "replicas": 2}


@pytest.mark.parametrize(
    ("teacher", "sampler", "expected"),
    [
        ({}, {}, "5 GPUs are needed (learner 3, sampler 1, teacher main 1)"),
        ({"devices": 2, "replicas": 3}, {}, "10 GPUs are needed (learner 3, sampler 1, teacher main 3 × 2 = 6)"),
        (VLLM, {}, "12 GPUs are needed (learner 3, sampler 1, teacher main 2 × 4 = 8)"),
        (
            {"model": "m", "base_url": "http://host:1/v1"},
            {"engine": "vllm", "engine_args": {"tensor_parallel_size": 4}, "replicas": 2},
            "11 GPUs are needed (learner 3, sampler 2 × 4 = 8)",
        ),
    ],
)
def test_gpus_are_counted_by_kind_of_worker(
    teacher: dict[str, Any], sampler: dict[str, Any], expected: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    plan = engines(teacher, sampler=sampler, learner={"ranks": 3}, loss={"kind": "forward_kl", "cache": "teacher_topk"})
    crews = crews_of(plan)
    assert sum_line(crews) == expected
    assert sum(place.computes for place in worker_specs(plan, tokenizer)) == needed(crews)


@pytest.mark.parametrize(
    ("crews", "machines", "why"),
    [
        # two teachers of verl's page on placement: they straddle its machines in order, and fit them in another order
        ([Crew("teacher a", 2, 3), Crew("teacher b", 2, 5)], [8, 8], ""),
        ([Crew("teacher a", 2, 2), Crew("teacher b", 3, 4)], [8, 8], ""),
        ([Crew("teacher a", 3, 5)], [8, 8], "no room for teacher a 3 × 5 = 15, although 16 GPUs are enough"),
        ([Crew("learner", 1, 1), Crew("teacher a", 1, 16)], [8, 16], ""),
        ([Crew("learner", 1, 1), Crew("teacher a", 1, 12)], [8, 8], "12 GPUs on one machine, and the largest machine"),
        ([Crew("learner", 9, 1)], [8], "9 GPUs are needed (learner 9), there are 8"),
        ([Crew("sampler", 3, 2), Crew("learner", 2, 1)], [3, 3, 2], ""),
        ([Crew("sampler", 4, 2)], [3, 3, 2], "machines with 3, 3, 2 GPUs have no room for sampler 4 × 2 = 8"),
    ],
)
def test_workers_that_do_not_fit_are_told(crews: list[Crew], machines: list[int], why: str) -> None:
    found = problem(crews, machines)
    assert why in found and bool(why) == bool(found)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    machines=st.lists(st.integers(0, 8), min_size=1, max_size=3),
)
def test_workers_fit_exactly_if_some_distribution_exists(sizes: list[int], machines: list[int]) -> None:
    def fits(chosen: Sequence[int]) -> bool:
        held = [0] * len(machines)
        for size, machine in zip(sizes, chosen, strict=True):
            held[machine] += size
        return all(own <= room for own, room in zip(held, machines, strict=True))

    expected = any(fits(chosen) for chosen in product(range(len(machines)), repeat=len(sizes)))
    assert (problem([Crew("w", 1, size) for size in sizes], machines) == "") == expected


def test_unused_gpus_have_a_use() -> None:
    crews = crews_of(engines({"devices": 3}))  # learner 1, sampler 1, teacher 3
    assert unused_line(crews, [5]) == ""
    assert unused_line(crews, [8]) == (
        "3 of 8 GPUs are unused: there is room for sampler.replicas = 4 or teachers.main.replicas = 2"
    )
    # the second copy of the teacher has 4 GPUs left in all, on no machine 3 of them
    assert unused_line(crews, [5, 2, 2]) == "4 of 9 GPUs are unused: there is room for sampler.replicas = 5"


@pytest.mark.parametrize(("machines", "replicas"), [([8] * 128, 511), ([7] * 40, 120), ([999], 499)])
def test_many_gpus_are_distributed_at_once(machines: list[int], replicas: int) -> None:
    crews = [Crew("learner", 1, 1), Crew("sampler", 2, 2, "sampler.replicas")]
    assert problem(crews, machines) == ""
    assert unused_line(crews, machines).endswith(f"there is room for sampler.replicas = {replicas}")
    mixed = [Crew("teacher", 150, 3), Crew("sampler", 150, 2)]
    assert (problem(mixed, machines) == "") == (sum(machines) > 750), "sizes that do not divide each other"


@pytest.mark.parametrize("word", ["99999999999999999999", "8x9999999"])
def test_numbers_of_gpus_that_no_machine_has_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpus {word}: write the number of GPUs of each machine"):
        Gpus.parse([word])


def model_in(path: Path, layers: int) -> str:
    config = Qwen3Config(vocab_size=1000, num_hidden_layers=layers, head_dim=16, tie_word_embeddings=False, **SHAPE)
    config.save_pretrained(path)
    return str(path)


def test_a_teacher_needs_its_weights_over_its_devices(tmp_path: Path) -> None:
    name = model_in(tmp_path, layers=8)
    attention, norms = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 16, 2 * 64
    layer, outside = attention + norms + 3 * 64 * 128, 2 * 1000 * 64 + 64

    def need_of(teacher: dict[str, Any], **options: Any) -> Need:
        made = engines({"model": name} | teacher, loss={"kind": "reverse_kl_mc", "m": 1})
        return next(need for need in needs(made, **options) if need.name.startswith("teacher main"))

    for devices in (1, 2, 4):
        need = need_of({"devices": devices}, gpu=True)
        counts = [counted for counted in product(range(1, 9), repeat=devices) if sum(counted) == 8]
        most = min(max(outside + first * layer, *(more * layer for more in rest), 0) for first, *rest in counts)
        # the frequencies of rotary embeddings are a buffer, and count as weights
        assert need.parts["weights"] == pytest.approx(4 * most, rel=1e-3) and need.devices == devices
    split = need_of(VLLM, gpu=True)
    assert split.parts["weights"] == 4 * (8 * layer + outside) / 4
    assert f"{split}".startswith("teacher main-0: 4 GPUs, ") and "on each" in str(split)
    here = need_of({"devices": 2}, gpu=False)
    assert here.parts["weights"] == 4 * (8 * layer + outside) and here.devices == 1
    assert need_of(VLLM | {"engine_args": {"gpu_memory_utilization": 0.5}}, gpu=True).share == 0.5


def test_vllm_reserves_the_longest_sequence_of_the_run() -> None:
    config = with_lengths(config_of({"engine": "vllm"}), 30, {"main": 40})
    settings = scorer_settings(config, "main")
    assert settings.args == {"max_model_len": 41}  # it generates one token
    assert settings.where == "teachers.main.engine_args"
    assert settings.instead == "write teachers.main.engine = 'native'"
    own = with_lengths(
        config_of({"engine": "vllm", "max_length": 50, "engine_args": {"swap_space": 1}}), 30, {"main": 40}
    )
    assert scorer_settings(own, "main").args == {"max_model_len": 51, "swap_space": 1}
    given = config_of({"engine": "vllm", "engine_args": {"max_model_len": 64}})
    assert teacher_context(given, Facts(given), "main") == 63
    assert scorer_settings(with_lengths(given, 30, {"main": 63}), "main").args == {"max_model_len": 64}
    with pytest.raises(
        ConfigError, match=r"teachers.main.max_length = 39 is less than the longest prompt and response"
    ):
        with_lengths(config_of({"engine": "vllm", "max_length": 39}), 30, {"main": 40})


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size = 0 is no whole number of 1 or more"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size = '2' is no whole number of 1 or more"),
        ({"max_model_len": True}, "max_model_len = True is no whole number of 1 or more"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization = 1.5 is no share of a GPU's memory"),
        ({"dtype": "float16"}, "{section}.engine_args.dtype cannot be set: {section}.dtype sets it"),
        ({"data_parallel_size": 2}, "{section}.engine_args.data_parallel_size cannot be set: {section}.replicas sets"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode cannot be set: records would not match what vLLM did"),
    ],
)
@pytest.mark.parametrize("section", ["sampler", "teachers.main"])
def test_arguments_of_samplers_and_teachers_have_one_check(section: str, args: dict[str, Any], why: str) -> None:
    engine = {"engine": "vllm", "engine_args": args}
    with pytest.raises(ConfigError) as refused:
        config_of({}, sampler=engine) if section == "sampler" else config_of(engine)
    assert why.replace("{section}", section) in str(refused.value)


def test_what_only_one_of_them_may_set() -> None:
    with pytest.raises(ConfigError, match="sampler.engine_args.pipeline_parallel_size cannot be set"):
        config_of({}, sampler={"engine": "vllm", "engine_args": {"pipeline_parallel_size": 2}})
    with pytest.raises(ConfigError, match="sampler.engine_args.max_num_seqs cannot be set: sampler.slots sets it"):
        config_of({}, sampler={"engine": "vllm", "engine_args": {"max_num_seqs": 2}})
    with pytest.raises(ConfigError, match="teachers.main.engine_args.model cannot be set: teachers.main.model sets it"):
        config_of({"engine": "vllm", "engine_args": {"model": "x"}})
    assert config_of({"engine": "vllm", "engine_args": {"max_num_seqs": 2}})


def test_splits_count_all_devices_of_a_worker() -> None:
    config = PlannedConfig(config_of(VLLM, sampler={"replicas": 3}, learner={"ranks": 2}))
    assert config.config.devices == 3 + 2 * 4 + 2 and config.each == Split(1, 4, 1)
    assert list(splits(7, each=Split(1, 4, 1))) == [Split(1, 1, 2), Split(2, 1, 1)]
    assert list(splits(7, 0, Split(3, 1, 1))) == [Split(1, 0, 4), Split(2, 0, 1)]


def test_the_check_of_a_config_for_other_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'student = "builtin:student"\nupdates = 1\n[data]\nlimit = 8\n[teachers.main]\nmodel = "builtin:teacher"\n'
        'devices = 3\nreplicas = 2\n[sampler]\nmax_tokens = 8\n[runtime]\nkind = "ray"\n'
        "[learner]\nbatch_size = 8\n"
    )
    words = ["config", str(file), "--output", str(tmp_path / "out"), "--check", "--gpus"]
    assert main([*words, "4", "4"]) == 0
    out = capsys.readouterr().out
    assert "# 8 GPUs are needed (learner 1, sampler 1, teacher main 2 × 3 = 6), of 8\n" in out
    assert "# teacher main-1: 3 GPUs, " in out
    assert main([*words, "5", "2", "1"]) == 2
    assert "machines with 5, 2, 1 GPUs have no room for teacher main 2 × 3 = 6" in capsys.readouterr().err
    assert main([*words, "4", "4", "--runtime.kind", "local"]) == 2
    assert 'runtime.kind = "local" uses one machine' in capsys.readouterr().err
    assert main([*words[:-2], "--gpus", "8"]) == 2
    assert "write --check beside them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "device", "why"),
    [
        ({"kind": "forward_kl", "cache": "hidden"}, "auto", "vLLM gives no hidden states"),
        ({"kind": "reverse_kl_mc", "m": 4}, "cpu", f"vLLM {VERSION} scores several draws (loss.m = 4) on GPUs only"),
    ],
)
def test_a_chosen_engine_is_never_replaced(loss: dict[str, Any], device: str, why: str) -> None:
    runtime, short = {"kind": "inline", "device": device}, {"max_tokens": 40}
    with pytest.raises(ConfigError) as refused:
        check_shapes(config_of({"engine": "vllm"}, loss=loss, runtime=runtime, sampler=short))
    assert str(refused.value).startswith(f'teachers.main.engine = "vllm": {why}')
    assert 'write engine = "native" (or "auto", where vLLM is a preference)' in str(refused.value)
    made = check_shapes(config_of({"engine": "auto"}, loss=loss, runtime=runtime, sampler=short))
    assert isinstance(made.engines.scorers["main"].runs, ModelPlan)
    assert any(note.startswith(f'note: teachers.main.engine = "native", because {why}') for note in made.notes)


def test_auto_is_vllm_where_that_can_score() -> None:
    topk = {"kind": "forward_kl", "cache": "teacher_topk"}
    made = check_shapes(config_of({"engine": "auto"}, loss=topk, sampler={"max_tokens": 40}))
    assert isinstance(made.engines.scorers["main"].runs, Settings)
    assert 'note: teachers.main.engine = "vllm", because vLLM can score what the loss needs' in made.notes
