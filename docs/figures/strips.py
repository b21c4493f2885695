"""Draw the pictures of the README and the landing page, each from a run of its own; two minutes on one core.

pole.gif        one start, four tries each: the policy before the first step, after three, and when it is solved
answers.svg     a group of a transformer that learns to sort digits, each token on the colour of its term
throws.png      balls in the wind, as the tutorial on own policies draws them
dream.png       what a world model foresaw beside what came, cut from worldmodel-forecast.png

    python docs/figures/strips.py                      all, from fresh runs
    python docs/figures/strips.py answers --run RUN    from a run of `grpo train tiny-language` that is there
"""

import argparse
import base64
import html
import json
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from grpo.cli import main
from grpo.control import GRPOTrainer as ControlTrainer

FIGURES = Path(__file__).parent
START, TRIES, LENGTH, EVERY = 11, 4, 240, 4
INK, PALE, GREY, BLUE, ORANGE, PAPER = "#24292f", "#d0d7de", "#8c959f", "#2166ac", "#d6604d", "#ffffff"


def played(actor: torch.nn.Module, seed: int) -> list[np.ndarray]:
    """Cart and pole at every step of a few tries from one start, with actions that are drawn."""
    draw, tries = torch.Generator().manual_seed(seed), []
    for _ in range(TRIES):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=START)
        seen, over = [observation], False
        while not over:
            with torch.no_grad():
                p = actor(torch.as_tensor(observation)[None]).softmax(-1)[0]
            observation, _, ended, cut, _ = env.step(int(torch.multinomial(p, 1, generator=draw)))
            seen.append(observation)
            over = ended or cut
        tries.append(np.array(seen))
    return tries


def pole() -> None:
    """Three stages of one training side by side, four tries in each."""
    trainer = ControlTrainer(env="CartPole-v1", gamma=0.99, group_size=4, groups_per_step=2, hidden=[32, 32], seed=3,
                             num_iterations=8, decisions_per_minibatch=2048, target_kl=0.1)  # fmt: skip
    stages = [("before training", played(trainer.actor, 0))]
    trainer.train(steps=3, progress=None)
    stages.append(("after 3 steps", played(trainer.actor, 0)))
    reports = trainer.train(steps=60, stop_at=475, evaluate_every=1, progress=None)
    stages.append((f"after {reports[-1].step} steps: solved", played(trainer.actor, 0)))
    scale, wide, tall = 3, 250, 196
    font = ImageFont.truetype(str(_font()), 12 * scale)
    frames = []
    for at in range(0, LENGTH, EVERY):
        picture = Image.new("RGB", (wide * 3 * scale, tall * scale), PAPER)
        draw = ImageDraw.Draw(picture)
        for i, (title, tries) in enumerate(stages):
            _stage(draw, font, title, tries, at, i * wide, scale)
        frames.append(picture.resize((wide * 3, tall), Image.Resampling.LANCZOS))
    palette = frames[2].quantize(20)  # one for all, with poles that stand in it
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    wait = [80] * len(frames)
    wait[-1] = 2000
    frames[0].save(FIGURES / "pole.gif", save_all=True, append_images=frames[1:], duration=wait, loop=0, optimize=True)


def _stage(draw: Any, font: Any, title: str, tries: list[np.ndarray], at: int, left: int, scale: int) -> None:
    """One policy's tries as they are at this step: those that have fallen stay pale where they fell."""
    draw.text(((left + 12) * scale, 8 * scale), title, fill=INK, font=font)
    for row, seen in enumerate(tries):
        over = at >= len(seen) - 1
        x, _, angle, _ = seen[min(at, len(seen) - 1)]
        y = 66 + row * 41
        ink, wood = (PALE, PALE) if over else (INK, ORANGE)
        draw.line([((left + 10) * scale, y * scale), ((left + 190) * scale, y * scale)], fill=PALE, width=scale)
        cart = left + 100 + x / 2.4 * 85
        draw.rectangle([((cart - 9) * scale, (y - 8) * scale), ((cart + 9) * scale, y * scale)], fill=ink)
        tip = (cart + 29 * np.sin(angle), y - 8 - 29 * np.cos(angle))
        draw.line([(cart * scale, (y - 8) * scale), (tip[0] * scale, tip[1] * scale)], fill=wood, width=4 * scale)
        told = f"{min(at, len(seen) - 1)}"
        draw.text(((left + 198) * scale, (y - 14) * scale), told, fill=GREY if over else INK, font=font)


def _font() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


def dream() -> None:
    """Eight columns of the world model's forecast, as the bench has left it, with names."""
    found = Image.open(FIGURES / "worldmodel-forecast.png").convert("RGB").crop((0, 0, 1024, 256))
    picture = Image.new("RGB", (750, 174), PAPER)
    picture.paste(found.resize((680, 170), Image.Resampling.LANCZOS), (68, 2))
    draw, font = ImageDraw.Draw(picture), ImageFont.truetype(str(_font()), 13)
    for y, word in ((36, "real"), (121, "dreamt")):
        draw.text((8, y), word, fill=INK, font=font)
    picture.quantize(160, dither=Image.Dither.NONE).save(FIGURES / "dream.png", optimize=True)


