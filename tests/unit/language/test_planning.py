"""What a step will take, from sizes alone: bytes beside torch's own, choices over made-up memory, the command."""

import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.cli import main
from grpo.config import ConfigError
from grpo.language.build import Given, keep_limit
from grpo.language.config import LanguageConfig
from grpo.language.planning import cost
from grpo.language.planning.gpus import GPUS, gpu_called, gpu_named
from grpo.language.planning.plan import changes, plan_step, setup_of
from grpo.language.planning.shape import ModelShape, weights_in
from grpo.language.planning.show import expect_fits
from grpo.language.planning.sizes import limit_bytes, memory_limit
from grpo.language.samples import Prompt, Sample
from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import HOSTED, KEEP, DecoderLayout, Unsupported
from grpo.language.scoring.layers import Layers
from grpo.language.scoring.memory import Rows
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.scorer import rows_of
from tests.unit.language.families import CONFIGS, FUSED, family

GIB = 2**30
QWEN17 = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
QWEN8 = QWEN17 | {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
H200 = GPUS["h200"]
PACE = memory.Pace(fixed=800, least=3500)


def shape(of=QWEN17):
    return ModelShape.of(AutoConfig.for_model("qwen3", **of))


def settings(**more):
    given = {
        "groups_per_step": 32,
        "group_size": 8,
        "max_completion_length": 256,
        "max_prompt_length": 128,
        "beta": 0.0,
    }
    return LanguageConfig(**given | more)


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_weights_are_counted_to_the_last_one(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    found = ModelShape.of(model.config)
    assert found.weights == sum(p.numel() for p in model.parameters())
    try:
        DecoderLayout.of(model)
        common = True
    except Unsupported:
        common = False
    assert found.by_hand == common == (name in FUSED)


def test_published_sizes():
    assert shape().weights == 1_720_574_976
    assert shape(QWEN8).weights == 8_190_735_360


def test_what_is_no_dense_decoder_is_refused():
    with pytest.raises(ConfigError, match="gpt2 model says no"):
        ModelShape.of(CONFIGS["gpt2"]())
    with pytest.raises(ConfigError, match="mixture of experts"):
        ModelShape.of(AutoConfig.for_model("qwen3_moe"))


def test_moments_gradients_adapter_and_kept_activations_are_torchs_own():
    config = CONFIGS["qwen3"]()
    model = AutoModelForCausalLM.from_config(config)
    setup = cost.Setup(ModelShape.of(config), Rows(2, 2, 4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    fixed = cost.fixed_memory(setup)
    assert fixed["moments"] == sum(t.nbytes for t in states)
    assert fixed["weights"] == sum(p.nbytes for p in model.parameters())
    assert cost.gradients_bytes(setup) == sum(p.grad.nbytes for p in model.parameters())
    layers = Layers(model, torch.bfloat16)
    for keep in (*KEEP, *HOSTED):
        assert layers.kept_bytes(keep) == setup.kept_bytes(keep)
        assert layers.passing_bytes(100, keep) == setup.passing_bytes(100, keep)
    assert layers.hosted_bytes() == setup.hosted_bytes()
    for targets in ("all-linear", ("q_proj", "v_proj")):
        adapted = get_peft_model(
            AutoModelForCausalLM.from_config(config),
            LoraConfig(r=3, target_modules=targets if isinstance(targets, str) else list(targets)),
        )
        own = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert setup.shape.lora(3, targets) == own


def test_headers_of_files_say_how_many_weights_there_are(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.save_pretrained(tmp_path)
    assert weights_in(tmp_path) == sum(p.numel() for p in model.parameters())
    (tmp_path / "more.safetensors").write_bytes(b"\xff" * 20)
    assert weights_in(tmp_path) is None
    assert weights_in(tmp_path / "nowhere") is None


# --- choices --------------------------------------------------------------------------------------------------------


def test_a_pass_is_as_small_as_costs_no_time():
    setup = cost.Setup(shape(), Rows(32, 8, 128, 256))
    every = memory.ways(setup, setup.rows, PACE)
    chosen = memory.choose(every, math.inf)
    fastest = min(way.time for way in every)
    assert chosen.time <= (1 + memory.SLOWER) * fastest and 4000 < chosen.tokens < 12_000
    assert not any(way.bytes < chosen.bytes and way.time <= (1 + memory.SLOWER) * fastest for way in every)
    assert memory.choose(memory.ways(setup, setup.rows, memory.Pace(0, 0)), math.inf).tokens < chosen.tokens
    roomy = memory.choose(every, math.inf, ample=1.5 * chosen.bytes)
    assert roomy.time < chosen.time and chosen.bytes < roomy.bytes <= 1.5 * chosen.bytes


def test_less_memory_takes_longer_and_never_more_than_there_is():
    setup = cost.Setup(shape(), Rows(32, 8, 128, 256))
    every = memory.ways(setup, setup.rows, PACE)
    leanest = min(way.bytes for way in every)
    before = 0.0
    for gib in (200, 40, 20, 10, 5, 2, 1, 0.5):
        way = memory.choose(every, gib * GIB)
        assert way.bytes <= max(gib * GIB, leanest) and way.time >= before - memory.SLOWER
        before = way.time
    assert memory.choose(every, 0).bytes == leanest


def test_long_rows_wait_on_the_host_where_attention_takes_the_time():
    long = cost.Setup(shape(), Rows(1, 2, 128, 65_536))
    assert memory.choose(cost.ways_of(long, H200), math.inf).keep == "host"
    assert memory.choose(cost.ways_of(cost.Setup(shape(), Rows(32, 8, 128, 256)), H200), math.inf).keep == KEEP[0]


def test_rows_that_were_sampled_are_counted_with_their_prompts_once():
    prompts = [Prompt(0, [1] * 10, "", None), Prompt(1, [1] * 20, "", None)]
    made = [
        Sample(
            prompts[n // 3], torch.zeros(4 + n, dtype=torch.long), torch.ones(4 + n, dtype=torch.bool), None, "eos", ""
        )
        for n in range(6)
    ]
    found = rows_of(made)
    assert found == Rows(2, 3, 15, 6.5) and found.tokens == 30 + sum(4 + n for n in range(6))


def test_a_pass_through_a_module_is_no_larger_than_fits(monkeypatch):
    scorer = make_scorer(family("gemma3"), 1.0)
    scorer.device, free = torch.device("cuda"), 4 * GIB
    monkeypatch.setattr(memory, "free_memory", lambda _: free)
    most, _ = scorer.chosen([])
    assert most == cost.MODULE_TOKENS
    free = (2**30 + 2**22) / memory.IN_PIECES
    fewer, _ = scorer.chosen([])
    scorer.keep = KEEP[-1]
    assert 1 < fewer < scorer.chosen([])[0] <= most
    scorer.set_budget = 77
    assert scorer.chosen([]) == (77, KEEP[0])


def test_the_step_of_a_17b_needs_at_most_45_gib():
    plan = plan_step(setup_of(settings(), shape()), H200)
    assert plan.fits and plan.peak <= 45 * GIB and sum(plan.seconds.values()) < 1.15 * 2.56


@pytest.mark.parametrize("gib", [120, 60, 45, 40])
def test_a_limit_is_kept(gib):
    plan = plan_step(setup_of(settings(), shape()), H200, gib * GIB)
    assert plan.fits and plan.total <= gib * GIB


def test_fewer_rows_are_sampled_at_a_time_where_their_keys_and_values_do_not_fit():
    setup = setup_of(settings(lora_rank=16, max_completion_length=8192), shape())
    wide, lean = plan_step(setup, H200), plan_step(setup, H200, 24 * GIB)
    assert wide.fits and lean.fits and lean.setup.slots < wide.setup.slots
    assert sum(lean.seconds.values()) > sum(wide.seconds.values())


def test_what_would_fit_is_computed_and_leaves_most_as_it_is():
    config, of = settings(beta=0.04), shape(QWEN8)
    assert not plan_step(setup_of(config, of), H200).fits
    found = changes(config, of, H200, H200.memory)
    assert found and all(change.plan.fits for change in found)
    assert found[0].settings in ({"weights": "bfloat16"}, {"beta": 0.0, "weights": "bfloat16"}, {"lora_rank": 16})
    small = changes(settings(lora_rank=16, max_completion_length=32_768), of, GPUS["4090"], GPUS["4090"].memory)
    assert any("max_completion_length" in change.settings for change in small)
    with pytest.raises(ConfigError, match=r"memory=20GiB: a step needs .* GiB at least; what would fit: --"):
        expect_fits(settings(memory="20GiB"), of, H200, 20 * GIB)


def test_a_reference_and_its_score_are_counted():
    alone, beside = (setup_of(settings(beta=beta), shape()) for beta in (0.0, 0.1))
    assert cost.fixed_memory(beside)["reference"] >= 4 * shape().weights and "reference" not in cost.fixed_memory(alone)
    assert "scoring without gradient" in plan_step(beside, H200).seconds
    assert setup_of(settings(beta=0.1, lora_rank=8), shape()).reference == "base"


# --- limits ---------------------------------------------------------------------------------------------------------


def test_sizes_as_people_write_them():
    assert memory_limit("40GiB") == 40 * GIB and memory_limit("24 GB") == 24e9 and memory_limit(0.5) == 0.5
    assert memory_limit("512mib") == 2**29 and limit_bytes("0.5", 100) == 50 and limit_bytes("1", 100) == 100
    for wrong in ("40", "0", "-1GiB", "40 bananas", "GiB", "1e3GiB", ""):
        with pytest.raises(ConfigError, match="memory="):
            LanguageConfig(memory=wrong)


def test_a_limit_is_torchs_own_and_what_is_free_follows_it(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 100 * GIB}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: asked.append(share))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8 * GIB)
    monkeypatch.setattr(memory, "_limits", {})
    device = torch.device("cuda")
    assert memory.free_memory(device) == 92 * GIB
    memory.set_limit(device, 40 * GIB)
    assert asked == [(40 * GIB - memory.CONTEXT) / (100 * GIB)]
    assert memory.free_memory(device) == 34 * GIB - memory.CONTEXT
    for wrong, why in ((200 * GIB, "more than the GPU has"), (2**20, "CUDA alone takes")):
        with pytest.raises(ConfigError, match=why):
            memory.set_limit(device, wrong)


def test_a_limit_needs_a_gpu():
    with pytest.raises(ConfigError, match="limits what is taken of a GPU, and this runs on cpu; leave it out"):
        keep_limit(LanguageConfig(memory="1GiB", device="cpu"), Given())


def test_gpus_by_name():
    assert gpu_named("H200").measured and gpu_named("a100_40").memory < 40 * GIB
    with pytest.raises(ConfigError, match=r"--gpu h2oo is not known.*h200"):
        gpu_named("h2oo")
    assert gpu_called("NVIDIA H200", 5).memory == 5 and gpu_called("NVIDIA A100-SXM4-40GB", 5).flops_per_s < 250e12
    for none in ("Voodoo 2", "NVIDIA L40", "NVIDIA RTX A1000"):
        assert gpu_called(none, 5) is None
    rates = {"NVIDIA GH200 480GB": "gh200", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 80GB HBM3": "h100"}
    for name, known in rates.items():
        found = gpu_called(name, 5)
        assert found.bytes_per_s == GPUS[known].bytes_per_s and not found.measured
    for gib, known in ((39, "a100-40"), (79, "a100")):
        assert gpu_called(f"NVIDIA A100-SXM4-{gib + 1}GB", gib * GIB).bytes_per_s == GPUS[known].bytes_per_s


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("qwen3", **QWEN8).save_pretrained(place)
    return str(place)


def test_a_plan_is_printed_without_a_weight(folder, capsys):
    assert main(["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200"]) == 0
    said = capsys.readouterr().out
    for part in ("8.19 billion weights", "keys and values", "gradients", "rewards", "not known", "fits: "):
        assert part in said
    assert main(["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["memory"]["in_use"] < 60 * GIB and found["seconds"]["in_all"] > 0


def test_what_cannot_fit_says_what_would(folder, capsys):
    assert main(["plan", "gsm8k", "--model", folder, "--gpu", "4090"]) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said and "what would fit:\n  --" in said


def test_a_limit_is_planned_for(folder, capsys):
    words = ["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200", "--json"]
    assert main([*words, "--memory", "24GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["in_use"] <= 24 * GIB
    assert main([*words, "--memory", "24"]) == 2
    assert "say 24GiB if gigabytes are meant" in capsys.readouterr().err
    assert main([*words, "--memory", "400GiB"]) == 2
    assert "is more than NVIDIA H200 has, 139.8 GiB; leave it out" in capsys.readouterr().err


def test_what_never_fits_says_the_least_it_takes(folder, capsys):
    words = ["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200", "--json"]
    long = ["--max-completion-length", "32768"]
    assert main([*words, *long, "--memory", "16GiB"]) == 1
    least = json.loads(capsys.readouterr().out)["memory"]["in_use"]
    assert main([*words, *long, "--memory", f"{least // GIB + 2}GiB"]) == 0


def test_an_adapter_that_goes_on_has_its_own_rank(folder, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "target_modules": ["q_proj"]}))
    words = ["plan", "gsm8k", "--model", folder, "--gpu", "h200"]
    assert main([*words, "--adapter", str(tmp_path)]) == 0
    assert "an adapter of 0.6 million is trained" in capsys.readouterr().out  # 36 × 2 × (4,096 + 4,096)
    assert main(["plan", "gsm8k", "--model", str(tmp_path), "--gpu", "h200"]) == 2
    assert "holds an adapter without its model; give its base as model" in capsys.readouterr().err
    assert main(["plan", "gsm8k", "--model", "/nowhere", "--gpu", "h200"]) == 2
    assert "model=/nowhere: there is no such file or folder" in capsys.readouterr().err


def test_what_a_plan_leaves_out_is_said(folder, capsys):
    words = ["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200"]
    served = ["--teacher", "http://localhost:8000", "--recipe", "opd"]
    assert main([*words, *served, "--shard", "states"]) == 0
    said = capsys.readouterr().out
    assert "not in it: the time that the teacher's server takes; shard=states: what several ranks divide" in said
    assert main([*words, "--recipe", "remax"]) == 0
    assert "not in it: the greedy answer of each prompt" in capsys.readouterr().out


def test_a_plan_has_the_teacher_and_who_learns(folder, capsys):
    words = ["plan", "gsm8k", "--model", folder, "--lora-rank", "16", "--gpu", "h200"]
    assert main([*words, "--teacher", folder, "--recipe", "gkd", "--generate", "8", "--select", "4"]) == 0
    said = capsys.readouterr().out
    assert "; 4 of each group learn" in said and "teacher" in said and "not in it" not in said
    plain, chosen = setup_of(settings(group_size=4), shape()), setup_of(settings(group_size=16, select=4), shape())
    for seconds in (cost.scoring_seconds, lambda s, gpu: cost.gradient_seconds(s, cost.ways_of(s, gpu)[0], gpu)):
        assert seconds(chosen, H200) == pytest.approx(seconds(plain, H200))
    assert cost.decode_seconds(chosen, H200) > cost.decode_seconds(plain, H200)
    taught = setup_of(settings(loss_type="gkd", teacher="x"), shape(), teacher=shape(QWEN8))
    more = cost.fixed_memory(taught).items() - cost.fixed_memory(setup_of(settings(), shape())).items()
    assert dict(more) == {"teacher": 2 * shape(QWEN8).weights, "the teacher's choices": 32 * 8 * 256 * 64 * 12}
    itself = setup_of(settings(loss_type="opsd"), shape())
    assert cost.step_seconds(itself, plan_step(itself, H200).way, H200)["teacher"] == cost.scoring_seconds(itself, H200)
    average = cost.fixed_memory(setup_of(settings(loss_type="opsd", teacher_decay=0.9), shape()))
    assert average["teacher"] == cost.fixed_memory(setup_of(settings(beta=0.1), shape()))["reference"]


def test_a_copy_that_samples_while_the_model_learns_is_counted_and_servers_are_not(folder, capsys):
    plain, ahead = setup_of(settings(), shape()), setup_of(settings(staleness=1.0, engine="inline"), shape())
    fixed = cost.fixed_memory(ahead)
    assert fixed["the sampler's copy"] >= 4 * shape().weights and "the sampler's copy" not in cost.fixed_memory(plain)
    plans = plan_step(plain, H200), plan_step(ahead, H200)
    assert "keys and values" in plans[1].gradients, "they stay while the model learns"
    assert plans[1].peak - plans[0].peak >= 6 * shape().weights
    there = {"engine": "inline", "staleness": 1.0, "engine_kwargs": {"sampler_device": "cuda:1"}}
    servers = {"engine": "vllm", "staleness": 1.0, "servers": ["http://a:8000"]}
    for elsewhere in (there, servers):
        setup = setup_of(settings(**elsewhere), shape())
        assert sum(cost.sampling_memory(setup).values()) == 0
        assert plan_step(setup, H200).peak <= plans[0].peak
        seconds = plan_step(setup, H200).seconds  # tries of earlier weights are scored before they are learned from
        assert seconds["scoring without gradient"] == cost.scoring_seconds(setup, H200)
        assert ("decoding" in seconds) == ("servers" not in elsewhere)
    assert "scoring without gradient" not in plans[0].seconds and plans[1].seconds["scoring without gradient"] > 0
    words = ["plan", "gsm8k", "--model", folder, "--gpu", "h200", "--staleness", "1", "--lora-rank", "16"]
    assert main([*words, "--engine", "inline"]) == 0
    said = capsys.readouterr().out
    assert "the sampler's copy" in said and "at the same time" in said
    assert main([*words, "--engine", "vllm", "--servers", "http://a:8000"]) == 0
    assert "what there is on them" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused_in_a_line(folder, capsys):
    cases = {
        ("cartpole",): "only steps of language models are planned",
        ("gsm8k",): "no model was named",
        ("gsm8k", "--model", folder, "--gpu", "h200", "--engine", "vllm"): "vLLM takes the share of the GPU",
        ("gsm8k", "--model", folder, "--gpu", "abacus"): "--gpu abacus is not known",
        ("gsm8k", "--model", "/nowhere/at/all", "--gpu", "h200"): "/nowhere/at/all",
    }
    if not torch.cuda.is_available():
        cases["gsm8k", "--model", folder] = "there is no GPU here to plan for; name one: --gpu h200"
    for words, why in cases.items():
        assert main(["plan", *words]) == 2
        said = capsys.readouterr().err
        assert why in said and len(said.strip().splitlines()) == 1
