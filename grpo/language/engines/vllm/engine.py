"""The engine: requests to vLLM, wherever it runs, and completions from what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from grpo.config import ConfigError
from grpo.language.engines import Completion, Engine, Groups, Sampling, Stop, Tokens, in_groups
from grpo.language.engines.inline import check, context_of, evaluating
from grpo.language.engines.vllm.local import LocalVLLM
from grpo.language.engines.vllm.requests import Answer
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.engines.vllm.weights import checkpoint

ECHO = 0.2
"""Nats by which vLLM may be off the median token. Seen: 0.04 in bfloat16, 3 with a head that no push reached."""


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
        self._vllm: LocalVLLM | VLLMServer
        if base_url is not None:
            if llm_kwargs:
                raise ConfigError(f"engine_kwargs: {', '.join(llm_kwargs)} must be given to the server at {base_url}")
            self._vllm = VLLMServer(base_url, deadline, folder)
        else:
            llm_kwargs |= {
                "gpu_memory_utilization": gpu_memory_utilization,
                "max_model_len": max_model_len,
                "tensor_parallel_size": tensor_parallel_size,
            }
            self._vllm = LocalVLLM(model, tokens, deadline, folder, llm_kwargs)
        self.context = min(self._vllm.max_model_len, context_of(model))
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
                    f"prompt {i} has {len(prompt)} tokens and vLLM's max_model_len is {context:.0f}; raise it"
                )
            room[i] = int(min(room[i], context - len(prompt)))
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

    def _completion(self, answer: Answer, known: bool) -> Completion:
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


def _check_model(model: nn.Module) -> None:
    """Refuse what cannot be pushed."""
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ConfigError(
            f"engine=vllm: {adapter.peft_type.value} cannot be merged into weights; use LoRA, or engine=transformers"
        )
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        raise ConfigError("engine=vllm: weights in 4 or 8 bits cannot be pushed; use engine=inline, or quantize=none")
