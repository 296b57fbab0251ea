"""Rollout servers: both interfaces against a fake with a real model; each fault ends in a recovery or in a line."""

import asyncio
import io
import math
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import SecretStr
from rich.console import Console

from slipstream.cli import main
from slipstream.commands.doctor import doctor
from slipstream.config.file import parse, to_toml
from slipstream.config.schema import Config
from slipstream.engines.http import client
from slipstream.engines.native.model import load_model
from slipstream.engines.server import sampler as served
from slipstream.engines.server.api import ServerEndpoint, ServerSettings
from slipstream.engines.server.proof import Answers, Checksums, has_old_head, objection, objection_to
from slipstream.engines.server.sampler import ServerSampler, log_probs_of
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.errors import ConfigError, EndpointError, EngineError, NonFiniteError
from slipstream.plan.plan import plan
from slipstream.protocols import Mode, Sampling, WeightsRef
from slipstream.records import Floats, Handle, Prompt
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train
from support.rollout_server import FakeRolloutServer, Fault

APIS: list[Any] = ["vllm", "sglang"]
STUDENT, EOS = "builtin:student", 1


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_PAUSES", (0.005, 0.01, 0.02))
    monkeypatch.setattr(client, "PROBE_PAUSES", (0.02, 0.1))
    monkeypatch.setattr(client, "PROBE_SPREAD", 0.01)
    monkeypatch.setattr(served.ServerSampler, "abort_interval", 0.005)
    monkeypatch.setattr(served, "PUBLISH_PAUSES", (0.01, 0.02, 0.05))


@pytest.fixture(params=APIS)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeRolloutServer]:
    with FakeRolloutServer(STUDENT, api=request.param) as server:
        yield server


@contextmanager
def opened(fake: FakeRolloutServer, folder: Path, **changes: Any) -> Iterator[ServerSampler]:
    endpoint = ServerEndpoint("", fake.url, STUDENT, **changes)
    sampler = ServerSampler(ServerSettings(endpoint, fake.api, STUDENT, "float32", str(folder)), stop_ids={EOS})
    try:
        yield sampler
    finally:
        sampler.close()


def prompts(count: int = 2) -> list[Prompt]:
    return [Prompt(id=f"p{i}", number=i, tokens=np.array([5, 6, 7 + i], np.int32), seed=i) for i in range(count)]


def weights(version: int, *, by: float = 0.01) -> WeightsRef:
    """The student's weights, moved by a small step that differs from version to version."""
    model = load_model(STUDENT, dtype="float32", device="cpu").model
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)
    return export_weights(model, "float32", version=version)


def worst_gap(handles: list[Handle], version: int) -> float:
    """The largest difference from the log-probs of the tokens that this version drew, as a model gives them here."""
    lm = load_model(STUDENT, dtype="float32", device="cpu")
    if version:
        ref = weights(version)
        flat = torch.from_numpy(ref.body)
        own = dict(lm.model.named_parameters())
        with torch.no_grad():
            for spec in ref.manifest:
                part = flat[spec.offset : spec.offset + spec.nbytes]
                own[spec.name].copy_(part.view(torch.float32).view(spec.shape))
    found = 0.0
    for rollout in (handle.body for handle in handles):
        known = log_probs_of(lm, [*rollout.prompt.tokens.tolist(), *rollout.tokens.tolist()])[0]
        gaps = np.abs(known[len(rollout.prompt.tokens) - 1 :] - rollout.logp)[rollout.versions == version]
        found = max([found, *gaps.tolist()])
    return found


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(main())


# --- what it gives -----------------------------------------------------------------------------------------------


def test_tokens_and_log_probs_are_the_students(fake: FakeRolloutServer, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler) -> Any:
        return await asyncio.gather(*(sampler.generate(p, Sampling(max_tokens=20, group=3)) for p in prompts()))

    with opened(fake, tmp_path) as sampler:
        groups = run(work(sampler))
    handles = [handle for group in groups for handle in group]
    assert [handle.header.index for handle in handles] == [0, 1, 2] * 2
    assert all((h.header.finish == "eos") == (h.body.tokens[-1] == EOS) for h in handles)
    assert all(h.header.finish == "eos" or h.header.tokens == 20 for h in handles)
    assert worst_gap(handles, 0) < 1e-4
    assert list(tmp_path.iterdir()) == [], "its directory is deleted"


