"""Fake rollout server on the loopback interface: HTTP interfaces of vLLM and SGLang, a real model, and their faults.

    with FakeRolloutServer("builtin:student", api="vllm") as fake:
        fake.tell("cut", "unavailable")              # faults of the next two generations
        fake.keeps = 1                               # the next load reports success and keeps the old weights
        ...                                          # sampler.server.url = fake.url

Weights change between two tokens. A request that was aborted answers with the tokens drawn so far.

Shapes: T tokens, V vocabulary.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engines.checksums import checksum
from slipstream.engines.draws import draw, process
from slipstream.engines.native.model import load_model
from slipstream.protocols import Sampling
from slipstream.testing.endpoint import Loopback, send
from support.fake_endpoint import cut_off

Fault = Literal[
    "cut", "unavailable", "no logprobs", "short", "wrong label", "empty abort", "early stop", "foreign token"
]


@dataclass(eq=False)
class Running:
    """A request that is being generated."""

    name: str
    label: str
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str = ""


class FakeRolloutServer(Loopback):
    def __init__(
        self, model: str, *, api: Literal["vllm", "sglang"] = "vllm", key: str | None = None, processed: bool = True
    ) -> None:
        """Create a server of one interface; `processed`: log-probs belong to the sampling distribution."""
        super().__init__()
        self.lm = load_model(model, dtype="float32", device="cpu").model
        self.first = {name: tensor.clone() for name, tensor in self.lm.state_dict().items()}
        self.api, self.key, self.processed, self.context = api, key, processed, 4096
        self.version, self.paused = "default", False
        self.lock = threading.Condition()
        """Held while a token is drawn, and while weights or the list of requests change."""
        self.running: set[Running] = set()
        self.random = torch.Generator().manual_seed(0)
        self.faults: deque[Fault] = deque()
        self.keeps = self.refuses = 0
        """Number of loads that report success without an effect, and of loads that fail."""
        self.skips = ""
        """Name of a tensor that loads leave as it is; empty if they load all."""
        self.down = 0
        """Number of requests that are not generations and get status 503."""
        self.cold = self.cools = 0
        """Number of requests of all kinds that get status 503, and that number after the next load."""
        self.instead: dict[str, tuple[int, Any]] = {}
        """Status and answer of a path, in place of the right ones."""
        self.logp: float | None = None
        """Log-prob of the last token of every answer; None gives the right one."""
        self.pause = 0.0
        """Seconds before each token, which lets tests act while requests run."""
        self.loaded: list[str] = []
        """Directories of all loads."""

    def tell(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    def restart(self) -> None:
        """Serve the first weights again, without a label, as a server that was started again."""
        with self.lock:
            self.lm.load_state_dict(self.first)
            self.version = "default"

    def copy_head(self) -> None:
        """Use a copy of a tied output head that no load replaces, as vLLM does on CPUs."""
        self.lm.lm_head.weight = torch.nn.Parameter(self.lm.lm_head.weight.detach().clone())

    # --- answers ---------------------------------------------------------------------------------------------

    def get(self, to: BaseHTTPRequestHandler) -> None:
        if self._turned_away(to) or self._answered(to):
            return
        match (self.api, to.path):
            case (_, "/v1/models"):
                send(to, 200, {"object": "list", "data": [{"id": "student", "max_model_len": self.context}]})
            case ("vllm", "/weight_info") | ("sglang", "/get_model_info"):
                send(to, 200, {"weight_version": self.version})
            case _:
                send(to, 404, {"detail": "Not Found"})

    def post(self, to: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if self._turned_away(to) or self._answered(to):
            return
        control = not to.path.endswith("/generate")
        if self.cold or (self.down and control):
            with self.lock:
                self.cold, self.down = max(self.cold - 1, 0), self.down - (self.down > 0 and control)
            send(to, 503, {"error": {"message": "the server starts"}})
            return
        match (self.api, urlsplit(to.path).path):
            case ("vllm", "/inference/v1/generate"):
                options = body["sampling_params"]
                self._generate(to, f"generate-tokens-{body.get('request_id')}", body["token_ids"], options)
            case ("sglang", "/generate"):
                options = body["sampling_params"] | {"max_tokens": body["sampling_params"]["max_new_tokens"]}
                if "logprob_start_len" in body:
                    options["prompt_logprobs"] = 0
                self._generate(to, body.get("rid", ""), body["input_ids"], options)
            case ("vllm", "/abort_requests"):
                self._abort(body["request_ids"])
                send(to, 200, {"status": "aborted"})
            case ("sglang", "/abort_request"):
                self._abort([body["rid"]])
                send(to, 200, "")
            case ("vllm", "/pause") | ("sglang", "/pause_generation") if "abort" not in (
                to.path[-5:],
                body.get("mode"),
            ):
                send(to, 400, {"detail": "requests would stay open"})
            case ("vllm", "/pause") | ("sglang", "/pause_generation"):
                with self.lock:
                    self.paused = True
                self._abort(None)
                send(to, 200, {"status": "paused"})
            case ("vllm", "/resume") | ("sglang", "/continue_generation"):
                with self.lock:
                    self.paused = False
                    self.cold, self.cools = self.cools, 0
                    self.lock.notify_all()
                send(to, 200, {"status": "resumed"})
            case ("vllm", "/collective_rpc"):
                why = self._load(body["kwargs"]["weights_path"])
                send(to, *((500, {"error": {"message": why}}) if why else (200, {"results": [None]})))
            case ("vllm", "/weight_checker"):
                found = {f"dp0:pp0:pcp0:tp0:{name}": tensor for name, tensor in self.lm.model.named_parameters("model")}
                send(to, 200, {"checksums": {name: f"{checksum(tensor.detach()):x}" for name, tensor in found.items()}})
            case ("vllm", "/update_weight_version"):
                self.version = body["new_version"]
                send(to, 200, {"success": True})
            case ("sglang", "/update_weights_from_disk"):
                why = self._load(body["model_path"])
                self.version = self.version if why else body["weight_version"]
                send(to, 200, {"success": not why, "message": why})
            case _:
                send(to, 404, {"detail": "Not Found"})

    def _turned_away(self, to: BaseHTTPRequestHandler) -> bool:
        refused = self.key is not None and to.headers["Authorization"] != f"Bearer {self.key}"
        if refused:
            send(to, 401, {"error": "Unauthorized"})
        return refused

    def _answered(self, to: BaseHTTPRequestHandler) -> bool:
        path = urlsplit(to.path).path
        if path in self.instead:
            send(to, *self.instead[path])
        return path in self.instead

    def _abort(self, names: list[str] | None) -> None:
        with self.lock:
            for each in self.running:
                if names is None or each.name in names:
                    each.finish = each.finish or "abort"
            self.lock.notify_all()

    def _load(self, path: str) -> str:
        """Load the weights in a directory; return why this failed, or an empty string."""
        with self.lock:
            self.loaded.append(path)
            if self.refuses or not Path(path, "model.safetensors").exists():
                self.refuses -= bool(self.refuses)
                return f"no weights in {path}"
            if self.keeps:
                self.keeps -= 1
            else:
                found = load_file(Path(path, "model.safetensors"))
                self.lm.load_state_dict({n: t for n, t in found.items() if n != self.skips}, strict=False)
            return ""

    # --- generation ------------------------------------------------------------------------------------------

    def _generate(self, to: BaseHTTPRequestHandler, name: str, prompt: list[int], options: dict[str, Any]) -> None:
        probe = "prompt_logprobs" in options
        with self.lock:
            fault = self.faults.popleft() if self.faults and not probe else None
        match fault:
            case "cut":
                cut_off(to, b'{"choices": [')
                return
            case "unavailable":
                send(to, 503, {"error": {"message": "the engine is loading"}})
                return
        request = Running(name, self.version)
        with self.lock:
            self.lock.wait_for(lambda: not self.paused or self.over.is_set())
            request.label = self.version
            self.running.add(request)
        if fault == "empty abort":
            request.finish = "abort"
        try:
            self._draw(request, prompt, options)
            known = self._prompt_logprobs(prompt) if probe else None
        finally:
            with self.lock:
                self.running.discard(request)
        if fault == "early stop" and len(request.tokens) > 1:
            request.tokens.pop(), request.logps.pop()
            request.finish = "stop"
        if self.logp is not None:
            request.logps[-1] = self.logp
        if fault == "foreign token":
            request.tokens[-1] = int(self.lm.config.vocab_size)
        label = "other" if fault == "wrong label" else request.label
        answer = self._vllm if self.api == "vllm" else self._sglang
        send(to, 200, answer(request, label, prompt, known, fault))

    def _draw(self, request: Running, prompt: list[int], options: dict[str, Any]) -> None:
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: max(options[name], 0) for name in names if name in options}  # SGLang's top_k = -1 is 0 here
        sampling = Sampling(options["max_tokens"], **given)
        seed = self.random if self.api == "sglang" else torch.Generator().manual_seed(options.get("seed", 0))
        while not request.finish:
            if self.pause:
                self.over.wait(self.pause)
            with self.lock:
                if request.finish:
                    break
                logits_1V = self._logits([*prompt, *request.tokens])[-1:]
                logp_1V = process(logits_1V, sampling)
                ids, logp = draw(logp_1V, torch.rand(1, 1, generator=seed, dtype=torch.float64))
                if not self.processed:
                    logp = logits_1V.log_softmax(-1).gather(1, ids)
                elif self.api == "sglang" and sampling.temperature:  # before truncation
                    logp = (logits_1V / sampling.temperature).log_softmax(-1).gather(1, ids)
                request.tokens.append(int(ids))
                request.logps.append(float(logp))
                if request.tokens[-1] in options.get("stop_token_ids", ()):
                    request.finish = "stop"
                elif len(request.tokens) == sampling.max_tokens:
                    request.finish = "length"

    @torch.inference_mode()
    def _logits(self, tokens: list[int]) -> Tensor:
        logits_TV: Tensor = self.lm(torch.tensor([tokens])).logits[0]
        return logits_TV.float()

    def _prompt_logprobs(self, prompt: list[int]) -> list[float]:
        with self.lock:
            logp_TV = self._logits(prompt)[:-1].log_softmax(-1)
        found: list[float] = logp_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        return found

    def _vllm(
        self, request: Running, label: str, prompt: list[int], known: list[float] | None, fault: Fault | None
    ) -> dict[str, Any]:
        content = [{"token_id": t, "logprob": p} for t, p in zip(request.tokens, request.logps, strict=True)]
        tokens = request.tokens[:-1] if fault == "short" else request.tokens
        spans = [{"version": label, "start": 0, "end": len(tokens)}] if tokens else []
        choice = {"index": 0, "finish_reason": request.finish, "token_ids": tokens, "weight_versions": spans}
        choice["logprobs"] = None if fault == "no logprobs" else {"content": content}
        answer: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": len(request.tokens)}}
        if known is not None:
            rows = [{str(t): {"logprob": p}} for t, p in zip(prompt[1:], known, strict=True)]
            answer["prompt_logprobs"] = [None, *rows]
        return answer

    def _sglang(
        self, request: Running, label: str, prompt: list[int], known: list[float] | None, fault: Fault | None
    ) -> dict[str, Any]:
        info: dict[str, Any] = {
            "finish_reason": {"type": request.finish},
            "completion_tokens": len(request.tokens),
            "weight_version": label,
        }
        if fault != "no logprobs":
            pairs = zip(request.logps, request.tokens, strict=True)
            info["output_token_logprobs"] = [[logp, token, None] for logp, token in pairs]
        if known is not None:
            rows = [[p, t, None] for t, p in zip(prompt[1:], known, strict=True)]
            info["input_token_logprobs"] = [[None, prompt[0], None], *rows]
        return {"output_ids": request.tokens[:-1] if fault == "short" else request.tokens, "meta_info": info}
