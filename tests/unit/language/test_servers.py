"""Several vLLM servers: who is asked, who is taken out and back in, what is pushed, and what is wrong with some."""

import http.client
import json
import re
import socket
import threading
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing import reductions

from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer, port
from grpo.language.engines import Sampling, Tokens
from grpo.language.engines.vllm import VLLMEngine, pool, remote, weights
from grpo.language.engines.vllm.server import VLLMServer
from grpo.language.port import HungUp, ServerFailed

from .tiny import tiny_model, tiny_tokenizer
from .vllm_double import EOS, Double, serving

PROMPTS = [[5, 6, 7], [10, 11], [20, 21, 22], [30, 31]]


@pytest.fixture
def start():
    with ExitStack() as stack:
        yield lambda double, port=0: stack.enter_context(serving(double, port))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.2)
    monkeypatch.setattr(pool, "HEALTH_EVERY", 0.05)
    monkeypatch.setattr(pool, "HEALTH_LIMIT", 0.5)
    warnings.simplefilter("ignore")


def connect(*urls, model=None, deadline=20.0, **settings) -> VLLMEngine:
    tokens = Tokens(tiny_tokenizer(), frozenset((EOS,)), 0)
    return VLLMEngine(model or tiny_model(), tokens, servers=urls, deadline=deadline, **settings)


def ids_of(made):
    return [completion.ids.tolist() for completion in made]


