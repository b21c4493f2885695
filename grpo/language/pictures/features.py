"""What a module is called with besides the ids, where some of them stand for images.

Each image goes through the vision tower once, however many completions its prompt has in the batch.

Letters: N rows of the batch, T their tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo.language.pictures.ids import PicturedIds

TYPES = ("mm_token_type_ids", "token_type_ids")
"""What architectures call the row that says which tokens are images."""


def arguments(causal: Any, rows: Sequence[Sequence[int]], ids_NT: Tensor) -> dict[str, Any]:
    """For rows of which some have images; ids_NT: the same as the module reads them, padded."""
    seen = [row for row in rows if isinstance(row, PicturedIds)]
    if not seen:
        return {}
    takes = inspect.signature(causal.forward).parameters
    image_ids = torch.tensor(sorted(seen[0].by.image_ids), device=ids_NT.device)
    types_NT = torch.isin(ids_NT, image_ids).to(torch.int64)
    given: dict[str, Any] = {name: types_NT for name in TYPES if name in takes}
    each = [tensors_of(row, ids_NT.device) for row in seen]
    if "mm_encoder_outputs" not in takes:
        return given | joined(each)
    once = {id(row): (row, tensors) for row, tensors in zip(seen, each, strict=True)}
    found = _features(causal.base_model, list(once.values()))
    made = dict(zip(once, found, strict=True))
    beside = [{name: tensor for name, tensor in one.items() if not name.startswith("pixel")} for one in each]
    given |= {name: tensor for name, tensor in joined(beside).items() if name in takes}
    return given | {"mm_encoder_outputs": {"image": _repeated([made[id(row)] for row in seen])}}


def positions(causal: Any, ids_NT: Tensor, mask_NT: Tensor, given: dict[str, Any]) -> Tensor:
    """(N, T), where tokens count on; or (3, N, T) as a module counts that gives images rows and columns (Qwen's).

    given: what `arguments` says of the same rows.
    """
    index = getattr(causal.base_model, "get_rope_index", None)
    if not given or index is None:
        return (mask_NT.cumsum(-1) - 1).clamp(min=0)
    beside = {name: given[name] for name in ("mm_token_type_ids", "image_grid_thw") if name in given}
    position_3NT: Tensor = index(ids_NT, attention_mask=mask_NT, **beside)[0]
    return position_3NT.to(ids_NT.device)


def _features(body: Any, prompts: Sequence[tuple[PicturedIds, dict[str, Tensor]]]) -> list[Any]:
    """What the tower says of each prompt's images: in one pass where it says it image by image, else one by one."""
    counts = [len(row.shown) for row, _ in prompts]
    alike = len({tuple(tensor.shape[1:] for tensor in tensors.values()) for _, tensors in prompts}) == 1
    if len(prompts) > 1 and alike:
        whole = body.get_image_features(**joined([tensors for _, tensors in prompts]), return_dict=True)
        levels = getattr(whole, "deepstack_features", None) or []
        if all(len(part) == sum(counts) for part in (whole.pooler_output, *levels)):
            ends = [sum(counts[: i + 1]) for i in range(len(counts))]
            return [_cut(whole, end - count, end) for count, end in zip(counts, ends, strict=True)]
    return [body.get_image_features(**tensors, return_dict=True) for _, tensors in prompts]


def _cut(whole: Any, begin: int, end: int) -> Any:
    """Some of the images."""
    told = {"pooler_output": whole.pooler_output[begin:end]}
    if getattr(whole, "deepstack_features", None) is not None:
        told["deepstack_features"] = [level[begin:end] for level in whole.deepstack_features]
    return type(whole)(**told)


def tensors_of(row: PicturedIds, device: torch.device) -> dict[str, Tensor]:
    """Of all images of a prompt."""
    made = joined([row.by.tensors(picture) for picture in row.shown])
    return {name: tensor.to(device) for name, tensor in made.items()}


def joined(each: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One behind the other; where images are cut into different numbers of tiles, empty ones fill up."""
    return {name: _stacked([one[name] for one in each]) for name in each[0]}


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_padded(tensor, shape) for tensor in tensors])


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    short = [size - own for size, own in zip(shape, tensor.shape[1:], strict=True)]
    return nn.functional.pad(tensor, [n for size in reversed(short) for n in (0, size)]) if any(short) else tensor


def _repeated(outputs: Sequence[Any]) -> Any:
    """What the tower says of every row, in order; rows of one prompt share it."""
    first = outputs[0]
    told = {"pooler_output": _together([out.pooler_output for out in outputs])}
    if getattr(first, "deepstack_features", None) is not None:
        levels = zip(*(out.deepstack_features for out in outputs), strict=True)
        told["deepstack_features"] = [_together(level) for level in levels]
    return type(first)(**told)


def _together(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else [one for part in parts for one in part]
