"""vLLM as the engine: in this process, or on servers. It keeps a copy of the weights, pushed to it after every step.

    in this process   engine_kwargs: {gpu_memory_utilization: 0.3, …}    any argument of vllm.LLM             local.py
    on servers        servers: [http://host:8000, …]                     started with the line in `SERVE`     remote.py
                          server.py one of them · pool.py several · transfer.py their weights · echo.py the proof

What vLLM does not do by itself runs in its workers, as `Receiver`, an extension of them that vLLM loads by name
(servers that are pushed an adapter alone need none):

- Weights arrive there and are checked. Adapters are merged into a copy on our side, so vLLM runs a plain model and the
  module that is trained is never touched. In this process the tensors are handed over and vLLM's own parameters are
  compared with them, wherever it keeps them unfused; to other processes they go by one of the ways in `transfer`.
- The temperature is applied there, to the logits in float32. vLLM knows log-probs before temperature (raw) or after
  penalty and truncation (processed); with the logits divided beforehand and requests at temperature 1, the raw ones are
  log softmax(logits / temperature), and all else is as before: the penalty and the division commute.

vLLM starts from random weights, and the first push, on servers every one, is followed by a few tokens that the module
scores as well: weights that reach only a part of the copy are found before training, not in its curve.

Every call of `generate` asks the workers which weights they hold. A server that was started again gets them anew; one
that somebody else pushes to is an error.

With top-p and min-p together vLLM applies min-p first, our own loop last.
"""

from grpo.language.engines.vllm.engine import VLLMEngine
from grpo.language.engines.vllm.server import SERVE
from grpo.language.engines.vllm.weights import RECEIVER, Receiver, checkpoint, fingerprint

__all__ = ["RECEIVER", "SERVE", "Receiver", "VLLMEngine", "checkpoint", "fingerprint"]