def test_a_server_of_another_user_can_read_the_weights(fake: FakeRolloutServer, tmp_path: Path) -> None:
    """Runs make their files with a mask that hides them from other users."""
    mask = os.umask(0o077)
    try:
        with opened(fake, tmp_path) as sampler:
            run(sampler.publish(weights(1), "drain"))
            found = list(sampler.folder.rglob("*"))
            assert len(found) > 2 and all(path.stat().st_mode & 0o044 == 0o044 for path in [sampler.folder, *found])
    finally:
        os.umask(mask)


@pytest.mark.parametrize("mode", ["keep", "restart", "drain"])
def test_every_token_has_the_version_that_drew_it(fake: FakeRolloutServer, mode: Mode, tmp_path: Path) -> None:
    """A publish in the middle of responses: log-probs of both parts are those of their own version."""
    fake.pause = 0.01

    async def work(sampler: ServerSampler) -> Any:
        await sampler.generate(prompts(1)[0], Sampling(max_tokens=1))
        call = asyncio.create_task(sampler.generate(prompts(1)[0], Sampling(max_tokens=40, group=4)))
        await until(lambda: len(fake.running) == 4 and all(len(each.tokens) > 2 for each in fake.running))
        published = weights(1)
        loaded = await sampler.publish(published, mode)
        return loaded, await call

    with opened(fake, tmp_path) as sampler:
        loaded, handles = run(work(sampler))
    model = load_model(STUDENT, dtype="float32", device="cpu").model
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    assert loaded.fingerprint == fingerprint(model, "float32")
    versions = {version for handle in handles for version, _ in handle.header.versions}
    assert versions == {"keep": {0, 1}, "restart": {1}, "drain": {0}}[mode]
    assert (loaded.thrown > 0) == (mode == "restart")
    assert max(worst_gap(handles, version) for version in versions) < 1e-4
    assert all(h.header.tokens <= 40 and (h.body.tokens[:-1] != EOS).all() for h in handles)


def test_released_responses_continue_elsewhere(fake: FakeRolloutServer, tmp_path: Path) -> None:
    fake.pause = 0.01

    async def work(sampler: ServerSampler) -> Any:
        sampling = Sampling(max_tokens=40, group=2)
        calls = [asyncio.create_task(sampler.generate(prompt, sampling)) for prompt in prompts()]
        await until(lambda: len(fake.running) == 4 and all(len(each.tokens) > 2 for each in fake.running))
        await sampler.release([0])
        begun = await calls[0]
        assert not calls[1].done(), "only the named group is released"
        return begun, await sampler.generate(prompts()[0], sampling, begun), await calls[1]

    with opened(fake, tmp_path) as sampler:
        begun, whole, other = run(work(sampler))
    assert [handle.header.finish for handle in begun] == ["released"] * 2
    for part, handle in zip(begun, whole, strict=True):
        assert handle.body.tokens[: part.header.tokens].tolist() == part.body.tokens.tolist()
        assert handle.header.finish != "released"
    assert worst_gap([*whole, *other], 0) < 1e-4


