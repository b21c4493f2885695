"""Images in rows: every way to give one, and what is wrong with one is told by its row."""

from __future__ import annotations

import ast
import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

import grpo.language
from grpo.errors import ConfigError
from grpo.language.data.chat import Chat
from grpo.language.data.prompts import Prompts, load
from grpo.language.model.vision import tokenizer_of
from grpo.language.pictures.processor import Pictures
from grpo.language.pictures.reading import LARGEST, Picture
from tests.unit.language.pictures import drawn, layouts
from tests.unit.language.tiny import tiny_tokenizer

MARK = {"type": "image"}
TEXT = {"type": "text", "text": "what?"}


@pytest.fixture(scope="module")
def processor() -> Any:
    return layouts.make("qwen2_5_vl")[1]


def prompts_of(processor: Any, rows: Any, **settings: Any) -> Prompts:
    chat = Chat(tokenizer_of(processor), pictures=Pictures(processor, settings.pop("max_pixels", None)))
    return Prompts(rows, chat, max_length=None, **settings)


def png(image: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()


def header(width: int, height: int) -> bytes:
    """The first bytes of a PNG file that claims to be so large."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    begun = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + begun + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def test_every_way_to_give_an_image_gives_the_same_prompt(processor: Any, tmp_path: Path) -> None:
    image = drawn.noise(0)
    (tmp_path / "a.png").write_bytes(data := png(image))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    ways = [
        image, str(tmp_path / "a.png"), tmp_path / "a.png", data, {"bytes": data, "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")}, url, f"file://{tmp_path}/a.png",
    ]  # fmt: skip
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": [MARK, TEXT]}], "image": way} for way in ways]
    rows += [{"prompt": [{"role": "user", "content": [{"type": "image", key: way}, TEXT]}]} for key, way in (
        ("image", image), ("path", str(tmp_path / "a.png")), ("bytes", data), ("url", url))]  # fmt: skip
    rows.append({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, TEXT]}]})
    rows.append({"prompt": [{"role": "user", "content": "what?"}], "image": image})  # nobody says where: it comes first
    rows.append({"prompt": "what?", "image": [image]})
    rows.append({"prompt": "<image>what?", "image": [image]})
    found = prompts_of(processor, rows).first()
    assert len({tuple(prompt.ids) for prompt in found}) == 1
    wanted = processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    for prompt in found:
        (picture,) = prompt.ids.shown  # type: ignore[attr-defined]
        assert prompt.ids.by.tensors(picture)["pixel_values"].equal(wanted)  # type: ignore[attr-defined]


def test_paths_count_from_the_data_file(processor: Any, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    drawn.noise(0).save(tmp_path / "pictures" / "a.png")
    row = {"prompt": "what?", "images": ["pictures/a.png"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    assert len(prompts_of(processor, load(str(tmp_path / "data.jsonl")))) == 1


def bad(folder: Path) -> list[tuple[Any, str]]:
    """What rows may hold, and what is said of it."""
    (folder / "text.png").write_text("no image")
    (folder / "empty.png").write_text("")
    whole = png(drawn.noise(0, 64, 64))
    return [
        (str(folder / "missing.png"), "there is no such file"),
        (str(folder / "text.png"), "not an image that Pillow reads"),
        (str(folder / "empty.png"), "the file is empty"),
        (b"", "there are no bytes"),
        (header(40_000, 40_000), "over 89,478,485"),  # Pillow refuses it
        (header(LARGEST // 9_000, 10_000), "over 89,478,485"),  # Pillow warns
        (Image.new("RGB", (0, 5)), "shows nothing"),
        (str(folder), "no regular file"),
        ("https://example.com/a.png", "no image is fetched here"),
        (3, "of type int"),
        (whole[: len(whole) // 2], "cut short"),
        ("data:image/png;base64,!!!!", "its base64 is damaged"),
        (np.zeros((5, 4, 2)), r"an array of shape \(5, 4, 2\)"),
        (np.full((5, 4, 3), -1.0), "its numbers are -1 to -1"),
        (np.full((5, 4), np.nan), "its numbers are nan to nan"),
    ]


def test_numbers_of_every_kind_are_the_same_image() -> None:
    bytes_HWC = np.array(drawn.noise(0))
    tensor = torch.tensor(bytes_HWC).permute(2, 0, 1)
    ways = [
        bytes_HWC.transpose(2, 0, 1), bytes_HWC / 255, (bytes_HWC / 255).astype(np.float32), bytes_HWC.astype(float),
        bytes_HWC.astype(np.int64), bytes_HWC.astype(np.uint16) * 257, tensor, tensor / 255,
        (tensor / 255).requires_grad_(),
    ]  # fmt: skip
    for way in ways:
        assert np.array_equal(np.array(Picture(way, "").image()), bytes_HWC)
    grey_HW = bytes_HWC[..., 0]
    deep = Image.fromarray(grey_HW.astype(np.uint16) * 257)
    for way in (deep, png(deep), grey_HW[..., None], grey_HW[None].astype(np.uint16) * 257, grey_HW > 127):
        wanted = (grey_HW > 127) * 255 if isinstance(way, np.ndarray) and way.dtype.kind == "b" else grey_HW
        assert np.array_equal(np.array(Picture(way, "").image())[..., 1], wanted)


def test_a_bad_image_is_named_by_its_row(processor: Any, tmp_path: Path) -> None:
    for given, told in bad(tmp_path):
        rows = [{"prompt": "what?", "image": drawn.noise(0)}, {"prompt": "what?", "image": given}]
        with pytest.raises(ConfigError, match=told) as raised:
            for prompt in prompts_of(processor, rows, origin="pets").first():
                [prompt.ids.by.tensors(picture) for picture in prompt.ids.shown]  # type: ignore[attr-defined]
        assert str(raised.value).startswith("pets row 1: image")


def test_parts_and_images_must_match(processor: Any) -> None:
    image = drawn.noise(0)
    for parts, images, told in (
        ([MARK, MARK, TEXT], [image], "more .* parts than images"),
        ([MARK, TEXT], [image, image], "2 images for 1"),
        ([MARK, {"type": "video"}], [image], "a part of type video"),
    ):
        with pytest.raises(ConfigError, match=told):
            prompts_of(processor, [{"prompt": [{"role": "user", "content": parts}], "images": images}])


def test_a_text_model_refuses_images() -> None:
    with pytest.raises(ConfigError, match="reads text alone"):
        Prompts([{"prompt": [{"role": "user", "content": [MARK, TEXT]}]}], Chat(tiny_tokenizer()))


def test_pixels_are_bounded(processor: Any) -> None:
    """An image is shrunk to `max_pixels`; of tensors only the last are kept; a turned photo is upright."""
    (prompt,) = prompts_of(processor, [{"prompt": "what?", "image": drawn.noise(0, 200, 100)}], max_pixels=800).first()
    (picture,) = prompt.ids.shown  # type: ignore[attr-defined]
    assert picture.size() == picture.image().size == (40, 20)
    pictures = Pictures(processor, kept_bytes=30_000)
    many = [Picture(drawn.noise(i), "") for i in range(8)]
    for one in many:
        pictures.tensors(one)
    kept = [value for _, made in pictures._tensors.values() for value in made.values()]
    assert sum(value.numel() * value.element_size() for value in kept) <= 30_000 and len(pictures._tensors) < 8
    turned = drawn.noise(0, 30, 20)
    exif = turned.getexif()
    exif[0x0112] = 6
    made = io.BytesIO()
    turned.save(made, "JPEG", exif=exif)
    assert Picture(made.getvalue(), "").size() == Picture(made.getvalue(), "").image().size == (20, 30)


def test_rows_of_datasets_are_measured_without_decoding(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["what?"] * 3, "images": [[drawn.noise(i)] for i in range(3)]}
    features = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    data = datasets.Dataset.from_dict(rows, features=features)
    decoded: list[Any] = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: (decoded.append(self), load(self))[1])
    prompts = prompts_of(processor, data)
    assert not decoded
    found = [prompt.ids.shown[0].image().tobytes() for prompt in prompts.first()]  # type: ignore[attr-defined]
    assert decoded and found == [images[0].tobytes() for images in rows["images"]]


def test_other_images_are_other_data(processor: Any) -> None:
    one, same, other = (
        prompts_of(processor, [{"prompt": "what?", "image": drawn.noise(i)}]).fingerprint for i in (0, 0, 1)
    )
    assert one == same != other


def test_text_alone_needs_no_pillow() -> None:
    """It is imported inside the functions that open an image, and nowhere else in the room."""
    for path in Path(grpo.language.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.partition(".")[0] in ("PIL", "torchvision")], path


def test_damaged_base64_is_told_by_its_row() -> None:
    with pytest.raises(ConfigError, match=r"row 3: image .*its base64 is damaged"):
        Picture("data:image/png;base64,aaaaa", "row 3").size()
