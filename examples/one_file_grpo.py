"""GRPO in one file: PyTorch and nothing else.

    python examples/one_file_grpo.py --steps 200 --seed 0

The task is the smallest that has everything a language model has: prompts, several sampled answers a prompt, answers of
different lengths, a score for the whole answer only at its end. The prompt is a digit d; the right answer writes d
(d mod 3) + 1 times and stops: 4 → "4 4 END", 5 → "5 5 5 END". The score is how far an answer follows the right one.

One step of GRPO (DeepSeekMath, arXiv:2402.03300), in the order of `train`:
  1. sample a group of G answers to each prompt,
  2. score them,
  3. compare each with its own group: A = (r − mean) / (std + ε). There is no critic,
  4. some passes over the same answers: raise what beat its group, lower what did not, by at most the clip,
     and stay near the reference policy (KL).

Left out on purpose, all in the library: micro-batches, engines that sample faster, checkpoints, other variants.
"""

import argparse
import copy

import torch
from torch import nn

DIGITS, END, LENGTH = 10, 10, 5


class Policy(nn.Module):
    """Next symbol from the prompt, the previous symbol and the position: 11 logits."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.prompt = nn.Embedding(DIGITS, width)
        self.previous = nn.Embedding(DIGITS + 2, width)  # the last row stands for "nothing written yet"
        self.position = nn.Embedding(LENGTH, width)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, DIGITS + 1))

    def forward(self, prompt_N: torch.Tensor, answer_NT: torch.Tensor) -> torch.Tensor:
        """Logits (N, T, V) of every position, each seeing what came before it."""
        start_N1 = torch.full_like(answer_NT[:, :1], END + 1)
        previous_NT = torch.cat([start_N1, answer_NT[:, :-1]], dim=1)
        position_T = torch.arange(answer_NT.shape[1])
        return self.head(self.prompt(prompt_N)[:, None] + self.previous(previous_NT) + self.position(position_T))


def log_probs(policy: Policy, prompt_N: torch.Tensor, answer_NT: torch.Tensor) -> torch.Tensor:
    """log π of each written symbol, (N, T)."""
    logp_NTV = policy(prompt_N, answer_NT).log_softmax(-1)
    return logp_NTV.gather(-1, answer_NT[..., None]).squeeze(-1)


@torch.no_grad()
def sample(policy: Policy, prompt_N: torch.Tensor, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers (N, T) and the mask of symbols that count: up to and including the first END."""
    answer_NT = torch.full((len(prompt_N), LENGTH), END)
    for t in range(LENGTH):
        logits_NV = policy(prompt_N, answer_NT)[:, t]
        answer_NT[:, t] = logits_NV.argmax(-1) if greedy else logits_NV.softmax(-1).multinomial(1).squeeze(-1)
    ended_NT = (answer_NT == END).long().cumsum(1)
    mask_NT = (ended_NT - (answer_NT == END).long()) == 0
    return answer_NT, mask_NT


def reward(prompt_N: torch.Tensor, answer_NT: torch.Tensor) -> torch.Tensor:
    """Share of the right answer that was written before the first mistake: 1 is perfect."""
    scores = []
    for prompt, answer in zip(prompt_N.tolist(), answer_NT.tolist(), strict=True):
        right = [prompt] * (prompt % 3 + 1) + [END]
        correct = 0
        while correct < len(right) and answer[correct] == right[correct]:
            correct += 1
        scores.append(correct / len(right))
    return torch.tensor(scores)


def advantages(reward_N: torch.Tensor, group_size: int, eps: float = 1e-4) -> torch.Tensor:
    """(r − mean) / (std + ε) inside each group of consecutive rows; a group of equals gets exactly 0."""
    reward_PG = reward_N.view(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    centred_PG = torch.where(reward_PG.amax(1, keepdim=True) == reward_PG.amin(1, keepdim=True), 0.0, centred_PG)
    return (centred_PG / (reward_PG.std(1, keepdim=True) + eps)).flatten()


def grpo_loss(logp_NT, old_logp_NT, ref_logp_NT, advantage_N, mask_NT, epsilon: float, beta: float) -> torch.Tensor:
    """−min(r·A, clip(r)·A) + β·KL, mean over each answer's symbols, then over answers."""
    ratio_NT = (logp_NT - old_logp_NT).exp()
    advantage_N1 = advantage_N[:, None]
    policy_NT = -torch.minimum(ratio_NT * advantage_N1, ratio_NT.clip(1 - epsilon, 1 + epsilon) * advantage_N1)
    kl_NT = (ref_logp_NT - logp_NT).exp() - (ref_logp_NT - logp_NT) - 1  # k3: never negative, unbiased
    per_symbol_NT = (policy_NT + beta * kl_NT) * mask_NT
    return (per_symbol_NT.sum(1) / mask_NT.sum(1).clip(min=1)).mean()


def train(
    seed=0, steps=200, group_size=16, passes=2, epsilon=0.2, beta=0.04, lr=3e-3, loss=grpo_loss, log=print
) -> Policy:
    """The whole algorithm."""
    torch.manual_seed(seed)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    prompt_N = torch.arange(DIGITS).repeat_interleave(group_size)

    for step in range(1, steps + 1):
        answer_NT, mask_NT = sample(policy, prompt_N)
        reward_N = reward(prompt_N, answer_NT)
        advantage_N = advantages(reward_N, group_size)
        with torch.no_grad():
            old_logp_NT = log_probs(policy, prompt_N, answer_NT)
            ref_logp_NT = log_probs(reference, prompt_N, answer_NT)
        for _ in range(passes):
            logp_NT = log_probs(policy, prompt_N, answer_NT)
            optimizer.zero_grad()
            loss(logp_NT, old_logp_NT, ref_logp_NT, advantage_N, mask_NT, epsilon, beta).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if step == 1 or step % 25 == 0:
            log(f"step {step:4d}  reward {reward_N.mean():.3f}  perfect {(reward_N == 1).float().mean():.0%}")
    return policy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny policy with GRPO and show what it learned.")
    parser.add_argument("--steps", type=int, default=200, help="sampling-and-update steps")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same numbers")
    options = parser.parse_args()

    policy = train(seed=options.seed, steps=options.steps)
    prompts = torch.arange(DIGITS)
    answers, masks = sample(policy, prompts, greedy=True)
    for prompt, answer, mask, score in zip(prompts, answers, masks, reward(prompts, answers), strict=True):
        written = " ".join("END" if symbol == END else str(int(symbol)) for symbol in answer[mask])
        print(f"{int(prompt)} → {written}" + ("" if score == 1 else f"   (score {score:.2f})"))
