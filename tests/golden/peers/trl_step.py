"""Records whole optimizer steps of TRL's own GRPOTrainer: `python -P tests/golden/peers/trl_step.py`, with trl 1.16.

A small Llama, three prompts with four fixed completions each, and fixed rewards. Sampling alone is replaced; what is
kept of every step is the loss that TRL backpropagates, the gradient of every weight before the optimizer moves it, and
TRL's metrics. The library is not imported: `tests/equivalence/test_trl_step.py` does the same steps with it, from the
same words.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parents[1] / "data" / "trl_step.npz"

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstu"]
LONGEST = 6

SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}

PROMPTS = ["c d e f g h i", "b", "q r s t"]
COMPLETIONS = [
    [["e", "d", EOS], ["u", "t", "s", "r", "q", "p"], [EOS], ["a", "a", "b", "c", "d", EOS]],
    [["f", EOS], ["g", "h", "i", EOS], ["k", "l", "m", "n", "o", "p"], ["j", "j", EOS]],
    [["m", "n", "a", "b", EOS], ["c", "e", "g", "i", "k", "m"], ["c", "e", "t", "t", "t", "t"], ["s", EOS]],
]
"""Ended, cut off at the limit, ended right at it, and nothing but the end; a poor one that begins as the best does."""

REWARDS = [
    [[1.0, -0.5], [0.0, 2.0], [0.25, 0.0], [0.75, 0.125]],
    [[1.0, 0.0], [0.5, 1.0], [1.0, 0.0], [0.5, 1.0]],
    [[0.0, 1.0], [1.0, None], [0.0, 0.0], [0.0, -2.0]],
]
"""Of the two functions; the second group's are worth the same under the weights, and None is no opinion."""

COMMON: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 12,
    "max_completion_length": LONGEST,
    "reward_weights": [1.0, 0.5],
    "learning_rate": 0.03,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "disable_dropout": True,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
}
KL = {"beta": 0.04, "use_bias_correction_kl": False}
MICRO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
TWICE = {"num_iterations": 2, "temperature": 0.7}