def off(model, prompts, made):
    """The largest difference between recorded log-probs and the module's."""
    worst, count = 0.0, len(made) // len(prompts)
    for i, completion in enumerate(made):
        prompt = prompts[i // count]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, completion.ids[:, None])[:, 0]
        worst = max(worst, float((logp - completion.logp).abs().max()))
    return worst


def test_servers_share_the_prompts_and_answer_as_one_would(start):
    one, two = Double(), Double()
    model = tiny_model()
    both, alone = connect(start(one), start(two), model=model), connect(start(Double()), model=model)
    made = both.generate(PROMPTS, 3, Sampling(6), range(12))
    assert ids_of(made) == ids_of(alone.generate(PROMPTS, 3, Sampling(6), range(12)))
    assert off(model, PROMPTS, made) < 1e-4
    shares = [{prompt for prompt, seed, _ in double.done if list(prompt) in PROMPTS} for double in (one, two)]
    assert all(shares) and not shares[0] & shares[1]  # the rows of a prompt stay together
    assert one.version == two.version != ""
    both.close()


@pytest.mark.parametrize("fault", ["down", 500, "half", "text", "hang"])
def test_a_server_that_fails_is_taken_out_and_its_prompts_are_asked_again_elsewhere(start, fault):
    one, two = Double(), Double()
    whole = connect(start(Double())).generate(PROMPTS, 3, Sampling(6), range(12))
    engine = connect(start(one), start(two), deadline=3.0 if fault == "hang" else 20.0)
    one.fault, one.fault_after = fault, 2
    with pytest.warns(UserWarning, match="is taken out: .*1 of 2 are left"):
        made = engine.generate(PROMPTS, 3, Sampling(6), range(12))
    assert ids_of(made) == ids_of(whole)  # nothing lost, nothing else
    assert len(engine._vllm.pool.live) == 1
    one.fault = None
    with pytest.warns(UserWarning, match="is back"):
        engine.tend(0)
    assert len(engine._vllm.pool.live) == 2 and one.version == two.version
    one.done.clear()
    assert ids_of(engine.generate(PROMPTS, 3, Sampling(6), range(12))) == ids_of(whole)
    assert one.done
    engine.close()


def test_a_server_that_was_lost_while_it_stood_goes_on_when_it_is_back(start):
    """Its /resume was lost with it; a request would wait there for good, and the next push for the request."""
    one, two = Double(), Double()
    engine = connect(start(one), start(two), deadline=3.0)
    with pytest.warns(UserWarning, match="is taken out"):
        engine._vllm.pool.take_out(engine._vllm.pool.all[0], "lost")
    one.paused = True
    with pytest.warns(UserWarning, match="is back"):
        engine.tend(0)
    assert not one.paused and len(engine.generate(PROMPTS, 3, Sampling(6), range(12))) == 12
    engine.close()


def test_a_request_that_comes_too_late_to_be_stopped_does_not_hold_up_new_weights(start, monkeypatch):
    """It waits at the server for the end of the pause, and the push, which ends the pause, waited for it."""
    monkeypatch.setattr(pool, "STOPPED", 0.1)
    double = Double()
    engine = connect(start(double), deadline=10.0, ahead=True)
    double.paused, double.done = True, []
    with ThreadPoolExecutor(1) as thread, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asked = thread.submit(engine.generate, PROMPTS[:1], 1, Sampling(6), [0])
        while engine._vllm.pool.all[0].in_flight == 0:
            time.sleep(0.01)
        engine._vllm.push(3)
        assert double.done and not engine._vllm.pool.out
        assert set(asked.result()[0].version.tolist()) == {3}
    assert not said  # nobody was taken out
    engine.close()


def test_a_request_that_is_refused_is_not_waited_for(start):
    one, two = Double(), Double()
    engine = connect(start(one), start(two), deadline=3.0)
    one.fault = two.fault = 400
    with pytest.raises(RuntimeError, match="refused: 400 so it is"):
        engine.generate(PROMPTS, 1, Sampling(6), range(4))
    engine._vllm.pool.idle()  # raises where something is still under way
    engine.close()


def test_health_is_looked_after_between_requests(start):
    one, two = Double(), Double()
    engine = connect(start(one), start(two))
    one.fault = "down"
    end = time.monotonic() + 20
    while len(engine._vllm.pool.live) == 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert "did not answer /health" in engine._vllm.pool.told()
    engine.close()


def test_when_none_is_left_the_run_waits_and_then_says_what_each_one_did(start):
    one, two = Double(), Double()
    engine = connect(start(one), start(two), deadline=1.0)
    one.fault, two.fault = 500, "half"
    with pytest.raises(RuntimeError, match=r"no server is left after 1 s: .*500 so it is.*log-probs") as caught:
        engine.generate(PROMPTS, 1, Sampling(6), range(4))
    assert "\n" not in str(caught.value)
    engine.close()


def test_none_is_left_for_a_moment_and_one_comes_back(start):
    one = Double()
    engine = connect(start(one), start(Double(seed=1)))
    whole = engine.generate(PROMPTS, 1, Sampling(6), range(4))
    for server in engine._vllm.pool.all:
        engine._vllm.pool.take_out(server, "a test")
    one.version = ""  # it was started again
    assert ids_of(engine.generate(PROMPTS, 1, Sampling(6), range(4))) == ids_of(whole)
    engine.close()


def test_a_server_that_wants_no_push_is_taken_out_and_the_others_go_on(start):
    one, two = Double(), Double()
    engine = connect(start(one), start(two), deadline=2.0)
    with torch.no_grad():
        engine.model.lm_head.weight.add_(torch.randn_like(engine.model.lm_head.weight))
    one.grpo_load = lambda source: {"version": "another", "stale": [], "compared": 1}
    with pytest.warns(UserWarning, match="weights changed on their way"):
        engine.refresh(1)
    made = engine.generate(PROMPTS, 1, Sampling(6), range(4))
    assert off(engine.model, PROMPTS, made) < 1e-4
    engine.close()


# --- what is under way meets new weights


def test_rows_under_way_go_on_with_new_weights_and_tokens_keep_their_versions(start):
    doubles = [Double(), Double()]
    engine = connect(*(start(double) for double in doubles), ahead=True)
    before = tiny_model()
    for double in doubles:
        double.hold = 4
    groups = engine.stream(PROMPTS, 2, Sampling(40), range(8))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: dict(groups))
        while not all(double.holding for double in doubles):
            time.sleep(0.005)
        with torch.no_grad():
            engine.model.lm_head.weight.mul_(1.5)
        engine.refresh(1)
        made = [completion for number in range(4) for completion in running.result(60)[number]]
    mixed = [c for c in made if len(set(c.version.tolist())) == 2]
    assert mixed, "no row was stopped half way"
    for i, completion in enumerate(made):
        version = completion.version.tolist()
        assert version == sorted(version) and len(version) == len(completion.ids) <= 40
        prompt = PROMPTS[i // 2]
        ids = torch.tensor([[*prompt, *completion.ids.tolist()]])
        for number, model in enumerate((before, engine.model)):
            with torch.no_grad():
                logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            own = logp.gather(-1, completion.ids[:, None])[:, 0]
            mine = completion.version == number
            torch.testing.assert_close(completion.logp[mine], own[mine], rtol=1e-3, atol=1e-3)
    assert not any(double.paused for double in doubles)
    engine.close()


def test_an_adapter_alone_is_pushed_and_rows_under_way_end_with_theirs(start):
    double = Double(seed=0, lora=True, dev=False)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")).eval()
    engine = connect(start(double), model=model)
    assert engine._vllm._transfer.name == "adapter" and len(double.adapters) == 1
    made = engine.generate(PROMPTS, 2, Sampling(6), range(8))
    assert off(model, PROMPTS, made) < 1e-4
    for version in range(1, 7):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        engine.refresh(version)
    made = engine.generate(PROMPTS, 2, Sampling(6), range(8))
    assert off(model, PROMPTS, made) < 1e-4
    assert set(made[0].version.tolist()) == {6}
    assert 1 < len(double.adapters) <= 4  # the oldest are let go of
    assert not any(path in ("/collective_rpc", "/pause") for path, _ in double.asked)
    engine.close()


# --- what is wrong with a server


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm": "0.9.2"}, r"runs vLLM 0\.9\.2, .*pip install -U vllm"),
        ({"tokenizer": tiny_tokenizer(pad=None)}, ""),
    ],
)
def test_a_server_of_another_make_is_refused_at_once(start, settings, message):
    if not message:
        other = tiny_tokenizer()
        other.add_tokens(["numbers"])
        settings, message = {"tokenizer": other}, "whose tokenizer reads text in another way"
    with pytest.raises(ConfigError, match=message) as caught:
        connect(start(Double(**settings)), start(Double()))
    assert "\n" not in str(caught.value)


