"""A processor of transformers as the data needs it: how an image is written in tokens, and what tensors it becomes.

How many tokens an image takes follows from its size, so that a data set is measured without decoding any. Tensors are
made when a model reads them; the last few are kept, for a step reads each several times.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo.errors import ConfigError, line
from grpo.language.pictures.reading import Picture, pillow

KEPT_BYTES = 256 * 2**20
"""Of tensors that may be asked for again."""
WORDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""What a processor says of the text, which is rendered elsewhere."""


class Pictures:
    """The half of a processor that deals with images."""

    def __init__(self, processor: Any, max_pixels: int | None = None, kept_bytes: int = KEPT_BYTES) -> None:
        mark = getattr(processor, "image_token", None)
        if mark is None or not hasattr(processor, "image_processor"):
            raise ConfigError(f"{type(processor).__name__} does not say how it writes an image (image_token)")
        self.processor, self.mark, self.max_pixels = processor, str(mark), max_pixels
        self.image_ids = frozenset(int(i) for i in processor.image_token_ids if i is not None)
        """Tokens that stand for a part of an image."""
        others = [*getattr(processor, "video_token_ids", ()), *getattr(processor, "audio_token_ids", ())]
        self.unsaid = self.image_ids | {int(i) for i in others if i is not None}
        """Tokens that a policy never says: the model would look for what they show."""
        self._written: dict[tuple[int, int], str] = {}
        self._kept_bytes, self._held = kept_bytes, 0
        self._tensors: OrderedDict[int, tuple[Picture, dict[str, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()

    def expanded(self, text: str, shown: Sequence[Picture]) -> str:
        """The text with every image written in as many tokens as it takes."""
        pieces = text.split(self.mark)
        if len(pieces) - 1 != len(shown):
            raise ConfigError(
                f"the chat template writes {len(pieces) - 1} images and the prompt has {len(shown)}; take the template "
                "that came with the model"
            )
        written = [self.written(picture) for picture in shown]
        return "".join(piece + image for piece, image in zip(pieces, [*written, ""], strict=True))

    def written(self, picture: Picture) -> str:
        """An image as the tokens that stand for it; one of each size is asked for."""
        size = picture.size()
        if size not in self._written:
            blank = Picture(pillow().new("RGB", size), picture.place)
            offsets = self._processed(blank).get("text_replacement_offsets")
            if not offsets or not offsets[0]:
                raise ConfigError("this transformers does not say how it writes images: pip install -U transformers")
            self._written[size] = str(offsets[0][0]["replacement"])
        return self._written[size]

    def tensors(self, picture: Picture) -> dict[str, Tensor]:
        """What the model gets of an image, on the CPU."""
        with self._lock:
            if id(picture) in self._tensors:
                self._tensors.move_to_end(id(picture))
                return self._tensors[id(picture)][1]
        found = self._processed(picture)
        dropped = {*WORDS, *getattr(self.processor, "unused_input_names", ())}
        made = {name: value for name, value in found.items() if name not in dropped and isinstance(value, Tensor)}
        with self._lock:
            self._tensors[id(picture)] = (picture, made)  # the picture too: its id stays its own
            self._held += _bytes(made)
            while self._held > self._kept_bytes and len(self._tensors) > 1:
                _, (_, gone) = self._tensors.popitem(last=False)
                self._held -= _bytes(gone)
        return made

    def _processed(self, picture: Picture) -> Any:
        image = picture.image()
        try:
            return self.processor(
                text=[self.mark],
                images=[[image]],
                return_tensors="pt",
                add_special_tokens=False,
                return_text_replacement_offsets=True,
            )
        except Exception as error:  # of transformers' image processors, which refuse in many ways
            raise ConfigError(
                f"{picture.place}: the model's processor does not take an image of {image.width} × {image.height} "
                f"pixels: {line(error)}"
            ) from error


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@functools.cache
def without_videos(kind: Any) -> Any:
    """The processor's class for images and text alone: videos would want torchvision, and nobody shows any."""
    if "video_processor" not in kind.get_attributes():
        return kind

    class ImagesAndText(kind):  # type: ignore[misc]
        def __init__(self, *parts: Any, **settings: Any) -> None:
            self.__dict__["get_attributes"] = kind.get_attributes  # Gemma 4's hands over every part by its name
            super().__init__(*parts, **{"video_processor": None, **settings})
            del self.__dict__["get_attributes"]

        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            return type(None) if part is None else super().check_argument_for_proper_class(name, part)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in kind.get_attributes() if name != "video_processor"]

    ImagesAndText.__name__ = ImagesAndText.__qualname__ = kind.__name__  # what is saved says what it is
    return ImagesAndText
