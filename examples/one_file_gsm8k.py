"""GRPO on GSM8K in one file: PyTorch, transformers and nothing else.

    python examples/one_file_gsm8k.py --model PATH_OR_ID --data train.jsonl --steps 100

A line of the data is {"question": …, "answer": "… #### 18"}. Settings are those of `grpo train gsm8k`, and so is a
step: given the same completions, the same rewards, advantages, loss and gradients (tests/equivalence). In the order of
`step`: sample a group of answers to each question, score them, compare each with its own group, make one update.

Departures from the paper (DeepSeekMath, arXiv:2402.03300), which the library's preset makes too:
  1. One update a batch of samples, so that the ratio π/π_old is 1 and never clipped: only its gradient counts.
  2. Log-probs are those at the sampling temperature, and over all tokens, those that top_p would not draw included.
  3. A group of equal rewards gets exactly 0, not what rounding leaves over; it still counts in the mean.
  4. An eighth of a point for each tag of the form that was asked for: a slope to climb before answers are right.
  5. The reference is the model as loaded, for the whole run; the paper replaces it from time to time.
Departures from the library, where more code buys speed, safety or reach:
  6. transformers' `generate` samples: no engine, no seed for each completion, no log-probs recorded on the way.
  7. Rows are padded, and each has a copy of the prompt. The reference is a second model in memory.
  8. Rewards run in this process, without a time limit, and know numbers only: no \\boxed{}, fractions, units, algebra.
  9. No evaluation, checkpoints, resumption or run folder; --output gets the last model.
"""