def test_wrong_log_probs_and_another_model_are_found_before_training(start):
    wrong = Double()
    wrong.off = 0.5
    with pytest.raises(RuntimeError, match=r"log-probs are 0\.50 away .*start http"):
        connect(start(wrong))
    other = Double(lora=True, dev=False)
    other.base = 3  # its base weights are another model's
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(RuntimeError, match="does not run this model as it is trained"):
        connect(start(other), model=model)
    small = Double()
    small.model = tiny_model(hidden_size=16)
    with pytest.raises(RuntimeError, match=r"did not answer|refused"):
        connect(start(small), deadline=1.0)


def test_settings_of_servers_are_checked(start):
    for word in ("localhost:8000", "http://a:port", "http://"):
        with pytest.raises(ConfigError, match="write http://host:port"):
            connect(word)
    with pytest.raises(ConfigError, match="holds a user's name") as caught:
        connect("http://me:secret@a:8000")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="give every rank one of its own"):
        connect()
    with pytest.raises(ConfigError, match="say the same thing; give servers"):
        connect("http://a:1", base_url="http://b:1")
    address = start(Double())
    with pytest.raises(ConfigError, match="none is trained; set lora_rank"):
        connect(address, transfer="adapter")
    with pytest.raises(ConfigError, match="for models on a GPU"):
        connect(address, transfer="nccl")
    with pytest.raises(ConfigError, match="is unknown; use auto, adapter, ipc, nccl, file"):
        connect(address, transfer="pigeon")


# --- runs


def trainer(urls, steps=4, staleness=0.0, delays=None, **settings) -> GRPOTrainer:
    def digits(completions, **_):
        return [float(len(re.findall(r"\d", completion))) for completion in completions]

    config = GRPOConfig(
        max_steps=steps, num_generations=4, prompts_per_step=4, max_completion_length=6, preflight=False, beta=0.0,
        learning_rate=1e-2, seed=3, engine="vllm", servers=tuple(urls), staleness=staleness, **settings,
    )  # fmt: skip
    rows = [{"prompt": f"{i} and {i + 1} make"} for i in range(40)]
    made = GRPOTrainer(
        model=tiny_model(), processing_class=tiny_tokenizer(), reward_funcs=digits, args=config, train_dataset=rows
    )
    made.pace.until = steps
    return made


