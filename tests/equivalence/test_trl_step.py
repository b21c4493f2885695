"""One step is TRL's: same weights, prompts, completions, rewards and words; same loss, same gradients.

TRL's side was recorded by `tests/golden/peers/trl_step.py`.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.engines import Completion, Engine, in_groups

DATA = np.load(Path(__file__).parents[1] / "golden" / "data" / "trl_step.npz", allow_pickle=False)
RECORD = json.loads(str(DATA["record"]))
CASES = {case["name"]: case | {"number": number} for number, case in enumerate(RECORD["cases"])}


class Fixed(Engine):
    """An engine that has only the recorded completions to offer, and no log-probs of its own."""

    name, exact = "fixed", False

    def __init__(self, tokenizer) -> None:
        self.prompts = [tokenizer(row["prompt"])["input_ids"] for row in RECORD["rows"]]
        self.eos = tokenizer.eos_token_id

    def stream(self, prompts, count, sampling, seeds):
        assert [list(prompt) for prompt in prompts] == self.prompts
        assert count * len(prompts) == len(RECORD["completion_ids"])
        made = [
            Completion(torch.tensor(ids), None, "eos" if ids[-1] == self.eos else "length")
            for ids in RECORD["completion_ids"]
        ]
        return in_groups(made, count)

    def refresh(self, version: int = 0) -> None: ...

    def close(self) -> None: ...


def worth(name):
    def function(completions, worth, **columns):
        return [next(w[name] for w in known if w["text"] == c) for c, known in zip(completions, worth, strict=True)]

    function.__name__ = name
    return function


def model(kind: str) -> LlamaForCausalLM:
    made = LlamaForCausalLM(LlamaConfig(**RECORD["config"]))
    weights = {name: torch.tensor(DATA[f"{kind}/{name}"]) for name in made.state_dict()}
    made.load_state_dict(weights)
    return made


def step(words, **more):
    """Our step with TRL's words: its report, and the gradient of each update."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(RECORD["tokenizer"]),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    policy = model("policy")
    optimizer = torch.optim.SGD(policy.parameters(), lr=words["learning_rate"])
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(np.concatenate([p.grad.numpy().ravel() for p in policy.parameters()]))
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in this process")  # closures cannot be sent to workers
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=[worth("first"), worth("second")],
            args=GRPOConfig(**words, preflight=False, **more),
            train_dataset=RECORD["rows"],
            processing_class=tokenizer,
            optimizers=(optimizer, None),
            ref_model=model("reference") if words.get("beta") else None,
        )
    trainer.source.engine = Fixed(tokenizer)
    report = trainer.step()
    trainer.source.close()
    return report, np.stack(gradients)


def assert_same_learning(case, report, gradients):
    theirs = DATA[f"gradients/{case['number']}"]
    assert gradients.shape == theirs.shape
    np.testing.assert_allclose(report["loss"], np.mean(case["losses"]), rtol=1e-5, atol=1e-7)
    off = np.linalg.norm(gradients - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    assert (off < 1e-5).all(), f"relative difference of the gradients: {off}"
    np.testing.assert_allclose(gradients, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


def means_otherwise(words) -> set[str]:
    """Metrics that TRL takes over something else than their name says, so that ours differ."""
    found = set()
    if "gradient_accumulation_steps" in words:  # there a mean of the means of micro-batches
        found |= {"kl", "entropy"}
    if words.get("importance_sampling_level") == "sequence":  # there a share of the rows, here of the tokens
        found |= {f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")}
    if words.get("scale_rewards") == "batch" or "multi_objective_aggregation" in words:  # there the batch's std
        found |= {"frac_reward_zero_std"}
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_trls_words_has_trls_loss_gradients_and_metrics(name):
    case = CASES[name]
    report, gradients = step(case["words"])
    assert_same_learning(case, report, gradients)
    for metric in case["metrics"][0].keys() & report.keys() - means_otherwise(case["words"]):
        theirs = np.mean([update[metric] for update in case["metrics"] if metric in update])
        assert report[metric] == pytest.approx(theirs, rel=1e-5, abs=1e-6), metric


@pytest.mark.parametrize("more", [{"packing": "packed"}, {"tokens_per_microbatch": 1}], ids=["packed", "a row a pass"])
@pytest.mark.parametrize("name", ["grpo, KL, warm", "bnpo, KL", "dapo, twice", "dapo, top entropies"])
def test_it_stays_trls_step_however_the_rows_are_laid_out(name, more):
    assert_same_learning(CASES[name], *step(CASES[name]["words"], **more))