import argparse
import copy
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = "Reason step by step inside <think> and </think>, then give the final number inside <answer> and </answer>."
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
NUMBER = re.compile(r"(?<![\w.])-?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class Settings:
    """As the preset gsm8k has them."""

    group_size: int = 4
    groups_per_step: int = 16
    beta: float = 0.04
    learning_rate: float = 1e-6
    max_prompt_length: int = 512
    max_completion_length: int = 512
    temperature: float = 0.7
    top_p: float = 0.95
    epochs: int = 3
    max_grad_norm: float = 1.0
    rows_per_pass: int = 8  # memory alone: the gradient is the same


def load_rows(path: str | Path) -> list[dict[str, str]]:
    """Questions with their final numbers."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip()} for row in rows]


def render(tokenizer, question: str) -> list[int]:
    """The prompt's ids: a system message, the question, the header of the answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def batch_of(rows: list, step: int, size: int, seed: int) -> list:
    """The questions of a step: every epoch in an order of its own, a batch may reach into the next."""
    first = step * size
    epochs = range(first // len(rows), (first + size - 1) // len(rows) + 1)
    order = [row for epoch in epochs for row in random.Random(f"{seed} {epoch}").sample(rows, len(rows))]
    return order[first - epochs[0] * len(rows) :][:size]


@torch.no_grad()
def sample(model, tokenizer, prompts: list[list[int]], settings: Settings) -> list[torch.Tensor]:
    """A group of completions for each prompt, one group behind the other; each ends with the token that ended it."""
    ends = model.generation_config.eos_token_id
    eos = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    filler = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    width = max(map(len, prompts))
    ids_PL = torch.tensor([[filler] * (width - len(p)) + p for p in prompts], device=model.device)
    mask_PL = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    made_NL = model.generate(
        ids_PL, attention_mask=mask_PL, num_return_sequences=settings.group_size, do_sample=True,
        temperature=settings.temperature, top_p=settings.top_p, top_k=0, repetition_penalty=1.0,
        max_new_tokens=settings.max_completion_length, eos_token_id=sorted(eos), pad_token_id=filler,
    )  # fmt: skip
    rows = made_NL[:, width:].tolist()
    end_N = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in rows]
    return [torch.tensor(row[:end], device=model.device) for row, end in zip(rows, end_N, strict=True)]


def final_number(text: str) -> float | None:
    """What stands inside <answer>, else behind ####, else anywhere: its last number."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    numbers = NUMBER.findall(tagged[-1] if tagged else text.rpartition("####")[2])
    return float(re.sub(r"[$,]", "", numbers[-1])) if numbers else None


def correctness(text: str, answer: str) -> float:
    """1 for the right number."""
    return float(final_number(text) is not None and final_number(text) == final_number(answer))


def form(text: str) -> float:
    """An eighth for each tag that stands exactly once and in its place; what follows the last one costs a little."""
    placed, reached = 0, -1
    for tag in TAGS:
        if text.find(tag) > reached and text.count(tag) == 1:
            placed, reached = placed + 1, text.find(tag)
    _, closed, after = text.rpartition(TAGS[-1])
    return 0.125 * placed - (min(0.25, 0.001 * len(after.strip())) if closed else 0.0)


def advantages(reward_N: torch.Tensor, group_size: int, eps: float = 1e-4) -> torch.Tensor:
    """(r − mean) / (std + ε) inside each group of consecutive rows; a group of equals gets exactly 0."""
    reward_PG = reward_N.view(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    centred_PG = torch.where(reward_PG.amax(1, keepdim=True) == reward_PG.amin(1, keepdim=True), 0.0, centred_PG)
    return (centred_PG / (reward_PG.std(1, keepdim=True) + eps)).flatten()


def log_probs(model, prompts: list[list[int]], completions: list[torch.Tensor], temperature: float):
    """log π of every token but a row's first, (N, T), and which of them are the completion's own."""
    rows = [torch.cat([torch.tensor(p, device=c.device), c]) for p, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids_NL = torch.stack([pad(row, (0, width - len(row))) for row in rows])
    mask_NL = torch.stack([pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        logits_NLV = model(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False).logits
    logp_NTV = (logits_NLV[:, :-1].float() / temperature).log_softmax(-1)  # the logits at a token are about the next
    begin_N1 = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=ids_NL.device)
    own_NT = (torch.arange(width - 1, device=ids_NL.device) >= begin_N1) & mask_NL[:, 1:].bool()
    return logp_NTV.gather(-1, ids_NL[:, 1:, None]).squeeze(-1), own_NT


def loss_of_rows(logp_NT, ref_logp_NT, advantage_N, mask_NT, beta: float) -> torch.Tensor:
    """−ratio·A + β·KL of each row: the mean over its own tokens."""
    ratio_NT = (logp_NT - logp_NT.detach()).exp()  # 1, with the gradient of log π
    off_NT = ref_logp_NT - logp_NT
    kl_NT = off_NT.exp() - off_NT - 1  # k3: never negative, unbiased
    per_token_NT = (-ratio_NT * advantage_N[:, None] + beta * kl_NT) * mask_NT
    return per_token_NT.sum(1) / mask_NT.sum(1).clip(min=1)


def step(model, reference, optimizer, tokenizer, rows: list[dict[str, str]], settings: Settings) -> dict[str, float]:
    """The whole algorithm: sample, score, compare, learn."""
    asked = [render(tokenizer, row["question"]) for row in rows]
    completions = sample(model, tokenizer, asked, settings)
    prompts = [prompt for prompt in asked for _ in range(settings.group_size)]
    answers = [row["answer"] for row in rows for _ in range(settings.group_size)]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    right_N = torch.tensor([correctness(text, answer) for text, answer in zip(texts, answers, strict=True)])
    reward_N = right_N + torch.tensor([form(text) for text in texts])
    advantage_N = advantages(reward_N, settings.group_size).to(model.device)
    optimizer.zero_grad()
    loss = 0.0  # of the whole step, a part of its rows at a time
    for first in range(0, len(completions), settings.rows_per_pass):
        part = slice(first, first + settings.rows_per_pass)
        with torch.no_grad():
            ref_logp_NT, _ = log_probs(reference, prompts[part], completions[part], settings.temperature)
        logp_NT, mask_NT = log_probs(model, prompts[part], completions[part], settings.temperature)
        share = loss_of_rows(logp_NT, ref_logp_NT, advantage_N[part], mask_NT, settings.beta).sum() / len(completions)
        share.backward()
        loss += share.item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
    optimizer.step()
    told = {"reward": reward_N.mean().item(), "right": right_N.mean().item(), "loss": loss, "grad_norm": grad_norm}
    return told | {"length": sum(map(len, completions)) / len(completions)}


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on GSM8K in one file.")
    parser.add_argument("--model", required=True, help="a local folder or a hub id")
    parser.add_argument("--data", required=True, help="a JSONL file with question and answer in every line")
    parser.add_argument("--steps", type=int, help="as many as three epochs have, unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="a folder for the trained model")
    options, settings = parser.parse_args(), Settings()
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    rows = [r for r in load_rows(options.data) if len(render(tokenizer, r["question"])) <= settings.max_prompt_length]
    for number in range(options.steps or max(1, settings.epochs * len(rows) // settings.groups_per_step)):
        asked = batch_of(rows, number, settings.groups_per_step, options.seed)
        told = step(model, reference, optimizer, tokenizer, asked, settings)
        print(f"step {number + 1:4d}  " + "  ".join(f"{name} {value:.4g}" for name, value in told.items()), flush=True)
    if options.output:
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