def test_a_cancelled_call_ends_its_requests(fake: FakeRolloutServer, tmp_path: Path) -> None:
    fake.pause = 0.01

    async def work(sampler: ServerSampler) -> None:
        call = asyncio.create_task(sampler.generate(prompts(1)[0], Sampling(max_tokens=40, group=2)))
        await until(lambda: len(sampler.running) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not sampler.running and not sampler.open

    with opened(fake, tmp_path) as sampler:
        run(work(sampler))


# --- faults --------------------------------------------------------------------------------------------------------


def drawn(fake: FakeRolloutServer, folder: Path, *faults: Fault, **changes: Any) -> list[Handle]:
    async def work(sampler: ServerSampler) -> Any:
        await sampler.generate(prompts(1)[0], Sampling(max_tokens=1))
        fake.tell(*faults)
        return await sampler.generate(prompts(1)[0], Sampling(max_tokens=8))

    with opened(fake, folder, **changes) as sampler:
        found: list[Handle] = run(work(sampler))
    return found


@pytest.mark.parametrize("fault", ["cut", "unavailable", "empty abort", "wrong label"])
def test_a_fault_that_passes_costs_a_retry(fake: FakeRolloutServer, fault: Fault, tmp_path: Path) -> None:
    handles = drawn(fake, tmp_path, fault)
    assert handles[0].header.versions[0][0] == 0 and worst_gap(handles, 0) < 1e-4


@pytest.mark.parametrize(
    ("fault", "times", "line"),
    [
        ("cut", 4, "breaks off its answer: RemoteProtocolError"),
        ("unavailable", 4, 'answers 503: {"error": {"message": "the engine is loading"}}'),
        ("no logprobs", 1, "gives a wrong answer: no log-probs of the drawn tokens"),
        ("short", 1, "gives a wrong answer: 7 token ids, 8 log-probs, and 8 tokens in its usage"),
        ("early stop", 1, "gives a wrong answer: it ended with 'stop' after 7 of 8 tokens, with end tokens at []"),
        ("foreign token", 1, "gives a wrong answer: token id 39, and the student's ids are below 39: is it another"),
        ("wrong label", 4, "serves weights 'other', although"),
        ("empty abort", 4, "ended a request 4 times without a token"),
    ],
)
def test_a_fault_that_stays_is_one_line(
    fake: FakeRolloutServer, fault: Fault, times: int, line: str, tmp_path: Path
) -> None:
    with pytest.raises(EndpointError) as raised:
        drawn(fake, tmp_path, *[fault] * times)
    assert str(raised.value).startswith(f"the rollout server at {fake.url} ") and line in str(raised.value)


@pytest.mark.parametrize("logp", [0.5, math.inf, 1e40, -500.0, -9998.0])
def test_a_log_prob_that_no_draw_has_is_no_answer(fake: FakeRolloutServer, logp: float, tmp_path: Path) -> None:
    fake.logp = logp
    with pytest.raises(EndpointError, match=rf"gives a wrong answer: the log-prob {logp:g}".replace("+", r"\+")):
        drawn(fake, tmp_path)


def test_a_log_prob_that_rounding_put_above_zero_is_zero(fake: FakeRolloutServer, tmp_path: Path) -> None:
    fake.logp = 1e-4
    assert drawn(fake, tmp_path)[0].body.logp[-1] == 0


@pytest.mark.parametrize("logp", [math.nan, -9999.0])
def test_logits_that_are_not_finite_name_the_server(fake: FakeRolloutServer, logp: float, tmp_path: Path) -> None:
    fake.logp = logp
    with pytest.raises(NonFiniteError, match=f"the rollout server at {fake.url} gives the log-prob {logp:g}, "):
        drawn(fake, tmp_path)


def test_a_server_that_started_again_gets_the_weights_again(fake: FakeRolloutServer, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler) -> Any:
        await sampler.publish(weights(3), "keep")
        fake.restart()
        return await sampler.generate(prompts(1)[0], Sampling(max_tokens=8, group=4))

    with opened(fake, tmp_path) as sampler:
        handles = run(work(sampler))
    assert {handle.header.versions[0][0] for handle in handles} == {3} and worst_gap(handles, 3) < 1e-4
    assert len(fake.loaded) == 2 and len(set(fake.loaded)) == 1


@pytest.mark.parametrize("by", [1e-2, 1e-5])
def test_a_load_without_effect_is_found_and_repeated(fake: FakeRolloutServer, by: float, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler, keeps: int) -> None:
        await sampler.publish(weights(0, by=0), "keep")
        fake.keeps = keeps
        await sampler.publish(weights(1, by=by), "keep")

    with opened(fake, tmp_path) as sampler:
        run(work(sampler, 1))
    assert len(fake.loaded) == 3, "the second load of version 1 had an effect"
    line = "does not run the published weights: its log-probs" if by == 1e-2 else "keeps old weights: its log-probs"
    with opened(fake, tmp_path) as sampler, pytest.raises(EngineError, match=line):
        run(work(sampler, 2))


def publishes(fake: FakeRolloutServer, folder: Path, *, by: float) -> None:
    """Publish the student's own weights, and a small change of all of them."""

    async def work(sampler: ServerSampler) -> None:
        await sampler.publish(weights(0, by=0), "keep")
        await sampler.publish(weights(1, by=by), "keep")

    with opened(fake, folder) as sampler:
        run(work(sampler))


def test_an_output_head_that_no_load_replaces_is_found_at_the_first_update(
    fake: FakeRolloutServer, tmp_path: Path
) -> None:
    """All other weights arrive, and log-probs are well within the limit."""
    publishes(fake, tmp_path, by=1e-4)
    fake.restart()
    fake.copy_head()
    with pytest.raises(EngineError, match="keeps an old output head: "):
        publishes(fake, tmp_path, by=1e-4)


def test_a_tensor_that_no_load_replaces_is_found_where_the_server_has_checksums(
    fake: FakeRolloutServer, tmp_path: Path
) -> None:
    fake.skips = "model.layers.1.post_attention_layernorm.weight"
    if fake.api == "sglang":
        publishes(fake, tmp_path, by=1e-5)
        return
    with pytest.raises(EngineError, match=f"keeps old weights in 1 of its [0-9]+ tensors, such as dp0:{fake.skips}"):
        publishes(fake, tmp_path, by=1e-5)


def test_a_publish_outlasts_a_short_outage_and_names_a_long_one(fake: FakeRolloutServer, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler, down: int) -> None:
        fake.down = down
        await sampler.publish(weights(1), "keep")

    with opened(fake, tmp_path) as sampler:
        run(work(sampler, 6))
    assert len(fake.loaded) == 1
    with opened(fake, tmp_path) as sampler, pytest.raises(EngineError, match="publish of version 1: .*answers 503"):
        run(work(sampler, 1000))


def test_a_publish_outlasts_an_outage_between_a_load_and_its_proof(fake: FakeRolloutServer, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler) -> Any:
        await sampler.publish(weights(1), "keep")
        fake.cools = 6
        await sampler.publish(weights(2), "keep")
        assert fake.cools == fake.cold == 0
        return await sampler.generate(prompts(1)[0], Sampling(max_tokens=8))

    with opened(fake, tmp_path) as sampler:
        assert worst_gap(run(work(sampler)), 2) < 1e-4


def test_weights_that_an_outage_took_back_are_old(tmp_path: Path) -> None:
    """The log-probs of a load are right, its checksums get no answer, and the server comes back with older weights."""

    class Returns(FakeRolloutServer):
        armed = False

        def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
            if self.armed and to.path == "/weight_checker":
                self.armed, self.cold, self.keeps = False, 4, 1
                self.restart()
            super().post(to, body)

    async def work(sampler: ServerSampler) -> None:
        await sampler.publish(weights(0, by=0), "keep")
        fake.armed = True
        await sampler.publish(weights(1, by=1e-5), "keep")

    with Returns(STUDENT, api="vllm") as fake, opened(fake, tmp_path) as sampler:
        run(work(sampler))
    assert len(fake.loaded) == 4, "the load after the outage had no effect, and was repeated"


def test_an_answer_about_weights_that_lacks_its_field_is_one_line(fake: FakeRolloutServer, tmp_path: Path) -> None:
    label, wrong = {"vllm": "/weight_info", "sglang": "/get_model_info"}[fake.api], "gives a wrong answer: "
    with opened(fake, tmp_path) as sampler:
        for answer in ({}, [], None):
            fake.instead = {label: (200, answer), "/v1/models": (200, answer)}
            with pytest.raises(EndpointError, match=f"the rollout server at {fake.url} {wrong}"):
                run(sampler.api.label())
            assert run(sampler.api.context()) is None
        fake.instead = {"/weight_checker": (200, [])}
        if fake.api == "vllm":
            with pytest.raises(EngineError, match=f"publish of version 1: .* {wrong}TypeError"):
                run(sampler.publish(weights(1), "keep"))
        else:
            run(sampler.publish(weights(1), "keep"))


def test_of_a_failed_load_and_a_failed_resumption_the_load_is_named(fake: FakeRolloutServer, tmp_path: Path) -> None:
    resume = {"vllm": "/resume", "sglang": "/continue_generation"}[fake.api]
    fake.refuses, fake.instead = 100, {resume: (500, {"error": "engine dead"})}
    with opened(fake, tmp_path) as sampler, pytest.raises(EngineError, match="no weights in .*under the same path"):
        run(sampler.publish(weights(1), "keep"))


def test_a_release_without_the_server_hands_over_what_arrived(fake: FakeRolloutServer, tmp_path: Path) -> None:
    fake.pause = 0.02

    async def work(sampler: ServerSampler) -> Any:
        await sampler.generate(prompts(1)[0], Sampling(max_tokens=1))
        call = asyncio.create_task(sampler.generate(prompts(1)[0], Sampling(max_tokens=40, group=2)))
        await until(lambda: len(fake.running) == 2)
        fake.down = 1000
        await sampler.release()
        return await call

    with opened(fake, tmp_path) as sampler:
        assert all(handle.header.finish == "released" for handle in run(work(sampler)))


def test_a_failed_load_stops_the_sampler(fake: FakeRolloutServer, tmp_path: Path) -> None:
    async def work(sampler: ServerSampler) -> None:
        fake.refuses = 100
        with pytest.raises(EngineError, match=r"publish of version 1: .*no weights in .*under the same path"):
            await sampler.publish(weights(1), "keep")
        with pytest.raises(EngineError, match="publish of version 1"):
            await sampler.generate(prompts(1)[0], Sampling(max_tokens=8))

    with opened(fake, tmp_path) as sampler:
        run(work(sampler))
        assert not list(sampler.folder.iterdir()), "a copy of the weights that was not loaded"


def answers(served_N: Floats, copy_N: Floats) -> Answers:
    """Answers of a copy whose head did not move."""
    return Answers(served_N, copy_N, copy_N)


def test_small_moves_add_up_before_they_prove_anything() -> None:
    """By hand: rms moves are the numbers added to every log-prob; float32 moves count above 1e-5."""
    zero, old = np.zeros(4, np.float64), answers(np.zeros(4), np.zeros(4))
    same = {"noise": 0.0, "dtype": "float32"}
    assert objection(answers(zero, zero + 9e-6), old, **same) == ""  # type: ignore[arg-type]
    assert objection(answers(zero, zero + 2e-5), old, **same).startswith("keeps old weights")  # type: ignore[arg-type]
    assert objection(answers(zero + 2e-5, zero + 2e-5), old, **same) == ""  # type: ignore[arg-type]
    assert objection(answers(zero, zero + 0.011), None, **same).startswith("does not run")  # type: ignore[arg-type]
    assert objection(answers(zero + np.nan, zero), None, **same).startswith("does not run")  # type: ignore[arg-type]
    noisy = {"noise": 1e-4, "dtype": "float32"}  # moves count above 4e-4
    assert objection(answers(zero, zero + 3e-4), old, **noisy) == ""  # type: ignore[arg-type]
    assert objection(answers(zero + 2e-4, zero + 5e-4), old, **noisy) != ""  # type: ignore[arg-type]


def test_an_old_head_must_stand_out_from_the_noise() -> None:
    """100 tokens; the old head moves each log-prob by ±a, and noise of ±1 is orthogonal to that: 10 a / 1 above 6."""
    noise_N, step_N = np.tile([1.0, 1.0, -1.0, -1.0], 25), np.tile([1.0, -1.0], 50)
    copy_N = np.zeros(100)
    assert has_old_head(Answers(noise_N + 0.61 * step_N, copy_N, 0.61 * step_N))
    assert not has_old_head(Answers(noise_N + 0.59 * step_N, copy_N, 0.59 * step_N)), "too small to tell"
    assert not has_old_head(Answers(noise_N, copy_N, 9 * step_N)), "the head is new"
    assert not has_old_head(Answers(noise_N + 4 * step_N, copy_N, 9 * step_N)), "nearer to the new head"
    assert not has_old_head(Answers(noise_N, copy_N, copy_N)), "the head never moved"


def test_a_tensor_must_change_if_all_tensors_that_make_it_changed() -> None:
    names = ["layers.0.attn.q.weight", "layers.0.attn.k.weight", "layers.1.attn.q.weight", "norm.weight"]
    served = ["layers.0.attn.qk.weight", "layers.1.attn.qk.weight", "norm.weight", "x", "norm.bias", "norm.k_scale"]
    first = Checksums({f"dp0:{name}": ("a", "b") for name in served}, dict.fromkeys(names, 0))

    def wrong(changed: list[str], **now: tuple[str, ...]) -> str:
        return objection_to(Checksums(first.served | now, first.copy | dict.fromkeys(changed, 1)), first)

    assert wrong([]) == wrong(names[:1]) == "", "its other part did not change"
    assert wrong(names[:2]) == "keeps old weights in 1 of its 6 tensors, such as dp0:layers.0.attn.qk.weight"
    assert wrong(names[:2], **{"dp0:layers.0.attn.qk.weight": ("a", "c")}) == "", "one shard may be as before"
    assert wrong(names[3:]) == "keeps old weights in 1 of its 6 tensors, such as dp0:norm.weight", "not of a new kind"
    assert wrong(names).startswith("keeps old weights in 4 of its 6"), "a new name without module belongs to all"


# --- configs and runs ------------------------------------------------------------------------------------------------


def config_of(fake: FakeRolloutServer, path: Path, *changes: tuple[str, str]) -> Config:
    folder = path / "weights"
    folder.mkdir(exist_ok=True)
    server = {"url": fake.url, "folder": str(folder), "api": fake.api}
    base = {
        "student": STUDENT,
        "updates": 3,
        "output": str(path / "run"),
        "teachers": {"main": {"model": "builtin:teacher"}},
        "data": {"train": "builtin:arithmetic", "eval": "builtin:arithmetic"},
        "sampler": {"engine": "server", "max_tokens": 10, "group": 2, "slots": 16, "server": server},
        "learner": {"batch_size": 8, "lr": 1e-3},
        "loss": {"kind": "reverse_kl_mc", "m": 1},
        "schedule": {"kind": "async", "tau": 1},
        "task": {"reward": "exact"},
        "eval": {"every": 3, "prompts": 4},
        "runtime": {"kind": "inline", "device": "cpu"},
    }
    return parse(base, changes, say=str)


def test_a_run(fake: FakeRolloutServer, tmp_path: Path) -> None:
    """Rollouts by the server, publishes, an evaluation, checks; every version that a token names was published."""
    said = io.StringIO()
    path = train(config_of(fake, tmp_path), Console(file=said), name="server")
    lines = read_lines(path / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    assert len(trained) == 3 and [line["update"] for line in lines if line["kind"] == "eval"] == [0, 3]
    assert 0 < trained[0]["drift/probs_diff_max"] < 1e-4, "sampler and learner are one policy"
    assert all(f"-v{version}" in " ".join(fake.loaded) for version in (0, 1, 2, 3))
    assert list((tmp_path / "weights").iterdir()) == []


def test_episodes_with_tools(tmp_path: Path) -> None:
    """Turns are requests of their own; observed tokens are not trained, and sampled tokens are one policy's."""
    with FakeRolloutServer("builtin:tool_student") as fake:
        changes = [
            ("student", "builtin:tool_student"),
            ("teachers.main.model", "builtin:tool_teacher"),
            ("data.train", "builtin:table"),
            ("data.eval", "builtin:table"),
            ("environment.use", "table"),
            ("sampler.max_tokens", "60"),
            ("updates", "1"),
            ("eval.every", "0"),
        ]
        path = train(config_of(fake, tmp_path, *changes), Console(file=io.StringIO()), name="tools")
    (line,) = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    assert line["episode/calls"] > 0 and 0 < line["drift/probs_diff_max"] < 1e-4


def test_doctor_finds_that_all_is_well(fake: FakeRolloutServer, tmp_path: Path) -> None:
    said = io.StringIO()
    assert doctor(config_of(fake, tmp_path), Console(file=said, width=200)), said.getvalue()
    assert "sampler and learner, after a publish" in said.getvalue()


def test_a_server_that_fails_in_the_checks_before_a_run_is_one_line(
    fake: FakeRolloutServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(config_of(fake, tmp_path)))
    fake.tell(*["early stop"] * 100)
    assert main(["train", str(tmp_path / "config.toml")]) == 2
    assert f"error: the rollout server at {fake.url} gives a wrong answer: it ended with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ("sampler.server.folder=/not/there", "'/not/there' is not a directory that can be written here"),
        ("sampler.server.folder=here", "the server starts in another directory: write an absolute path"),
        ("sampler.server.url=http://h:1/v1", "is the root of the server: write http://HOST:PORT, without /v1"),
        ("sampler.server.api_key_env=NO_SUCH_KEY", "sampler.server.api_key_env = 'NO_SUCH_KEY': this environment"),
        ("sampler.replicas=2", "sampler.replicas: one sampler serves a whole server"),
        ("loss.m=4", "loss.m = 4: a rollout server returns one token per position; write loss.m = 1"),
        ("loss.kind=reverse_kl_topk", "needs the most likely tokens of the student"),
        ("sampler.temperature=0.005", "sampler.temperature = 0.005: a rollout server needs at least 0.01"),
        ("sampler.server.url=http://127.0.0.1:1", "it cannot serve rollouts: start "),
        ("runtime.clock=modelled", "sampler runs in real time"),
    ],
)
def test_what_a_server_cannot_do_is_refused(fake: FakeRolloutServer, changes: str, line: str, tmp_path: Path) -> None:
    key, _, value = changes.partition("=")
    with pytest.raises(ConfigError) as refused:
        plan(config_of(fake, tmp_path, (key, value)))
    assert line in str(refused.value)


