"""A server that speaks as much of vLLM's API as is used, over real HTTP, with a tiny model behind it.

It samples for real, a token at a time, and refuses fields and routes that vLLM 0.26 does not have (their names were
read from its source into data/vllm_0_26_api.json). Faults are planted by setting its attributes.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch
from peft import PeftModel
from safetensors.torch import load_file

from grpo.language.engines.vllm import fingerprint

from .tiny import tiny_model, tiny_tokenizer

API = json.loads((Path(__file__).parent / "data" / "vllm_0_26_api.json").read_text())
EOS = 2


class Double:
    """One server. `seed`: of the weights that it starts with."""

    def __init__(self, seed=7, vllm="0.26.0", tokenizer=None, lora=False, dev=True, token_seconds=0.0):
        self.vllm, self.tokenizer, self.lora, self.dev = vllm, tokenizer or tiny_tokenizer(), lora, dev
        self.model, self.adapters = tiny_model(seed), {}
        self.version, self.temperature = "", 1.0
        self.token_seconds = token_seconds
        self.asked, self.done, self.versions = [], [], []
        self.fault = None
        """down: connections are cut · hang · a status · half: an answer without its last log-prob · text: no JSON."""
        self.fault_after = 0
        """Completions before the fault shows."""
        self.off = 0.0
        """Nats added to log-probs."""
        self.lock, self.released = threading.RLock(), threading.Event()
        self.paused = False
        self.epoch = 0
        self.hold: int | None = None
        """Tokens after which a row waits for the next pause, which ends this; None: none does."""
        self.holding = 0
        """Rows that have waited so."""

    def answer(self, method, path, query, body):
        known = API["routes"].get(path)
        if known is None or (not self.dev and path in ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache")):
            return 404, {"detail": "Not Found"}
        if path.endswith("lora_adapter") and not self.lora:
            return 404, {"detail": "Not Found"}
        assert method in known, (method, path)
        with self.lock:
            self.asked.append((path, body))
        return getattr(self, "at_" + path.strip("/").replace("/", "_"))(query, body)

    def at_health(self, query, body):
        return 200, None

    def at_version(self, query, body):
        return 200, {"version": self.vllm}

    def at_v1_models(self, query, body):
        cards = [{"id": name, "max_model_len": 64} for name in ("tiny", *self.adapters)]
        return 200, {"object": "list", "data": cards}

    def at_tokenize(self, query, body):
        ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        return 200, {"count": len(ids), "max_model_len": 64, "tokens": ids}

    def at_reset_prefix_cache(self, query, body):
        return 200, {"success": True}

    def at_pause(self, query, body):
        assert query == {"mode": ["abort"], "clear_cache": ["true"]}
        with self.lock:
            self.paused, self.hold = True, None
            self.epoch += 1
        return 200, {"status": "paused"}

    def at_resume(self, query, body):
        self.paused = False
        return 200, {"status": "resumed"}

    def at_collective_rpc(self, query, body):
        return 200, {"results": [getattr(self, body["method"])(**body["kwargs"])]}

    def grpo_load(self, source):
        with self.lock:
            weights = load_file(source)
            self.version = fingerprint(weights)
            self.model.load_state_dict(weights)
            self.versions.append(self.version)
        return {"version": self.version, "stale": [], "compared": len(weights)}

    def grpo_ready(self, temperature):
        self.temperature = temperature
        return {"version": self.version, "heads": 1}

    def at_v1_load_lora_adapter(self, query, body):
        if "lora_name" not in body:
            return 400, {"error": {"message": "lora_name: field required"}}
        assert set(body) <= set(API["fields"]["LoadLoRAAdapterRequest"])
        with self.lock:
            made = PeftModel.from_pretrained(tiny_model(self.base), body["lora_path"]).eval()
            self.adapters[body["lora_name"]] = made
        return 200, b"Success: LoRA adapter added successfully."

    base = 0

    def at_v1_unload_lora_adapter(self, query, body):
        assert set(body) <= set(API["fields"]["UnloadLoRAAdapterRequest"])
        self.adapters.pop(body["lora_name"])
        return 200, b"Success: LoRA adapter removed successfully."

    def at_v1_completions(self, query, body):
        assert set(body) <= set(API["fields"]["CompletionRequest"]), body
        fault = self.fault if self.fault_after <= 0 else None
        self.fault_after -= 1
        if fault == "hang":
            self.released.wait(60)
        if isinstance(fault, int):
            return fault, {"error": {"message": "so it is"}}
        if fault == "text":
            return 200, b"<html>"
        while self.paused:
            time.sleep(0.002)
        ids, logp, finish = self._sampled(body)
        if fault == "half":
            logp = logp[:-1]
        told = {"token_logprobs": logp, "tokens": [str(i) for i in ids], "top_logprobs": [], "text_offset": []}
        choice = {"index": 0, "text": "", "token_ids": ids, "logprobs": told, "finish_reason": finish}
        assert set(choice) <= set(API["fields"]["CompletionResponseChoice"])
        assert set(told) <= set(API["fields"]["CompletionLogProbs"])
        with self.lock:
            self.done.append((tuple(body["prompt"]), body["seed"], finish))
        return 200, {"id": "x", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": {}}

    def _sampled(self, body):
        model = self.adapters.get(body["model"], self.model)
        if body["model"] != "tiny" and body["model"] not in self.adapters:
            return [], [], "error"
        draw, began = torch.Generator().manual_seed(body["seed"]), self.epoch
        ids, logp = list(body["prompt"]), []
        ends = {EOS} if not body.get("ignore_eos") else set(body.get("stop_token_ids", ()))
        for _ in range(body["max_tokens"]):
            if self.hold == len(logp):
                self.holding += 1
                while self.epoch == began:
                    time.sleep(0.002)
            if self.epoch != began:
                return ids[len(body["prompt"]) :], logp, "abort"
            if self.token_seconds:
                time.sleep(self.token_seconds)
            with self.lock, torch.no_grad():
                raw_V = model(torch.tensor([ids])).logits[0, -1] / self.temperature
            logp_V = raw_V.log_softmax(-1)
            scaled_V = raw_V / (body["temperature"] or 1.0)
            token = (
                int(raw_V.argmax())
                if not body["temperature"]
                else int(torch.multinomial(scaled_V.softmax(-1), 1, generator=draw))
            )
            ids.append(token)
            logp.append(float(logp_V[token]) + self.off)
            if token in ends:
                return ids[len(body["prompt"]) :], logp, "stop"
        return ids[len(body["prompt"]) :], logp, "length"


@contextmanager
def serving(double, port=0):
    """Its address, as long as it lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            given = json.loads(self.rfile.read(length) or b"{}")
            if double.fault == "down":
                self.connection.close()
                return
            parts = urlsplit(self.path)
            status, said = double.answer(self.command, parts.path, parse_qs(parts.query), given)
            data = said if isinstance(said, bytes) else b"" if said is None else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *given): ...

    class Server(ThreadingHTTPServer):
        daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

        def handle_error(self, *given): ...  # somebody hung up

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        double.released.set()
        server.shutdown()
        server.server_close()