def test_staleness_0_is_the_same_bit_for_bit_whatever_servers_there_are_and_however_slow(start):
    def trained(*doubles):
        run = trainer([start(double) for double in doubles])
        lines = [run.step().metrics for _ in range(3)]
        run.source.close()
        return run.model.state_dict(), lines

    plain, slow = trained(Double()), trained(Double(token_seconds=0.004), Double())
    assert all(torch.equal(plain[0][name], tensor) for name, tensor in slow[0].items())
    assert plain[1] == slow[1]


def test_a_run_learns_ahead_while_a_server_dies_and_comes_back(start):
    doubles = [Double(token_seconds=0.002), Double(token_seconds=0.002)]
    run = trainer([",".join(start(double) for double in doubles)], steps=5, staleness=1.0)
    seen = []
    for step in range(5):
        doubles[0].fault = "down" if step in (1, 2) else None
        report = run.step()
        rollouts = report.experience.rollouts
        seen += [sample.prompt.row for sample in rollouts.inputs[::4]]
        assert report.metrics["staleness/max"] <= 1 and report.metrics["mismatch_kl"] < 1
        assert len(rollouts) == 16
    assert len(seen) == len(set(seen)) == 20  # no prompt twice, none lost
    assert len(run.source.engine._vllm.pool.live) == 2
    run.source.close()


def test_a_server_that_was_started_again_while_others_sample_ahead_waits_for_its_weights(start):
    one, two = Double(), Double()
    engine = connect(start(one), start(two), ahead=True)
    whole = engine.generate(PROMPTS, 2, Sampling(6), range(8))
    one.version, one.model = "", tiny_model(5)
    with pytest.warns(UserWarning, match="started again and holds other weights"):
        assert ids_of(engine.generate(PROMPTS, 2, Sampling(6), range(8))) == ids_of(whole)
    engine.tend(3)
    assert len(engine._vllm.pool.live) == 2 and one.version == two.version
    assert set(engine.generate(PROMPTS[:1], 1, Sampling(6), [0])[0].version.tolist()) == {3}
    engine.close()


@pytest.mark.parametrize("word", ["ipc", "nccl"])
def test_what_fails_at_the_first_push_gives_way_to_files(start, monkeypatch, word):
    class Broken:
        name, scales, stops = word, True, True

        @contextmanager
        def loaded(self, model):
            yield None

        def send(self, server, load):
            raise ServerFailed("no such memory")

    monkeypatch.setattr(remote, "transfer_of", lambda *given, **more: Broken())
    double = Double()
    with pytest.warns(UserWarning, match=f"weights go by file, since transfer={word} failed: .*no such memory"):
        engine = connect(start(double))
    assert engine._vllm._transfer.name == "file" and double.version
    with pytest.raises(RuntimeError, match="no such memory"):
        connect(start(Double()), transfer=word)  # asked for by name: nothing else will do
    engine.close()


def test_a_handle_of_gpu_memory_travels_as_plain_values(monkeypatch):
    given = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 4, b"handle\xff")
    given += (64, 512, False, b"count\x00", 7, b"event", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (None, given))
    rebuilt = []
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: rebuilt.append(arguments))
    handle = json.loads(json.dumps(weights.shared(torch.zeros(1))))
    weights.opened(handle, torch.device("cuda", 1))
    expected = [*given]
    expected[4], expected[6] = torch.storage.UntypedStorage, 1  # the reader's own number of the GPU
    assert rebuilt == [tuple(expected)]


class Weights(weights.Receiver):
    """A worker that vLLM's own transfer has filled."""

    def __init__(self, model):
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)


