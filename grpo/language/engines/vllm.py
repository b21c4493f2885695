"""vLLM as the engine: in this process, or on a server. It keeps a copy of the weights, pushed to it after every step.

    in this process   engine_kwargs: {gpu_memory_utilization: 0.3, …}    any argument of vllm.LLM
    on a server       engine_kwargs: {base_url: http://host:8000}        started with the line in `SERVE`

What vLLM does not do by itself runs in its workers, as `Receiver`, an extension of them that vLLM loads by name:

- Weights arrive there and are checked. Adapters are merged into a copy on our side, so vLLM runs a plain model and the
  module that is trained is never touched. In this process the tensors are handed over and vLLM's own parameters are
  compared with them, wherever it keeps them unfused; to other processes they go through a safetensors file, whose
  SHA-256 the workers report back as well.
- The temperature is applied there, to the logits in float32. vLLM knows log-probs before temperature (raw) or after
  penalty and truncation (processed); with the logits divided beforehand and requests at temperature 1, the raw ones are
  log softmax(logits / temperature), and all else is as before: the penalty and the division commute.

vLLM starts from random weights, and the first push is followed by a few tokens that the module scores as well: weights
that reach only a part of the copy are found before training, not in its curve.

Every call of `generate` asks the workers which weights they hold. A server that was started again gets them anew; one
that somebody else pushes to is an error.

With top-p and min-p together vLLM applies min-p first, our own loop last.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import http.client
import importlib
import json
import os
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo.config import ConfigError
from grpo.language.engines import Completion, Groups, Sampling, Stop, Tokens, in_groups
from grpo.language.engines.inline import bare, check, evaluating

RECEIVER = "grpo.language.engines.vllm.Receiver"
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format dummy --generation-config vllm "
    f"--worker-extension-cls {RECEIVER}"
)
"""How a server is started: the weights come from us, and grpo must be installed there too. Its port is for trusted
machines only: the development mode lets whoever reaches it change the model."""
REMEDY = f"give a folder that both sides can read (engine_kwargs: folder) and start the server with: {SERVE}"
TRANSIENT = {408, 429, 502, 503, 504}
"""Answers of a server that is overloaded or on its way; others do not get better by asking again."""
ECHO = 0.2
"""Nats by which vLLM may be off the median token. Seen: 0.04 in bfloat16, 3 with a head that no push reached."""
REQUESTS = 256
"""Completions that are asked of a server at a time; it batches them itself."""


class VLLMEngine:
    """Samples with vLLM; the policy scores the completions again, since another implementation rounds differently."""

    name = "vllm"
    exact = False
    row_seeds = True
    """A completion depends on its own seed alone, up to rounding."""

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        *,
        base_url: str | None = None,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        deadline: float = 240.0,
        folder: str | None = None,
        **llm_kwargs: Any,
    ) -> None:
        """`deadline`: seconds for a push, and on a server for a completion. `folder`: where weights for other processes
        are put, readable to both sides; None: the system's temporary folder."""
        _check_model(model)
        self.model, self.tokens, self._version = model, tokens, ""
        config: Any = model.config
        self._vocabulary: int = config.get_text_config(decoder=True).vocab_size
        self._vllm: _Local | _Server
        if base_url is not None:
            if llm_kwargs:
                raise ConfigError(f"engine_kwargs: {', '.join(llm_kwargs)} must be given to the server at {base_url}")
            self._vllm = _Server(base_url, deadline, folder)
        else:
            llm_kwargs |= {
                "gpu_memory_utilization": gpu_memory_utilization,
                "max_model_len": max_model_len,
                "tensor_parallel_size": tensor_parallel_size,
            }
            self._vllm = _Local(model, tokens, deadline, folder, llm_kwargs)
        self.refresh()
        self._echo()

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together; a seed for every completion."""
        return list(self._completions(prompts, count, sampling, seeds))

    def stream(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """The same, a prompt at a time: from a server as they end, in the order of the prompts; else all at the end."""
        return in_groups(self._completions(prompts, count, sampling, seeds), count)

    def _completions(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[Completion]:
        """One after the other, in order."""
        room = check(self.model, prompts, count, sampling, seeds)
        context = self.context
        for i, prompt in enumerate(prompts):
            if len(prompt) >= context:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens and vLLM's max_model_len is {context}; raise it"
                )
            room[i] = min(room[i], context - len(prompt))
        scaled = self._ready(sampling.temperature or 1.0)
        shared = {
            "temperature": 1.0 if scaled and sampling.temperature else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(i for i in self.tokens.eos if i < self._vocabulary),
            "ignore_eos": True,  # the ids above are all of them, whatever the model's own settings say
            "logprobs": 0,  # of the sampled token alone
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        rows = [
            (list(prompts[i // count]), shared | {"max_tokens": room[i // count], "seed": seed % 2**63})
            for i, seed in enumerate(seeds)
        ]
        known = scaled or sampling.temperature in (0.0, 1.0)
        yield from (self._completion(answer, known) for answer in self._vllm.complete(rows))

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together, at most."""
        return int(self._vllm.max_model_len)

    def refresh(self) -> None:
        """Push the policy's weights, merged with its adapter, and make sure that they arrived."""
        sent, reports = self._vllm.push(checkpoint(self.model))
        for report in reports:
            if report["version"] != sent:
                raise RuntimeError(
                    f"weights changed on their way to vLLM: sent {sent[:12]}, received {report['version'][:12]}; "
                    "give both sides a folder of their own (engine_kwargs: folder) and push again"
                )
            if report["stale"]:
                raise RuntimeError(
                    f"vLLM did not take over the weights of {', '.join(report['stale'][:3])}"
                    f" ({len(report['stale'])} of {report['compared']} compared); use engine=inline for this model"
                )
        self._version = sent

    def close(self) -> None:
        """Let go of the copy of the model; a server is left running."""
        self._vllm.close()

    def _echo(self) -> None:
        """vLLM starts from random weights, so a part of the model that no push reaches shows in a few tokens."""
        prompt, gaps = [1, 2, 3], []  # not 0: often the padding, whose embedding is zero
        with torch.no_grad(), evaluating(self.model):
            for made in self.generate([prompt], 4, Sampling(8), range(4)):
                ids = torch.cat([torch.tensor(prompt), made.ids]).to(next(self.model.parameters()).device)
                logits_TV = self.model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
                logp = logits_TV.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0].cpu()
                gaps.append(logp - made.logp)
        gap = float(torch.cat(gaps).abs().median())  # in bfloat16 a single token can be off by ten
        if not gap < ECHO:
            raise RuntimeError(
                f"vLLM's log-probs are {gap:.2f} away from the model's: it does not run this model as it is trained; "
                "use engine=inline"
            )

    def _ready(self, temperature: float) -> bool:
        """The right weights and temperature are in place; whether the logits are divided by it in the workers."""
        reports = self._vllm.rpc("grpo_ready", temperature=temperature)
        if any(report["version"] != self._version for report in reports):
            self.refresh()
            reports = self._vllm.rpc("grpo_ready", temperature=temperature)
            if any(report["version"] != self._version for report in reports):
                raise RuntimeError("vLLM holds weights that are not ours; give every run a server of its own")
        return all(report["heads"] for report in reports)

    def _completion(self, answer: _Answer, known: bool) -> Completion:
        ids, logp = torch.tensor(answer.ids, dtype=torch.long), torch.tensor(answer.logp, dtype=torch.float32)
        if not len(ids) or len(logp) != len(ids) or answer.finish not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a completion with {answer.finish!r}, {len(ids)} tokens and {len(logp)} log-probs; "
                "see its own log"
            )
        if not bool(logp.isfinite().all()):
            raise FloatingPointError("vLLM's log-probs are not finite: the weights hold NaN or infinity, or overflow")
        stop: Stop = "eos" if answer.ids[-1] in self.tokens.eos else "stop" if answer.finish == "stop" else "length"
        return Completion(ids, logp if known else None, stop)


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The weights by the names that a saved model has, adapters merged; tied ones once.

    Merging takes a copy of the model for as long as the push lasts: undoing it in place would leave rounding behind.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    weights: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in plain.state_dict().items():
        weights.setdefault((tensor.data_ptr(), tensor.shape), (name, tensor.detach()))
    saved: dict[str, Tensor] = revert_weight_conversion(plain, dict(weights.values()))
    return saved


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Receiver:
    """What vLLM's workers are extended with (`worker_extension_cls`): it runs in each of them, as part of `self`."""

    _grpo_version = ""

    def grpo_load(self, source: str | Mapping[str, Tensor], version: str = "") -> dict[str, Any]:
        """Take over weights, handed over under a version or from a file, whose fingerprint is their version."""
        worker: Any = self
        if isinstance(source, str):
            weights: Mapping[str, Tensor] = load_file(source)
            version = fingerprint(weights)
        else:
            weights = source
        self._grpo_version = ""  # whatever goes wrong from here on, the old weights are no longer complete
        with torch.no_grad():
            worker.reload_weights(weights_iterator=iter(weights.items()))
            model = worker.model_runner.get_model()
            _repack_tied(model)
            held = dict(model.named_parameters())
            same = {name: _holds(held[name], tensor) for name, tensor in weights.items() if name in held}
        self._grpo_version = version
        compared = {name: equal for name, equal in same.items() if equal is not None}
        stale = [name for name, equal in compared.items() if not equal]
        return {"version": version, "stale": stale, "compared": len(compared)}

    def grpo_ready(self, temperature: float) -> dict[str, Any]:
        """Divide the logits from now on; the version of the weights, and how many heads are there to divide."""
        worker: Any = self
        heads = [
            module for module in worker.model_runner.get_model().modules() if type(module).__name__ == "LogitsProcessor"
        ]
        for head in heads:
            if hasattr(head, "grpo_hook"):
                head.grpo_hook.remove()
            head.grpo_hook = head.register_forward_hook(
                lambda module, given, logits: None if logits is None else logits.float() / temperature
            )
        return {"version": self._grpo_version, "heads": len(heads)}