def throws() -> None:
    """What the tutorial on own policies drew first."""
    cells = json.loads((FIGURES.parent / "tutorials" / "policy.ipynb").read_text(encoding="utf-8"))["cells"]
    drawn = [
        out["data"]["image/png"]
        for cell in cells
        for out in cell.get("outputs", ())
        if "image/png" in out.get("data", {})
    ]
    (FIGURES / "throws.png").write_bytes(base64.b64decode("".join(drawn[0])))


def answers(run: Path | None) -> None:
    """The group of the last kept step whose tries differ most, best first."""
    with tempfile.TemporaryDirectory() as place:
        if run is None:
            run = Path(place) / "run"
            main(["train", "tiny-language", "--run.steps", "150", "--run.evaluate_every", "150", "--logdir", str(run)])
        last = sorted((run / "samples").glob("*.jsonl"))[-1]
        rows = [json.loads(line) for line in last.read_text(encoding="utf-8").splitlines()]
        term_NT = np.load(last.with_suffix(".npz"))["term"].astype(float)  # of the loss: less is better
    groups = {row["group"] for row in rows}
    spread = {group: len({row["reward"] for row in rows if row["group"] == group}) for group in groups}
    best = max(sorted(groups), key=lambda group: spread[group])
    members = sorted((row for row in rows if row["group"] == best), key=lambda row: -row["reward"])
    step = int(last.stem.removeprefix("step-"))
    (FIGURES / "answers.svg").write_text(_group(members, term_NT, step), encoding="utf-8")


def _group(members: list[dict[str, Any]], term_NT: np.ndarray, step: int) -> str:
    """A table: tokens on their colours, reward, advantage as a bar."""
    most = max(np.abs(term_NT[row["row"]]).max() for row in members) or 1.0
    tall = 70 + 30 * len(members) + 34
    mean = np.mean([row["reward"] for row in members])
    prompt, wanted = members[0]["prompt"], members[0]["answer"]
    title = f"(right: {wanted}), step {step}: {len(members)} answers to one prompt"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 750 {tall}" width="750" height="{tall}" fill="{INK}"',
        ' font-family="DejaVu Sans, Verdana, sans-serif" font-size="14">',
        f'<rect width="750" height="{tall}" rx="6" fill="{PAPER}"/>',
        f'<text x="20" y="30">sort <tspan font-family="monospace" font-size="16">{html.escape(prompt[:-1])}</tspan>',
        f'<tspan fill="{GREY}"> {html.escape(title)}</tspan></text>',
        f'<g fill="{GREY}" font-size="12"><text x="20" y="58">each token by its push on the policy</text>',
        '<text x="308" y="58">reward</text><text x="402" y="58">compared with the group</text></g>',
    ]
    for i, row in enumerate(members):
        y = 70 + 30 * i
        for j, token in enumerate(row["tokens"]):
            share = -term_NT[row["row"], j] / most
            shown = {"<eos>": "end", "<unk>": "?", "<pad>": "·"}.get(token, token)
            parts.append(
                f'<rect x="{20 + 42 * j}" y="{y}" width="40" height="24" rx="3" fill="{_shade(share)}"/>'
                f'<text x="{40 + 42 * j}" y="{y + 17}" text-anchor="middle" font-family="monospace">'
                f"{html.escape(shown)}</text>"
            )
        value = row["advantage"]
        wide = abs(value) * 34
        parts.append(f'<text x="352" y="{y + 17}" text-anchor="end">{row["reward"]:.2f}</text>')
        parts.append(
            f'<rect x="{470 - (wide if value < 0 else 0):.1f}" y="{y + 4}" width="{wide:.1f}" height="16" rx="2" '
            f'fill="{BLUE if value > 0 else ORANGE}"/>'
            f'<text x="590" y="{y + 17}">{value:+.2f} {"more of this" if value > 0 else "less of this"}</text>'
        )
    y = 70 + 30 * len(members)
    parts.append(f'<line x1="470" y1="64" x2="470" y2="{y}" stroke="{GREY}"/>')
    parts.append(
        f'<text x="352" y="{y + 20}" text-anchor="end" fill="{GREY}" font-size="12">mean {mean:.2f}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def _shade(share: float) -> str:
    """From orange over white to blue, as the viewer has it."""
    to = np.array([int((BLUE if share > 0 else ORANGE)[i : i + 2], 16) for i in (1, 3, 5)])
    mixed = 255 + (to - 255) * min(1.0, abs(share)) * 0.75
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", default=["pole", "answers", "dream", "throws"])
    parser.add_argument("--run", type=Path)
    asked = parser.parse_args()
    if "pole" in asked.which:
        pole()
    if "dream" in asked.which:
        dream()
    if "throws" in asked.which:
        throws()
    if "answers" in asked.which:
        answers(asked.run)
