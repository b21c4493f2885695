"""The command line: grpo train | sweep | plan | view | eval | chat | export | new | config | presets | doctor | …"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo import __version__
from grpo.app import arguments as flags
from grpo.app import new
from grpo.app.loading import loading, resting
from grpo.app.many import command as many
from grpo.errors import nearest
from grpo.run import output

OK, FAILED, BAD_SETTINGS, INTERRUPTED = 0, 1, 2, 130

TRAIN = """\
The first words are presets, YAML files or a data file, applied from left
to right: a task first, then variations. Any setting can follow as a flag, in
our spelling or another system's, with - or _ , alone or with its block:

  grpo train cartpole
  grpo train --env LunarLander-v3 --group-size 8 --starts 4
  grpo train bandit grpo_kl --beta 0.1 --epsilon 0.2 --num-generations 4 --loss-type dr_grpo
  grpo train gsm8k --model PATH_OR_ID --num-generations 8 --use-wandb
  grpo train gsm8k --model PATH_OR_ID --model.lora-rank 16 --sampling.temperature 0.7
  grpo train my_data.jsonl --reward my_rewards.py:correctness --model PATH_OR_ID
  grpo train dreamer --env CartPole-v1
  grpo train bandit my.yaml --set algorithm.kl_beta=0.02 --run.steps 200
  grpo train --resume runs/bandit-20261115-101500

Ctrl-C finishes the step, saves and stops; --resume goes on exactly there.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 bad settings, 75 preempted, 130 interrupted."""
    if argv is None:  # the process is ours, to its last line
        output.install()
        output.plain_warnings()
        resting()
    with output.standing() as (out, _):
        code, training = _run(list(sys.argv[1:] if argv is None else argv))
        out.flush()
        if training or out.lost is None or isinstance(out.lost, BrokenPipeError):  # `| head` has had enough
            return code
        print(f"grpo: {out.name} could not be written: {out.lost}", file=sys.stderr)
        return code or FAILED


def _run(words: list[str]) -> tuple[int, bool]:
    """The exit code, and whether it is that of a run, which nobody has to read along with."""
    parser, presets, given = _parser(), [], list(words)
    if not words:
        print(flags.next_text(__version__))
        return OK, False
    if not words[0].startswith("-") and words[0] not in (known := flags.commands_of(parser)):
        print(f"grpo: there is no command {words[0]!r}{nearest(words[0], [*known])}; see grpo --help", file=sys.stderr)
        return BAD_SETTINGS, False
    if words and words[0] == "doctor" and "--config" in words:  # what follows --config is read as `config` reads it
        at = words.index("--config")
        words = ["doctor", "--config", *words[1:at], *words[at + 1 :]]
        while len(words) > 2 and not words[2].startswith("-"):
            presets.append(words.pop(2))
    if words[:2] == ["train", "--settings"]:  # wherever it stands, the task that is named is meant
        words = ["train", *words[2:], "--settings"]
    if words and words[0] == "launch" and len(words) > 1 and not words[1].startswith("-"):
        words = ["launch", "--on", words[1], *words[2:]]
        while len(words) > 3 and not words[3].startswith("-"):
            presets.append(words.pop(3))
    if words[0] in ("train", "sweep", "config", "plan"):  # by hand: argparse would take a setting's value for a preset
        while len(words) > 1 and not words[1].startswith("-"):
            presets.append(words.pop(1))
    arguments, rest = parser.parse_known_args(words)
    arguments.presets, arguments.words = presets, given
    taken = arguments.run in (_train, many.run, _plan, _config, _launch) or (
        arguments.run is _doctor and arguments.config
    )
    if rest and not taken:
        flags.unknown(parser, words[0], rest[0])
    training = arguments.run is _train
    try:
        return int(arguments.run(arguments, rest)), training
    except KeyboardInterrupt:  # before the run could take it, or a second time
        print("grpo: interrupted", file=sys.stderr)
        return INTERRUPTED, training
    except ValueError as error:  # ConfigError, unknown recipe: what was asked for is wrong
        from grpo.run.progress import told

        print(f"grpo: {told(error)}", file=sys.stderr)
        return BAD_SETTINGS, training


Command = Callable[..., argparse.ArgumentParser]
"""Makes a command's parser: its name, function, summary and usage."""
TRUST = "run code that lies inside of the run folder, too: only where you know who made it"
SHELLS = ("bash", "zsh", "fish")
SETTINGS = "PRESET|FILE … [--setting value …]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description="Group Relative Policy Optimization.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"grpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[..., int], summary: str, words: str = "", **more: Any
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=textwrap.fill(summary, flags.columns()), allow_abbrev=False,
            usage=f"grpo {name} {words} [options]" if words else None,
            formatter_class=argparse.RawDescriptionHelpFormatter, **more,
        )  # fmt: skip
        made.set_defaults(run=run)
        return made

    _train_words(command)
    _plan_words(command)
    _view_words(command)
    _words_about_a_run(command)
    _config_words(command)
    new.add_flags(command("new", new.run, new.SUMMARY))
    job = command(
        "launch", _launch, "print a job for a cluster that trains on many GPUs: a commented file that works as it is",
        f"slurm|skypilot|kubernetes {SETTINGS}",
    )  # fmt: skip
    flags.add_job_flags(job)
    completed = command("completion", _completion, "print what a shell needs to complete presets and settings")
    completed.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS), help="whose words to speak")
    return parser


