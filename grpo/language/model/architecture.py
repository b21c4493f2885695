"""A model that was handed over as an object, so that the run's folder is enough to make it again.

Its weights are in the checkpoints; here are its sizes and its tokenizer, as JSON, written once. What is read back is a
class of transformers' own, in its plain form: nothing that lies in the folder is run, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.model.damage import told
from grpo.language.model.loading import ATTENTION
from grpo.models import device_of
from grpo.run.inside import make_folder_inside, names_inside, remove_inside, rename_inside

FOLDER = "architecture"
"""Below the run's."""
ENDINGS = (".json", ".jinja")
"""Of the files that lie there; there are no others."""


def obstacle(model: Any, tokenizer: Any, trained: Mapping[str, Tensor]) -> str:
    """Why a model cannot be made again from its sizes and a checkpoint; empty: it can. trained: what that holds."""
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM
    kind = type(model)
    if type(model.config) not in plain._model_mapping or plain._model_mapping[type(model.config)] is not kind:
        return f"{kind.__name__} is a class of your own, or a model within one"
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} brings code of its own"
    kept = {tensor.data_ptr() for tensor in trained.values()}
    if any(tensor.data_ptr() not in kept for tensor in model.state_dict().values()):
        return "checkpoints hold the weights that are trained, and others are not"
    if not getattr(tokenizer, "is_fast", False):
        return f"{type(tokenizer).__name__} is not written as JSON"
    return ""


def write(folder: Path, model: Any, tokenizer: Any) -> None:
    """Keep sizes and tokenizer, unless they are there: under another name first, so that half of them is nothing."""
    if names_inside(folder, FOLDER):
        return
    shape, begun = deepcopy(model.config), f".{FOLDER}"
    shape.dtype = model.dtype
    remove_inside(folder, begun)
    make_folder_inside(folder, begun)
    for kept in (shape, tokenizer):
        kept.save_pretrained(folder / begun)
    for name in names_inside(folder, begun):  # words of tokenizers that the JSON holds, too
        if not name.endswith(ENDINGS):
            remove_inside(folder, f"{begun}/{name}")
    rename_inside(folder, begun, FOLDER)


def handed_over(config: LanguageConfig, folder: Path) -> dict[str, Any]:
    """The model of a run with fresh weights and its tokenizer, where no name leads to them; else nothing."""
    names = names_inside(folder, FOLDER)
    if config.model or not names:
        return {}
    place = str(folder / FOLDER)
    for name in names:
        if not name.endswith(ENDINGS) or (folder / FOLDER / name).is_symlink():
            raise ConfigError(f"{place}/{name} is not one of the files that a run writes there; remove it")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    plain: Any = AutoModelForCausalLM
    with told("model", place, place):
        shape = AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=True)
        # Said here, whatever the file says: it may name a kernel of the hub.
        attention = ATTENTION.get(config.attention, "sdpa")
        model = plain.from_config(shape, trust_remote_code=False, attn_implementation=attention)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=True)
    return {"model": model.to(device_of(config.device)), "processing_class": tokenizer}