def test_weights_of_vllms_own_transfer_are_compared_by_sums_of_their_bits():
    model = tiny_model()
    sums = {name: (len(x), weights.bits(x)) for name, x in model.state_dict().items()}
    worker = Weights(model)
    assert worker.grpo_compare(sums, "v1") == {"version": "v1", "stale": [], "compared": len(sums)}
    with torch.no_grad():
        model.model.norm.weight[3] += 2**-20
    assert worker.grpo_compare(sums, "v2")["stale"] == ["model.norm.weight"]


def test_where_no_server_takes_a_push_one_that_comes_back_is_waited_for(start):
    one = Double()
    engine = connect(start(one), ahead=True)
    one.fault = "down"
    threading.Timer(0.6, lambda: setattr(one, "fault", None)).start()
    engine.refresh(1)
    assert len(engine._vllm.pool.live) == 1
    assert set(engine.generate(PROMPTS[:1], 1, Sampling(6), [0])[0].version.tolist()) == {1}
    engine.close()


def test_who_asks_while_weights_travel_does_not_take_their_server_for_another(start):
    one = Double()
    engine = connect(start(one), ahead=True)
    load, asked = one.grpo_load, []

    def slow(source):
        told = load(source)
        asked.append(threading.Thread(target=lambda: engine.generate(PROMPTS, 1, Sampling(6), range(4))))
        asked[0].start()  # the server has the new weights, and nobody here knows of it yet
        time.sleep(0.1)
        return told

    one.grpo_load = slow
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(1.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.refresh(1)
        asked[0].join()
    assert not engine._vllm.pool.out
    engine.close()


def test_what_was_asked_ahead_is_not_waited_for_at_the_end(start):
    one = Double()
    engine = connect(start(one), ahead=True)
    one.fault = "hang"
    began, failed = time.monotonic(), []

    def ask():
        try:
            engine.generate(PROMPTS, 2, Sampling(6), range(8))
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not engine._vllm.pool.all[0].in_flight:
        time.sleep(0.01)
    engine.close()
    asking.join(10)
    assert failed and time.monotonic() - began < 10


def test_who_is_being_connected_hears_that_it_was_hung_up(start, monkeypatch):
    """Between the decision to ask and the connection there is nothing to hang up yet."""
    engine = connect(start(Double()))
    server, connected = engine._vllm.pool.all[0], http.client.HTTPConnection.connect

    def slowly(connection):
        server.hang_up()
        connected(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", slowly)
    with pytest.raises(HungUp, match="no longer asked"):
        server.call("/v1/completions", {"prompt": [1], "max_tokens": 1})
    engine.close()


def test_a_server_that_takes_nobody_in_does_not_hold_up_the_end(monkeypatch):
    """Its queue is full: connecting takes until the limit, and nothing is tried after the end."""
    monkeypatch.setattr(port, "CONNECTING", 0.2)
    with socket.socket() as full, ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # those who wait to be taken in
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        server = port.Port(f"http://127.0.0.1:{full.getsockname()[1]}", deadline=600.0)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(server.call, "/health")
            server.close()
            assert isinstance(asked.exception(60), HungUp)
        with pytest.raises(HungUp):
            server.call("/health")


def test_a_request_after_the_end_is_not_made(start):
    one = Double()
    engine = connect(start(one), ahead=True)
    one.fault = "hang"
    server = engine._vllm.pool.all[0]
    engine.close()
    with pytest.raises(HungUp, match="no longer asked"):
        server.call("/v1/completions", {"prompt": [1], "max_tokens": 1})


def test_where_a_server_can_call_back_is_this_machines_own_address():
    """Not what its name means to itself, which on many machines is loopback."""
    assert port.Port("http://127.0.0.1:8000", 1.0).our_address() == "127.0.0.1"
    assert port.Port("http://127.0.0.2:8000", 1.0).our_address().startswith("127.")


def test_a_server_that_is_not_there_yet_is_told_of_before_it_is_waited_for():
    server = VLLMServer("http://127.0.0.1:9", deadline=0.3)
    told = r"127.0.0.1:9 does not answer yet; it is waited for, 0.3 s"
    with pytest.warns(UserWarning, match=told), pytest.raises(ServerFailed, match="did not answer"):
        server.meet()
