"""Images that rows refer to: opened when they are needed, checked, shrunk to what the settings allow, and let go."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import math
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo.errors import ConfigError, install
from grpo.run.files import FolderError
from grpo.run.inside import open_regular

LARGEST = 89_478_485
"""Pixels of an image at most: Pillow's own line, beyond which a small file may fill the memory."""
TURNED = frozenset((5, 6, 7, 8))
"""Orientations in a photo's EXIF data that lay it on its side."""
ORIENTATION = 0x0112
PHOTOS = frozenset(("JPEG", "MPO", "TIFF", "WEBP"))
"""Formats of cameras, which say how they were held before the first pixel."""
URL = re.compile(r"(https?|ftp|s3|gs|hf)://", re.IGNORECASE)
DATA = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
THUMBNAIL = 160
"""Pixels of a thumbnail's longer side."""


@dataclass(frozen=True, eq=False)
class Picture:
    """One image of a row: where it comes from, not what it shows."""

    given: Any
    """A PIL image, a path, bytes, or what `datasets` keeps undecoded: {"bytes": …, "path": …}."""
    place: str
    """Of its row, for messages."""
    base: str | None = None
    """The data file's folder, beside which paths are looked for first."""
    max_pixels: int | None = None

    def size(self) -> tuple[int, int]:
        """Width and height as the model gets it, from the file's first bytes alone."""
        with self._opened() as image:
            width, height = image.size
            if image.format in PHOTOS and image.getexif().get(ORIENTATION) in TURNED:
                width, height = height, width
        return self._fitted(width, height)

    def image(self) -> Any:
        """The image itself: upright, RGB, no larger than the settings allow."""
        with self._opened() as found:
            size = self.size()
            found.draft("RGB", (max(size), max(size)))  # a JPEG is decoded no larger than needed
            try:
                upright = pillow("ImageOps").exif_transpose(found) if found.format in PHOTOS else found
                if upright.mode[0] in "IF":  # 16 bits and more: Pillow would cut them off at 255
                    upright = self._of_numbers(np.asarray(upright))
                upright = upright.convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                raise self._wrong(f"it is cut short or damaged ({error}); write the file again") from None
        return upright if upright.size == size else upright.resize(size, pillow().Resampling.BICUBIC)

    def thumbnail(self) -> bytes:
        """A small PNG of it, to look at."""
        small = self.image()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        made = io.BytesIO()
        small.save(made, "PNG")
        return made.getvalue()

    def digest(self) -> str:
        """Of what the row holds; of a file on the disk its name, length and size, not all of its bytes."""
        source = self._source()
        if isinstance(source, Path):
            return f"{source.name} {source.stat().st_size} {self.size()}"
        if isinstance(source, bytes):
            return hashlib.sha256(source).hexdigest()
        return hashlib.sha256(f"{source.mode} {source.size}".encode() + source.tobytes()).hexdigest()

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        if self.max_pixels is None or width * height <= self.max_pixels:
            return width, height
        scale = math.sqrt(self.max_pixels / (width * height))
        return max(int(width * scale), 1), max(int(height * scale), 1)

    @contextmanager
    def _opened(self) -> Any:
        """The image before it is decoded, its size checked."""
        image_module = pillow()
        source = self._source()
        file: Any = None
        try:
            if isinstance(source, Path | bytes):
                file = io.BytesIO(source) if isinstance(source, bytes) else self._file(source)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", image_module.DecompressionBombWarning)
                    image = image_module.open(file)
            else:
                image = source.copy() if 0 not in source.size else source
            width, height = image.size
            if width * height > LARGEST:
                raise self._huge(f"{width} × {height} pixels")
            if not width * height:
                raise self._wrong(f"it is {width} × {height} pixels and shows nothing; leave the row out")
            yield image
        except image_module.DecompressionBombError as error:
            raise self._huge(str(error).partition(" (")[2].partition(" pixels")[0] + " pixels") from None
        except image_module.UnidentifiedImageError:
            empty = isinstance(source, bytes) and not source
            raise self._wrong("there are no bytes" if empty else "it is not an image that Pillow reads") from None
        finally:
            if file is not None:
                file.close()

    def _file(self, path: Path) -> Any:
        try:
            if not path.stat().st_size:
                raise self._wrong("the file is empty")
            return open_regular(path)
        except (FolderError, OSError) as error:
            what = "there is no such file" if not path.exists() else str(error)
            raise self._wrong(f"{what}; paths count from the data file's folder or the working folder") from None

    def _source(self) -> Any:
        """A path, bytes or a PIL image."""
        given = self.given
        if isinstance(given, Mapping):
            given = given.get("bytes") if given.get("bytes") is not None else given.get("path")
        if isinstance(given, str):
            if URL.match(given):
                raise self._wrong("it is a URL, and no image is fetched here; save it to a file and name that")
            if found := DATA.match(given):
                try:
                    return base64.b64decode("".join(given[found.end() :].split()), validate=True)
                except ValueError as error:
                    raise self._wrong(f"its base64 is damaged ({error}); write the row again") from None
            path = Path(given.removeprefix("file://")).expanduser()
            beside = None if self.base is None else Path(self.base) / path
            return beside if beside is not None and beside.exists() else path
        if isinstance(given, bytes | bytearray):
            return bytes(given)
        if hasattr(given, "__array__") and not hasattr(given, "convert"):
            return self._of_numbers(_on_host(given))
        if isinstance(given, Path) or hasattr(given, "convert"):
            return given
        raise self._wrong(f"it is of type {type(given).__name__}; give a PIL image, a path or the file's bytes")

    def _of_numbers(self, array: np.ndarray) -> Any:
        """An image of an array's numbers: (height, width), with channels last or first; 0…1, 0…255 or 16 bits."""
        channels = (1, 3, 4)
        if array.ndim == 3 and array.shape[-1] not in channels and array.shape[0] in channels:
            array = array.transpose(1, 2, 0)
        if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in channels):
            raise self._wrong(f"an array of shape {array.shape} is none; give height × width × 1, 3 or 4 channels")
        if array.ndim == 3 and array.shape[-1] == 1:
            array = array[..., 0]
        if array.dtype == np.uint8 or not array.size:
            return pillow().fromarray(np.ascontiguousarray(array, np.uint8))
        low, high = float(array.min()), float(array.max())
        scales = {1: 255.0, 255: 1.0, 65535: 255 / 65535}
        most = 65535 if array.dtype == np.uint16 else next((most for most in scales if high <= most), None)
        most = 255 if most == 1 and array.dtype.kind in "iu" else most
        if most is None or not low >= 0:  # NaN, too
            raise self._wrong(f"its numbers are {low:g} to {high:g}; give 0…1, 0…255 or 16 bits, without a sign")
        return pillow().fromarray(np.rint(array * scales[most]).astype(np.uint8))

    def _huge(self, told: str) -> ConfigError:
        return self._wrong(f"it has {told}, over {LARGEST:,}, which may fill the memory; shrink the file")

    def _wrong(self, what: str) -> ConfigError:
        name = f" {str(self.given)[:100]}" if isinstance(self.given, str | Path) else ""
        return ConfigError(f"{self.place}: image{name}: {what}")


def _on_host(given: Any) -> np.ndarray:
    """The numbers of an array of any library; of a tensor of torch's without its gradient, from any device."""
    torch = sys.modules.get("torch")  # whoever has a tensor has loaded it; workers that judge have not
    if torch is not None and isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float() if given.is_floating_point() else given
    return np.asarray(given)


def pillow(module: str = "Image") -> Any:
    """A module of Pillow; asked for where there are images, and nowhere else."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ModuleNotFoundError:
        raise ConfigError(f"prompts with images need Pillow: {install('vision')}") from None