def test_what_the_server_tells_before_a_run(tmp_path: Path) -> None:
    for api in APIS:
        wants = pytest.raises(ConfigError, match="the server wants a key: name its variable")
        with FakeRolloutServer(STUDENT, api=api, key="sk-1") as fake, wants:
            plan(config_of(fake, tmp_path))
        with FakeRolloutServer(STUDENT, api=api) as fake:
            fake.context = 12
            with pytest.raises(ConfigError, match="has a context of 12, but prompt"):
                plan(config_of(fake, tmp_path))
            fake.context = 100
            made = plan(config_of(fake, tmp_path))
            assert f"the rollout server at {fake.url} answers, context 100" in made.notes
            need = next(str(each) for each in made.needs if each.name == "sampler")
            assert need.startswith(f"sampler: at {fake.url}, ") and "copy of the weights" in need
        raw = pytest.raises(ConfigError, match="gives log-probs before temperature")
        with FakeRolloutServer(STUDENT, api=api, processed=False) as fake, raw:
            plan(config_of(fake, tmp_path, ("sampler.temperature", "0.7")))
        other, lacks = "sglang" if api == "vllm" else "vllm", pytest.raises(ConfigError, match="rollouts: start ")
        with FakeRolloutServer(STUDENT, api=other) as fake, lacks:
            plan(config_of(fake, tmp_path, ("sampler.server.api", api)))


def test_truncation_needs_vllm(fake: FakeRolloutServer, tmp_path: Path) -> None:
    changes = [("sampler.top_k", "5"), ("loss.importance", "false")]
    if fake.api == "sglang":
        with pytest.raises(ConfigError, match="sampler.top_k: SGLang gives log-probs before truncation"):
            config_of(fake, tmp_path, *changes)
    else:
        assert config_of(fake, tmp_path, *changes).sampler.top_k == 5


def test_a_key_goes_to_the_server_and_nowhere_else(tmp_path: Path) -> None:
    with FakeRolloutServer(STUDENT, key="sk-secret") as fake:
        assert drawn(fake, tmp_path, key=SecretStr("sk-secret"))
        with pytest.raises(EndpointError, match="401") as refused:
            drawn(fake, tmp_path, key=SecretStr("sk-wrong"))
        assert "sk-wrong" not in str(refused.value)
