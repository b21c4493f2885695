"""The engine: requests to vLLM, wherever it runs, and completions from what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from grpo.config import ConfigError
from grpo.language.engines import Completion, Engine, Groups, Sampling, Stop, Tokens, in_groups
from grpo.language.engines.inline import check, context_of
from grpo.language.engines.vllm.local import LocalVLLM
from grpo.language.engines.vllm.remote import AT_ONCE, RemoteVLLM
from grpo.language.engines.vllm.requests import Answer


class VLLMEngine(Engine):
    """Samples with vLLM; the policy scores the completions again, since another implementation rounds differently."""

    name = "vllm"
    exact = False

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        *,
        base_url: str | None = None,
        servers: Sequence[str] | None = None,
        transfer: str = "auto",
        ahead: bool = False,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        deadline: float = 240.0,
        folder: str | None = None,
        **llm_kwargs: Any,
    ) -> None:
        """`servers` (or `base_url`, one): addresses; none: vLLM in this process. `transfer`: how weights reach servers.
        `ahead`: sample while the model learns. `deadline`: seconds for a push, and on a server for a completion.
        `folder`: where weights for other processes are put, readable to both sides; None: the system's temporary."""
        _check_model(model)
        self.model, self.tokens = model, tokens
        config: Any = model.config
        self._vocabulary: int = config.get_text_config(decoder=True).vocab_size
        self._vllm: LocalVLLM | RemoteVLLM
        if servers is not None and base_url is not None:
            raise ConfigError("servers and engine_kwargs.base_url say the same thing; give servers")
        urls = servers if servers is not None else None if base_url is None else [base_url]
        if urls is not None:
            if llm_kwargs:
                raise ConfigError(f"engine_kwargs: {', '.join(llm_kwargs)} must be given to the server at {urls[0]}")
            self.at_once = AT_ONCE
            self._vllm = RemoteVLLM(
                model, tokens, urls, deadline=deadline, folder=folder, transfer=transfer, ahead=ahead
            )
        else:
            llm_kwargs |= {
                "gpu_memory_utilization": gpu_memory_utilization,
                "max_model_len": max_model_len,
                "tensor_parallel_size": tensor_parallel_size,
            }
            self._vllm = LocalVLLM(model, tokens, deadline, folder, llm_kwargs)
        self.context = min(self._vllm.max_model_len, context_of(model))
        self.refresh()

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
                    f"prompt {i} has {len(prompt)} tokens and vLLM's max_model_len is {context:.0f}; raise it"
                )
            room[i] = int(min(room[i], context - len(prompt)))
        scaled, processed = self._vllm.ready(sampling.temperature)
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
        known = (known and not processed) or (processed and not sampling.truncates)
        yield from (self._completion(answer, known) for answer in self._vllm.complete(rows))

    def refresh(self, version: int = 0) -> None:
        """Push the policy's weights, and make sure that they arrived."""
        self._vllm.push(version)

    def tend(self, version: int) -> None:
        """The weights are called by another number; servers that are back get them."""
        self._vllm.tend(version)

    def close(self) -> None:
        """Let go of the copy of the model; a server is left running."""
        self._vllm.close()

    def _completion(self, answer: Answer, known: bool) -> Completion:
        if flaw := answer.flaw():
            raise RuntimeError(f"vLLM {flaw}; see its own log")
        ids, logp = torch.tensor(answer.ids, dtype=torch.long), torch.tensor(answer.logp, dtype=torch.float32)
        if not bool(logp.isfinite().all()):
            raise FloatingPointError("vLLM's log-probs are not finite: the weights hold NaN or infinity, or overflow")
        stop: Stop = "eos" if answer.ids[-1] in self.tokens.eos else "stop" if answer.finish == "stop" else "length"
        version = None if answer.version is None else torch.tensor(answer.version, dtype=torch.long)
        return Completion(ids, logp if known else None, stop, version=version)


def _check_model(model: nn.Module) -> None:
    """Refuse what cannot be pushed."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(
            f"engine=vllm: {adapter.peft_type.value} cannot be merged into weights; use LoRA, or engine=transformers"
        )
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError("engine=vllm: weights in 4 or 8 bits cannot be pushed; use engine=inline, or quantize=none")