def _train_words(command: Command) -> None:
    train = command(
        "train", _train, "train something and keep everything it leaves", SETTINGS, epilog=TRAIN, add_help=False
    )
    train.add_argument(
        "-h", "--help", action="store_true", dest="explain", help="show this, with the settings that matter first"
    )
    train.add_argument("--resume", metavar="FOLDER", help="go on with a run exactly where it stopped")
    train.add_argument("--trust", action="store_true", help=f"with --resume: {TRUST}")
    train.add_argument("--overwrite", action="store_true", help="begin anew where --logdir holds a run, which goes")
    _settings_words(train)
    flags.add_rank_flags(train)
    many.add_seed_flags(train)
    train.add_argument(
        "--settings", action="store_true", help="explain every setting, with a task named its own too, and stop"
    )
    train.set_defaults(parser=train)
    swept = command("sweep", many.run, many.SUMMARY, SETTINGS, epilog=many.EXAMPLES)
    many.add_sweep_flags(swept)
    _settings_words(swept)
    many.add_seed_flags(swept, 1)


def _settings_words(made: argparse.ArgumentParser) -> None:
    """What `train` and `config` have in common."""
    made.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE", help="one setting, by its path")
    made.add_argument("--configs", nargs="+", default=[], metavar="PRESET", help="the same as naming presets first")


def _plan_words(command: Command) -> None:
    planned = command(
        "plan", _plan, "what a step will take, memory and time by part, before anything is loaded", SETTINGS
    )
    _settings_words(planned)
    planned.add_argument("--gpu", metavar="NAME", help="for this one instead of the one that is here: h200, a100, …")
    planned.add_argument("--json", action="store_true", help="print JSON")


def _view_words(command: Command) -> None:
    viewed = command("view", _view, "look at runs in a browser: curves, groups, every token's numbers", "[RUNS|RUN]")
    viewed.add_argument("folder", type=Path, nargs="?", help="a folder of runs, or one run (runs)")
    viewed.add_argument(
        "--demo", action="store_true", help="runs that come with the package: nothing has to be trained"
    )
    viewed.add_argument("--export", type=Path, metavar="FILE", help="write one self-contained HTML file instead")
    viewed.add_argument("--groups", metavar="N|STEP/GROUP,…", help="with --export: how many groups, or which (12)")
    viewed.add_argument("--host", metavar="ADDRESS", help="whose requests are heard (127.0.0.1); others need a token")
    viewed.add_argument(
        "--token", action=argparse.BooleanOptionalAction, help="ask for one that the link has (where others could read)"
    )
    viewed.add_argument("--port", type=flags.port, help="where to listen (a free one)")
    viewed.add_argument("--no-browser", action="store_true", help="only print the link")


def _words_about_a_run(command: Command) -> None:
    """eval, chat, export."""
    looked = command("eval", _eval, "try what was trained on fresh starts or held-out prompts: a table with intervals")
    talked = command("chat", _chat, "talk to a language model that was trained")
    exported = command("export", _export, "write what was trained: a model's folder, or a policy as an ONNX file")
    for made in (looked, talked, exported):
        made.add_argument("folder", type=Path, metavar="RUN", help="a run folder, e.g. runs/cartpole-20261115-101500")
        made.add_argument("--checkpoint", default="best", help="best (by evaluation), last, or a step's number")
        made.add_argument("--trust", action="store_true", help=TRUST)
    flags.add_look_flags(looked, talked, exported)