def _repack_tied(model: nn.Module) -> None:
    """A head that shares the embedding's weight is not told of new ones; on a CPU it multiplies by a packed copy."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), module) is not module:
            method: Any = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)


def _holds(held: Tensor, sent: Tensor) -> bool | None:
    """Whether a parameter has a tensor's values; None: it is fused, split or packed. Vocabularies may be padded."""
    if held.shape[1:] != sent.shape[1:] or len(held) < len(sent):
        return None
    return torch.equal(held[: len(sent)], sent.to(held))


@dataclass(frozen=True)
class _Answer:
    """A completion as vLLM gives it, in this process or as JSON."""

    ids: Sequence[int]
    logp: Sequence[float]
    finish: str


_Row = tuple[list[int], dict[str, Any]]
"""A prompt and the parameters of its request: names that `vllm.SamplingParams` and the server's API share."""


class _Local:
    """vLLM in this process."""

    def __init__(
        self, model: nn.Module, tokens: Tokens, deadline: float, folder: str | None, llm_kwargs: dict[str, Any]
    ) -> None:
        self._library = _library()
        self._deadline, self._folder, self._pushes = deadline, folder, 0
        settings = {
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "load_format": "dummy",  # the weights follow
            "generation_config": "vllm",  # no sampling settings but ours
            "logprobs_mode": "raw_logprobs",
            "worker_extension_cls": RECEIVER,
            "disable_log_stats": True,
        }
        with tempfile.TemporaryDirectory() as made, _undisturbed():
            plain: Any = bare(model)
            config = copy.deepcopy(plain.config)
            config.architectures = [type(plain).__name__]
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # left over from a file that was unpacked when it was loaded
            config.save_pretrained(made)
            tokens.tokenizer.save_pretrained(made)
            try:
                self._llm = self._library.LLM(model=made, **(settings | llm_kwargs))
            except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
                said = " ".join(str(error).split())[:500]
                raise RuntimeError(f"vLLM cannot start: {said}; change engine_kwargs, or use engine=inline") from error
        config = self._llm.llm_engine.vllm_config
        self.max_model_len: int = config.model_config.max_model_len
        self._alone = config.parallel_config.world_size == 1

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers; their answers."""
        with _own_draws():
            return list(self._llm.collective_rpc(method, timeout=self._deadline, kwargs=kwargs))

    def push(self, weights: dict[str, Tensor]) -> tuple[str, list[Any]]:
        """The version that was sent, and what each worker says."""
        self._pushes += 1
        if self._alone:
            version = f"push {self._pushes}"
            reports = self._in_time(source=weights, version=version)
        else:
            with _shipped(weights, self._folder) as (path, version):
                reports = self._in_time(source=path)
        if self._llm.reset_prefix_cache() is False:  # keys and values of the old weights
            raise RuntimeError("vLLM kept the old weights' cache; wait for its requests, or use engine=inline")
        return version, reports

    def _in_time(self, **kwargs: Any) -> list[Any]:
        """A push, in a thread of its own: nothing else could stop waiting for it."""
        outcome: list[Any] = []

        def load() -> None:
            try:
                outcome.append(self.rpc("grpo_load", **kwargs))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(self._deadline)
        if not outcome or isinstance(outcome[0], TimeoutError):
            raise RuntimeError(
                f"vLLM did not take the weights within {self._deadline:g} s; raise engine_kwargs.deadline"
            )
        if isinstance(outcome[0], Exception):
            raise RuntimeError(f"vLLM cannot take these weights: {outcome[0]}; use engine=inline") from outcome[0]
        return list(outcome[0])

    def complete(self, rows: Sequence[_Row]) -> list[_Answer]:
        params = [self._library.SamplingParams(**settings, detokenize=bool(settings["stop"])) for _, settings in rows]
        prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
        answers = []
        with _own_draws():
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            made = output.outputs[0]
            ids = list(made.token_ids)
            logp = [given[i].logprob for i, given in zip(ids, made.logprobs, strict=False)]
            answers.append(_Answer(ids, logp, str(made.finish_reason)))
        return answers

    def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class _Server:
    """vLLM behind its OpenAI-style port."""

    def __init__(self, base_url: str, deadline: float, folder: str | None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"engine_kwargs: base_url={base_url} is no address; write http://host:port")
        self._url, self._deadline, self._folder = base_url.rstrip("/").removesuffix("/v1"), deadline, folder
        # A machine of our own is asked directly, whatever proxy the environment names for the world outside.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._call("/health")
        served = self._call("/v1/models")["data"][0]
        self._name, self.max_model_len = served["id"], int(served["max_model_len"])

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call all workers; their answers."""
        answer = self._call("/collective_rpc", {"method": method, "kwargs": kwargs, "timeout": self._deadline})
        results: list[Any] = answer.get("results") or []
        if not results:
            raise RuntimeError(f"{self._url} did not answer {method}; {REMEDY}")
        return results

    def push(self, weights: dict[str, Tensor]) -> tuple[str, list[Any]]:
        """The version that was sent, and what each worker says."""
        with _shipped(weights, self._folder) as (path, version):
            reports = self.rpc("grpo_load", source=path)
        if not self._call("/reset_prefix_cache", {}).get("success", True):
            raise RuntimeError(
                f"{self._url} is busy and kept the old weights' cache; give every run a server of its own"
            )
        return version, reports

    def complete(self, rows: Sequence[_Row]) -> Iterator[_Answer]:
        """All rows at once, as far as the server takes them, and in order; the first failure ends it."""
        pool = ThreadPoolExecutor(min(len(rows), REQUESTS) or 1)
        try:
            yield from pool.map(self._complete, rows)
        finally:
            pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _complete(self, row: _Row) -> _Answer:
        prompt, settings = row
        asked = {"model": self._name, "prompt": prompt, "return_token_ids": True, **settings}
        answer = self._call("/v1/completions", asked)
        try:
            choice = answer["choices"][0]
            return _Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        except (KeyError, IndexError, TypeError) as error:
            raise RuntimeError(
                f"{self._url}/v1/completions answered without token ids or log-probs ({error!r}); it must be vLLM"
            ) from None

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask until the deadline. An attempt may take half of the time left, so that a lost answer can be asked again;
        all that is asked may be asked twice."""
        end, wait, url = time.monotonic() + self._deadline, 0.1, self._url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        while True:
            left = end - time.monotonic()
            try:
                with self._opener.open(request, timeout=max(left / 2, 0.01)) as response:
                    text = response.read()
                return json.loads(text) if text else {}
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {_message(error)}"
                if error.code not in TRANSIENT:
                    remedy = "" if path.startswith("/v1/") else f"; {REMEDY}"
                    raise RuntimeError(f"{url} refused: {problem}{remedy}") from None
            except ValueError as error:
                raise RuntimeError(f"{url} did not answer with JSON ({error}); is it vLLM?") from None
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if time.monotonic() + wait >= end - 0.02 * self._deadline:
                raise RuntimeError(
                    f"{url} did not answer within {self._deadline:g} s ({problem}); "
                    "see whether the server runs, or raise engine_kwargs.deadline"
                )
            time.sleep(wait)
            wait = min(2 * wait, 5.0)


def _message(error: urllib.error.HTTPError) -> str:
    """What a server says in its own words, in one line."""
    text = error.read(2000).decode(errors="replace")
    try:
        answer = json.loads(text)
        text = str(answer.get("error", {}).get("message") or answer.get("detail") or text)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300]


@contextmanager
def _shipped(weights: Mapping[str, Tensor], folder: str | None) -> Iterator[tuple[str, str]]:
    """A file with the weights for as long as it is needed: its path and their fingerprint."""
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory(prefix="grpo-weights-", dir=folder) as made:
        if folder is not None:
            Path(made).chmod(0o755)  # the server may be another user's
        path = Path(made) / "weights.safetensors"
        save_file(here, path)
        yield str(path.resolve()), fingerprint(here)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What vLLM changes in the process that it starts in is put back: generators, our wishes to it, thread control."""
    # One process: its tensors are handed over as they are, and threads are not pinned away from training.
    wishes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    wishes |= {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
    before, setter = {name: os.environ.get(name) for name in wishes}, torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    os.environ |= wishes
    try:
        with _own_draws():
            yield
    finally:
        torch.set_num_threads = setter
        random.setstate(states[0])
        np.random.set_state(states[1])
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _own_draws() -> AbstractContextManager[Any]:
    """What vLLM draws from PyTorch's generators in here does not count."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    draws: AbstractContextManager[Any] = torch.random.fork_rng(devices)
    return draws


def _library() -> Any:
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise ImportError(
                f"vLLM is installed but cannot be loaded: {error}; repair it or set engine=inline"
            ) from error
        raise ImportError("engine=vllm needs vLLM: pip install vllm, or set engine=inline") from None


def _check_model(model: nn.Module) -> None:
    """Refuse what cannot be pushed."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(
            f"engine=vllm: {adapter.peft_type.value} cannot be merged into weights; use LoRA, or engine=transformers"
        )
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError("engine=vllm: weights in 4 or 8 bits cannot be pushed; use engine=inline, or quantize=none")
