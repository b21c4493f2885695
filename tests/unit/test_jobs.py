"""`grpo launch`: files that shells, YAML readers and our own parser accept as they are."""

import shlex
import subprocess

import pytest
import yaml

from grpo.cli import main

WORDS = ["bandit", "--groups-per-step", "32", "--set", "run.steps=5", "--payoffs", "[[0.1, 0.9]]"]


def launched(capsys, *words):
    code = main(["launch", *words])
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def accepted(command, capsys):
    """Whether the command inside is one that `grpo` takes; its ranks and folder are the job's own."""
    words = shlex.split(command)
    words = words[words.index("grpo") + 1 :]
    assert words[0] == "train"
    for flag in ("--ranks", "--logdir"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    assert main(["config", *words[1:]]) == 0
    assert "run.steps" in capsys.readouterr().out.replace("steps ", "run.steps")


def test_slurm(capsys, tmp_path):
    text = launched(capsys, "slurm", *WORDS, "--nodes", "4")
    job = tmp_path / "job"
    job.write_text(text)
    subprocess.run(["bash", "-n", str(job)], check=True, timeout=20)
    assert "#SBATCH --nodes=4" in text and "#SBATCH --ntasks-per-node=8" in text and "{{" not in text
    (line,) = [line for line in text.splitlines() if "grpo train bandit" in line and "srun" in line]
    accepted(line, capsys)


def test_skypilot(capsys):
    text = launched(capsys, "skypilot", *WORDS, "--nodes", "2", "--gpus", "4", "--accelerator", "A100")
    job = yaml.safe_load(text)
    assert job["num_nodes"] == 2 and job["resources"] == {"accelerators": "A100:4"}
    (line,) = [line for line in job["run"].splitlines() if line.startswith("python -m grpo train bandit")]
    assert "--ranks 8" in line
    accepted(line, capsys)


@pytest.mark.parametrize("nodes", [1, 3])
def test_kubernetes(capsys, nodes):
    job = yaml.safe_load(launched(capsys, "kubernetes", *WORDS, "--nodes", str(nodes), "--image", "me/grpo:1"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == nodes
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["image"] == "me/grpo:1"
        assert container["command"][-4:-2] == ["--ranks", str(8 * nodes)]
        accepted(shlex.join(container["command"]), capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "bandit", "--nodes", "4", "--groups-per-step", "1"], "32 ranks would share 1 group"),
        (["slurm", *WORDS, "--logdir", "x"], "--logdir is set by the job itself"),
        (["slurm", *WORDS, "--nonsense", "1"], "nonsense"),
        (["slurm", *WORDS, "--run.name", "a\ntouch x"], "has several lines"),
        (["--nodes", "2"], "say where the job is to run"),
    ],
)
def test_what_cannot_be_launched(capsys, words, said):
    assert said in launched(capsys, *words)


@pytest.mark.parametrize("where", ["slurm", "skypilot", "kubernetes"])
def test_a_preset_with_fewer_groups_than_ranks_gets_a_group_for_each(where, capsys):
    text = launched(capsys, where, "gsm8k", "--model", "PATH", "--nodes", "4")
    assert "# The preset gsm8k has 16 groups a step: groups_per_step is 32 here" in text
    if where == "slurm":
        assert "--groups-per-step 32" in text
    else:
        yaml.safe_load(text)
    said = launched(capsys, where, "gsm8k", "--model", "PATH", "--nodes", "4", "--groups-per-step", "16")
    assert "32 ranks would share 16 groups" in said and "\n" not in said.strip()
