"""vLLM in this process."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from grpo.language.engines import Tokens
from grpo.language.engines.inline import bare
from grpo.language.engines.vllm.echo import ECHO, gap_of, probes, told
from grpo.language.engines.vllm.requests import Answer, Request
from grpo.language.engines.vllm.transfer import expect_taken
from grpo.language.engines.vllm.weights import RECEIVER, checkpoint, shipped


class LocalVLLM:
    """vLLM in this process."""

    def __init__(
        self, model: nn.Module, tokens: Tokens, deadline: float, folder: str | None, llm_kwargs: dict[str, Any]
    ) -> None:
        self._library = _library()
        self._model, self._version = model, ""
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

    def push(self, number: int = 0) -> None:
        """The model's weights, and whether they arrived; the first time with a few tokens that both score."""
        weights = checkpoint(self._model)
        self._pushes += 1
        if self._alone:
            version = f"push {self._pushes}"
            reports = self._in_time(source=weights, version=version)
        else:
            with shipped(weights, self._folder) as (path, version):
                reports = self._in_time(source=path)
        if self._llm.reset_prefix_cache() is False:  # keys and values of the old weights
            raise RuntimeError("vLLM kept the old weights' cache; wait for its requests, or use engine=inline")
        expect_taken(version, reports)
        self._version = version
        if self._pushes == 1:
            self._echo()

    def tend(self, number: int) -> None:
        """Nothing is lost in one process."""

    def ready(self, temperature: float) -> tuple[bool, bool]:
        """Whether workers divide logits by it from now on, the right weights in place; log-probs stay the raw ones."""
        reports = self.rpc("grpo_ready", temperature=temperature or 1.0)
        if any(report["version"] != self._version for report in reports):
            self.push()
            reports = self.rpc("grpo_ready", temperature=temperature or 1.0)
        return all(report["heads"] for report in reports), False

    def _echo(self) -> None:
        """vLLM starts from random weights, so a part of the model that no push reaches shows in a few tokens."""
        self.ready(1.0)
        gap = gap_of(self._model, self.complete([(ids, {**how, "stop": []}) for ids, how in probes()]))
        if not gap < ECHO:
            raise RuntimeError(f"{told(gap)}; use engine=inline")

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

    def complete(self, rows: Sequence[Request]) -> list[Answer]:
        params = [self._library.SamplingParams(**settings, detokenize=bool(settings["stop"])) for _, settings in rows]
        prompts = [{"prompt_token_ids": ids} for ids, _ in rows]
        answers = []
        with _own_draws():
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            made = output.outputs[0]
            ids = list(made.token_ids)
            logp = [given[i].logprob for i, given in zip(ids, made.logprobs, strict=False)]
            answers.append(Answer(ids, logp, str(made.finish_reason)))
        return answers

    def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


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
