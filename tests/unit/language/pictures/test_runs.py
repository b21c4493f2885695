"""A whole run of an image-text model: from its folder to samples with thumbnails, resumed exactly, and loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.run import checkpoint
from tests.unit.language.pictures import drawn, layouts
from tests.unit.language.pictures.judge import letters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its processor, and a data file whose rows name images beside it."""
    path: Path = tmp_path_factory.mktemp("vision")
    model, processor = layouts.make("qwen2_5_vl")
    model.save_pretrained(path / "model")
    processor.save_pretrained(path / "model")
    lines = []
    for i in range(6):
        drawn.noise(i).save(path / f"{i}.png")
        lines.append(json.dumps({"question": f"what is {i}?", "images": [f"{i}.png"], "answer": str(i)}))
    (path / "data.jsonl").write_text("\n".join(lines))
    return path


def trainer_of(folder: Path, engine: str = "transformers", **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(
        model=str(folder / "model"), dataset=str(folder / "data.jsonl"), eval_dataset=str(folder / "data.jsonl"),
        prompt_column="question", engine=engine, group_size=4, groups_per_step=2, max_completion_length=5,
        lora_rank=4, learning_rate=1e-2, beta=0.1, preflight=False, **settings,
    )  # fmt: skip
    return GRPOTrainer(args=config, reward_funcs=letters)


def numbers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["transformers", "inline"])
def test_a_run_is_resumed_exactly_and_shows_its_images(folder: Path, tmp_path: Path, engine: str) -> None:
    cut, often = tmp_path / "cut", {"checkpoint_every": 2, "sample_every": 1, "engine": engine}
    trainer_of(folder, output_dir=str(tmp_path / "whole"), **often).train(4, evaluate_every=2)
    trainer_of(folder, output_dir=str(cut), **often).train(2, evaluate_every=2)
    trainer_of(folder, output_dir=str(cut), **often).train(4, evaluate_every=2, resume_from_checkpoint=True)
    assert numbers(cut) == numbers(tmp_path / "whole")
    last = "checkpoints/step-00000004"
    states = [checkpoint.load(path / last).state.arrays for path in (cut, tmp_path / "whole")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.as_tensor(states[0][name]).equal(torch.as_tensor(states[1][name])) for name in states[0])
    assert "eval/accuracy" in numbers(cut)[-1]

    rows = [json.loads(line) for line in (cut / "samples" / "step-00000003.jsonl").read_text().splitlines()]
    assert len({row["media"][0]["file"] for row in rows}) == 2
    for row in rows:
        (shown,) = row["media"]
        small = Image.open(cut / "samples" / shown["file"]).convert("RGB")
        assert small.tobytes() == drawn.noise(row["data_row"]).tobytes()
    assert len(list((cut / "samples").glob("image-*.png"))) <= 6


def test_what_is_left_is_loaded_again(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder)
    trainer.step()
    saved = trainer.save_model(tmp_path / "model", merge=True)
    (tmp_path / "data.jsonl").write_text((folder / "data.jsonl").read_text())
    for image in folder.glob("*.png"):
        shutil.copy(image, tmp_path)
    other = trainer_of(tmp_path)
    assert saved == tmp_path / "model"
    prompts = [t.source.prompts[3] for t in (trainer, other)]
    assert prompts[0].ids == prompts[1].ids and prompts[0].text == prompts[1].text
    seeds = [1, 2]
    told = [
        [sample.ids.tolist() for sample in t.source.sample([p], 2, t.config.sampling, seeds)]
        for t, p in zip((trainer, other), prompts, strict=True)
    ]
    assert told[0] == told[1]