def cases() -> dict[str, dict[str, Any]]:
    """Settings of each step beside the common ones, in TRL's words."""
    found: dict[str, dict[str, Any]] = {}
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        warm = {"loss_type": loss_type, "temperature": 0.7}
        found[f"{loss_type}"] = {"loss_type": loss_type, "temperature": 1.0, "beta": 0.0}
        found[f"{loss_type}, warm"] = warm | {"beta": 0.0}
        found[f"{loss_type}, KL"] = {"loss_type": loss_type, "temperature": 1.0} | KL
        found[f"{loss_type}, KL, warm"] = warm | KL
    for loss_type in ("grpo", "dr_grpo", "dapo"):  # bnpo takes its mean over a micro-batch
        found[f"{loss_type}, KL, micro-batches"] = {"loss_type": loss_type} | KL | MICRO
    for loss_type in ("grpo", "dapo"):
        found[f"{loss_type}, truncated masked"] = {"loss_type": loss_type, "mask_truncated_completions": True} | KL
        found[f"{loss_type}, twice"] = {"loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.15} | KL | TWICE
    corrected = {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True}
    found["grpo, corrected KL"] = corrected
    found["grpo, corrected KL, twice"] = corrected | {"epsilon": 0.1} | TWICE
    found["grpo, sequence ratio, twice"] = {"loss_type": "grpo", "importance_sampling_level": "sequence"} | TWICE
    found["grpo, two-sided clip, twice"] = {"loss_type": "grpo", "epsilon": 0.05, "delta": 1.1} | TWICE
    found["dapo, std of the batch"] = {"loss_type": "dapo", "scale_rewards": "batch"}
    found["dr_grpo, no std"] = {"loss_type": "dr_grpo", "scale_rewards": "none"}
    found["dapo, rewards apart"] = {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"}
    found["dapo, top entropies"] = {"loss_type": "dapo", "top_entropy_quantile": 0.5}
    found["dapo, entropy bonus"] = {"loss_type": "dapo", "entropy_coef": 0.02}
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model(seed: int) -> LlamaForCausalLM:
    """Far from uniform, so that nothing is lost in rounding."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape))
    return made


def completion_ids() -> list[list[int]]:
    return [[t if isinstance(t, int) else WORDS.index(t) for t in one] for group in COMPLETIONS for one in group]


def rows(own: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Each prompt with what its completions are worth, by their text."""
    texts = own.batch_decode(completion_ids(), skip_special_tokens=True)
    worth = [
        [{"text": texts[4 * g + m], "first": one[0], "second": one[1]} for m, one in enumerate(group)]
        for g, group in enumerate(REWARDS)
    ]
    return [{"prompt": prompt, "worth": group} for prompt, group in zip(PROMPTS, worth, strict=True)]


def first(completions, worth, **_):
    return [next(w["first"] for w in known if w["text"] == c) for c, known in zip(completions, worth, strict=True)]


def second(completions, worth, **_):
    return [next(w["second"] for w in known if w["text"] == c) for c, known in zip(completions, worth, strict=True)]


class Recorded(trl.GRPOTrainer):
    """TRL's trainer with fixed completions, which notes the losses it backpropagates."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        assert len(prompt_ids) == len(completion_ids()), "all completions are asked for at once"
        return completion_ids(), None

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.losses.append(float(loss))
        return loss


def step(words: dict[str, Any], policy: LlamaForCausalLM, folder: Path) -> dict[str, Any]:
    """One rollout and its optimizer steps: the losses, gradients and metrics of each."""
    policy.config._name_or_path = str(folder / "reference")  # where TRL takes its reference from
    optimizer = torch.optim.SGD(policy.parameters(), lr=words["learning_rate"])
    gradients: list[np.ndarray] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(np.concatenate([p.grad.numpy().ravel() for p in policy.parameters()]))
    )
    updates = words.get("num_iterations", 1)
    own = tokenizer()
    settings = words | {"output_dir": str(folder / "out"), "max_steps": updates, "disable_tqdm": True}
    trainer = Recorded(
        model=policy,
        reward_funcs=[first, second],
        args=trl.GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows(own)),
        processing_class=own,
        optimizers=(optimizer, None),
    )
    trainer.losses = []
    trainer.train()
    each = words.get("gradient_accumulation_steps", 1)
    losses = [sum(trainer.losses[i : i + each]) for i in range(0, len(trainer.losses), each)]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(gradients) == len(losses) == len(logs) == updates
    if updates > 1:
        assert logs[-1]["clip_ratio/region_mean"] > 0, "the second update was to be clipped somewhere"
    kept = {name for name in logs[0] if "time" not in name and name not in ("epoch", "step", "learning_rate")}
    metrics = [{name: value for name, value in log.items() if name in kept} for log in logs]
    return {"losses": losses, "metrics": metrics, "gradients": np.stack(gradients)}


def main() -> None:
    torch.set_num_threads(1)
    policy, reference = model(0), model(1)
    with torch.no_grad():  # near enough for the KL to be of the size it has in training
        for mine, other in zip(reference.parameters(), policy.parameters(), strict=True):
            mine.lerp_(other, 0.9)
    arrays = {f"policy/{name}": value.numpy() for name, value in policy.state_dict().items()}
    arrays |= {f"reference/{name}": value.numpy() for name, value in reference.state_dict().items()}
    start = {name: value.clone() for name, value in policy.state_dict().items()}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(Path(folder) / "reference")
        for number, (name, words) in enumerate(cases().items()):
            fresh = LlamaForCausalLM(LlamaConfig(**SHAPE))
            fresh.load_state_dict(start)
            recorded = step(COMMON | words, fresh, Path(folder))
            arrays[f"gradients/{number}"] = recorded.pop("gradients")
            found.append({"name": name, "words": COMMON | words, **recorded})
            print(
                f"{name}: loss {recorded['losses']}, gradient {np.linalg.norm(arrays[f'gradients/{number}'], axis=1)}"
            )
    record = {
        "notes": "Optimizer steps of TRL's GRPOTrainer on fixed completions and rewards, by peers/trl_step.py. Of each "
        "case: settings in TRL's words; loss, summed over micro-batches, metrics and gradient of every update.",
        "versions": {each.__name__: each.__version__ for each in (trl, transformers, accelerate, torch)},
        "config": SHAPE,
        "tokenizer": tokenizer().backend_tokenizer.to_str(),
        "rows": rows(tokenizer()),
        "completion_ids": completion_ids(),
        "cases": found,
    }
    np.savez_compressed(DATA, record=np.array(json.dumps(record)), **arrays)
    print(f"{DATA.name}: {len(found)} cases, {DATA.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