def _config_words(command: Command) -> None:
    """config, presets, doctor."""
    config = command("config", _config, "print the resolved settings and where each came from", SETTINGS)
    _settings_words(config)
    config.add_argument(
        "--dialects", nargs="?", const="", metavar="NAME",
        help="print other systems' spellings and what they become; with a NAME (dreamer, grpo, tutorial, rlinf, "
        "easydel) that system's alone, with what each means and where it differs",
    )  # fmt: skip
    config.add_argument("--all", action="store_true", help="also the settings that are at their default")

    presets = command("presets", _presets, "print what can be chosen by name")
    presets.add_argument(
        "--recipes", nargs="*", metavar="NAME", help="the algorithm table: what each variant fixes; all rows, or these"
    )
    doctor = command("doctor", _doctor, "look at this machine, or with --config at a run that is planned")
    doctor.add_argument("--logdir", default="runs", metavar="FOLDER", help="where runs would be written")
    doctor.add_argument(
        "--config", action="store_true", help="then PRESET|FILE … [--setting value …]: try its rewards before training"
    )
    doctor.add_argument("--set", action="append", default=[], metavar="BLOCK.KEY=VALUE")
    flags.add_rank_flags(doctor)


# --- commands: everything heavy is imported inside, so that --help is immediate --------------------------------------


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.explain:
        print(_help(arguments, rest))
        return OK
    if arguments.settings:
        from grpo.app.explain import every_text

        print(every_text(*_given(arguments, rest)))
        return OK
    if arguments.resume and (arguments.presets or arguments.configs):
        raise ValueError("--resume takes its settings from the run folder; leave the presets out")
    if many.meant(arguments):
        return many.run(arguments, rest)
    if arguments.resume and arguments.overwrite:
        raise ValueError("--resume goes on with a run, --overwrite begins anew; give one of them")
    if arguments.trust and not arguments.resume:
        raise ValueError("--trust is for --resume: what you name yourself runs without it; leave it out")

    def train() -> int:
        with loading():
            from grpo.app.builders import resume, start
        if arguments.resume:
            return resume(Path(arguments.resume), flags.given_flags(arguments.set, rest), arguments.trust)
        return start(_resolved(arguments, rest), arguments.overwrite)

    return _on_ranks(arguments, train, lambda: None if arguments.resume else _resolved(arguments, rest))


def _on_ranks(arguments: argparse.Namespace, job: Callable[[], int], settings: Callable[[], Any]) -> int:
    """The job alone, as one of several ranks, or as many processes as were asked for, each with the same command."""
    from grpo.distributed.places import ALONE, Machine, found

    a = arguments
    place = found(os.environ, a.ranks)
    if place is None:
        os.environ |= {ALONE: "1"} if a.ranks == 1 else {}
        idle = {"rank-timeout": a.rank_timeout, "shared-gpu": a.shared_gpu}
        for name in [name for name, value in idle.items() if value]:
            raise ValueError(f"--{name} means nothing for one process; give --ranks, or leave it out")
        return job()
    from grpo.app import ranks

    variables = ranks.variables(a.rank_timeout, a.shared_gpu)
    if isinstance(place, Machine):
        return ranks.start(place, a.words, variables, settings())
    return ranks.take_part(place, variables, job)


def _plan(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app.builders import TASKS

    resolved = _resolved(arguments, rest)
    fits, text = TASKS[resolved.task].plan(resolved.config, arguments.gpu, arguments.json)
    print(text)
    return OK if fits else FAILED


def _help(arguments: argparse.Namespace, rest: Sequence[str]) -> str:
    """The usage with the settings that matter first, for the task if one is named: that loads its libraries."""
    from grpo.app.explain import first_text

    arguments.parser.epilog = f"{first_text(flags.perhaps(*_given(arguments, rest)), flags.columns())}\n\n{TRAIN}"
    return str(arguments.parser.format_help())


def _view(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.view.launch import chosen, view

    a = arguments
    if a.export is not None:
        idle = {"host": a.host, "port": a.port, "no-browser": a.no_browser or None, "token": a.token}
        for name, given in idle.items():
            if given is not None:
                raise ValueError(f"--{name} means nothing with --export; leave it out")
    elif a.groups is not None:
        raise ValueError("--groups is for --export; leave it out")
    return view(
        chosen(a.folder, a.demo), a.host or "127.0.0.1", a.port, not a.no_browser, a.export, a.groups or "12", a.token
    )


def _eval(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app import look

    a = arguments
    if _language(
        a,
        for_prompts=("dataset", "samples", "limit", "reward"),
        for_others=("episodes", "sampled", "render", "video", "seed"),
    ):
        print(look.evaluate_prompts(a.folder, a.checkpoint, a.dataset, a.samples, a.limit, a.json, a.trust, a.reward))
        return OK
    video = None if a.video is None else a.video or str(a.folder / "eval.mp4")
    shown = (a.json, a.render, video)
    print(look.evaluate(a.folder, a.checkpoint, a.episodes or 20, not a.sampled, a.seed, *shown, a.trust))
    return OK


def _chat(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app.look import talk

    a = arguments
    talk(a.folder, a.checkpoint, a.system, a.temperature, a.message, a.trust)
    return OK


def _export(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app import look

    a = arguments
    if a.private and a.push is None:
        raise ValueError("--private is for --push; leave it out")
    if a.onnx is not None and (a.push is not None or a.to is not None):
        raise ValueError("--onnx writes a file, --to and --push a folder; give one of them at a time")
    language = _language(a, for_prompts=("merge",), for_others=("onnx",))
    if a.push is not None or (a.to is not None and not language):
        from grpo.app.load import write

        print(write(a.folder, a.checkpoint, a.to, a.push, a.private, a.merge, a.trust))
    elif language:
        print(look.save_model(a.folder, a.checkpoint, a.to or a.folder / "model", a.merge, a.trust))
    else:
        target = a.folder / "policy.onnx" if a.onnx in (None, Path()) else a.onnx
        print(look.export(a.folder, a.checkpoint, target, a.trust))
    return OK


def _language(arguments: argparse.Namespace, for_prompts: Sequence[str], for_others: Sequence[str]) -> bool:
    """Whether the run is a language model's; flags that mean nothing for it are refused."""
    from grpo.app.look import task_of

    task = task_of(arguments.folder)
    idle = for_others if task == "language" else for_prompts
    for name in idle:
        if getattr(arguments, name) not in (None, False, []):
            why = " (ONNX is for control policies)" if name == "onnx" else ""
            raise ValueError(f"--{name} means nothing for a run of the task {task}{why}; leave it out")
    return task == "language"


def _config(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.dialects is not None:
        from grpo.app.coming_from import text
        from grpo.app.words import table_text

        print(text(arguments.dialects) if arguments.dialects else table_text())
        return OK
    from grpo.app.explain import resolved_text

    print(resolved_text(_resolved(arguments, rest), everything=arguments.all))
    return OK


def _presets(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if arguments.recipes is None:
        from grpo.app.explain import presets_text

        print(presets_text())
        return OK
    from grpo.recipes import table_text

    print(table_text(arguments.recipes))
    return OK


def _doctor(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.distributed.places import found as place

    if arguments.config and arguments.ranks:
        raise ValueError(
            "--config looks at a run on one process, --ranks at what lies between several; give one of them"
        )
    if not arguments.config and place(os.environ, arguments.ranks) is not None:
        return _on_ranks(arguments, lambda: _examine(Path(arguments.logdir)), lambda: None)
    from grpo.app.doctor import findings, preflight, report

    if arguments.config:
        sound, text = preflight(_resolved(arguments, rest))
        print(text)
        return OK if sound else FAILED
    found = findings(Path(arguments.logdir))
    print(report(found))
    return FAILED if any(item.level == "problem" for item in found) else OK


def _examine(folder: Path) -> int:
    from grpo.app.ranks import examine

    return examine(folder)


def _launch(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app.jobs import Job, text

    a = arguments
    if a.on is None:
        raise ValueError("say where the job is to run: grpo launch slurm|skypilot|kubernetes PRESET --nodes 4 > job")
    sets = [word for item in a.set for word in ("--set", item)]
    job = Job(a.on, a.nodes, a.gpus, a.time, a.accelerator, a.image)
    print(text(job, [*a.presets, *sets, *rest], _resolved(a, rest)), end="")
    return OK


def _completion(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from grpo.app.completion import script

    print(script(_parser(), arguments.shell), end="")
    return OK


def _resolved(arguments: argparse.Namespace, rest: Sequence[str]) -> Any:
    return flags.resolved(*_given(arguments, rest))


def _given(arguments: argparse.Namespace, rest: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    names = [*getattr(arguments, "configs", []), *arguments.presets]
    return names, flags.given_flags(arguments.set, rest)


if __name__ == "__main__":
    sys.exit(main())
