"""Which of several processes this one is, by what torchrun, srun, Kubernetes or SkyPilot put into the environment.

asked for (--ranks) + environment ─► Place: this process is a rank · Machine: it is to start some · None: it is alone
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.errors import ConfigError

PORT = 29500
"""Where ranks meet unless MASTER_PORT says otherwise; torchrun's own."""
SRUN, ALONE = "srun", "GRPO_RANKS"
"""Whose tasks may be runs of their own: --ranks 1, or this variable as 1 for a script, says so."""


@dataclass(frozen=True)
class Place:
    """One rank among several."""

    rank: int
    ranks: int
    local_rank: int
    """Its number on its machine: the GPU that it takes."""
    local_ranks: int
    address: str
    port: int
    by: str
    """Who started it, for messages."""
    store_runs: bool = False
    """Whether who started it holds the meeting point; else rank 0 does."""
    attempt: int = 0
    """Times that torchrun has started these ranks before."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"{self.by} says rank {self.rank} of {self.ranks}: ranks count from 0; start it again")

    def variables(self) -> dict[str, str]:
        """The same as torchrun would say it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store_runs),
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
        }


@dataclass(frozen=True)
class Machine:
    """One of several machines (or the only one) on which ranks are still to be started."""

    index: int
    machines: int
    each: int
    """Ranks that it starts."""
    address: str
    port: int
    """0: any that is free."""
    by: str = "--ranks"

    @property
    def ranks(self) -> int:
        """On all machines together."""
        return self.machines * self.each

    def places(self, port: int) -> list[Place]:
        """Its ranks, once it is known where they meet."""
        first = self.index * self.each
        return [
            Place(first + n, self.ranks, n, self.each, self.address, port, self.by, store_runs=True)
            for n in range(self.each)
        ]


def found(environ: Mapping[str, str], asked: int | None = None) -> Place | Machine | None:
    """What this process is; `asked`: the number of ranks that the command names, where it does."""
    asked = 1 if asked is None and environ.get(ALONE) == "1" else asked
    if asked is not None and asked < 1:
        raise ConfigError(f"--ranks {asked}: give how many processes work together, from 1 up")
    if "RANK" in environ and "LOCAL_RANK" in environ:
        return _several(_torchrun(environ), asked)
    many = _pods(environ) or _slurm(environ) or (_skypilot(environ) if asked else None)
    if asked == 1 and many is not None and many.by == SRUN:  # each of its tasks is a run of its own
        return None
    if isinstance(many, Place):
        return _several(many, asked)
    if many is not None:
        return _divided(many, asked)
    if asked is None or asked == 1:
        return None
    return Machine(0, 1, asked, "127.0.0.1", _port(environ, 0))


def _several(place: Place, asked: int | None) -> Place | None:
    if asked is not None and asked != place.ranks:
        alone = ", give --ranks 1 for runs of their own" if place.by == SRUN else ""
        raise ConfigError(
            f"--ranks {asked}, but {place.by} has started {place.ranks} "
            f"{'process' if place.ranks == 1 else 'processes'}; leave --ranks out{alone}, or start {asked}"
        )
    return place if place.ranks > 1 else None


def _divided(machine: Machine, asked: int | None) -> Place | Machine | None:
    """The ranks that were asked for, over the machines that there are."""
    total = machine.ranks if asked is None else asked
    if total % machine.machines:
        raise ConfigError(
            f"--ranks {total} cannot be divided over {machine.machines} machines ({machine.by}); give a multiple"
        )
    each = total // machine.machines
    if machine.machines == 1:
        address, port = ("127.0.0.1", 0) if not machine.address else (machine.address, machine.port)
        return None if each == 1 else Machine(0, 1, each, address, port, machine.by)
    if each == 1:
        return Place(machine.index, total, 0, 1, machine.address, machine.port, machine.by)
    return Machine(machine.index, machine.machines, each, machine.address, machine.port, machine.by)


# --- who says so ----------------------------------------------------------------------------------------------------


def _torchrun(environ: Mapping[str, str]) -> Place:
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
    ranks = _number(environ, "WORLD_SIZE", by)
    alone = ranks == 1 and "MASTER_ADDR" not in environ
    return Place(
        rank=_number(environ, "RANK", by),
        ranks=ranks,
        local_rank=_number(environ, "LOCAL_RANK", by),
        local_ranks=_number(environ, "LOCAL_WORLD_SIZE", by) if "LOCAL_WORLD_SIZE" in environ else 1,
        address="" if alone else _word(environ, "MASTER_ADDR", by),
        port=_port(environ, PORT),
        by=by,
        store_runs=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", by) if "TORCHELASTIC_RESTART_COUNT" in environ else 0,
    )


def _pods(environ: Mapping[str, str]) -> Machine | None:
    """Kubernetes' PyTorchJob: a pod is a machine, which starts as many as `nprocPerNode` or --ranks says."""
    by = "PyTorchJob"
    if "PET_NNODES" in environ and "PET_NODE_RANK" in environ:
        each = environ.get("PET_NPROC_PER_NODE", "1")
        count = int(each) if each.isdecimal() and int(each) else 1  # auto, gpu: torchrun would look, --ranks says
        machines, index = _number(environ, "PET_NNODES", by), _number(environ, "PET_NODE_RANK", by)
    elif "RANK" in environ and "WORLD_SIZE" in environ:
        by = "the environment (RANK and WORLD_SIZE without LOCAL_RANK)"
        machines, index, count = _number(environ, "WORLD_SIZE", by), _number(environ, "RANK", by), 1
    else:
        return None
    address = _word(environ, "MASTER_ADDR", by) if machines > 1 else ""
    return Machine(index, machines, count, address, _port(environ, PORT), by)


def _slurm(environ: Mapping[str, str]) -> Place | Machine | None:
    """srun: one task a rank, or one a machine. A batch script itself has no step, and is alone."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not tasks.isdecimal() or int(tasks) == 1 or "SLURM_PROCID" not in environ:
        return None
    by, hosts = SRUN, environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    address = environ.get("MASTER_ADDR") or first_host(hosts)
    if not address:
        raise ConfigError(
            f"srun has started {tasks} tasks, but SLURM_STEP_NODELIST names no machine; set MASTER_ADDR to the first"
        )
    port = _port(environ, slurm_port(environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")))
    here = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))  # e.g. 8(x3),4
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", here) for _ in range(int(times or 1))]
    rank, local = _number(environ, "SLURM_PROCID", by), _number(environ, "SLURM_LOCALID", by)
    if set(counts) == {1}:
        return Machine(rank, int(tasks), 1, address, port, by)
    node = _number(environ, "SLURM_NODEID", by) if "SLURM_NODEID" in environ else 0
    return Place(rank, int(tasks), local, counts[node] if node < len(counts) else 1, address, port, by)


def _skypilot(environ: Mapping[str, str]) -> Machine | None:
    """SkyPilot runs the same commands once on every machine; only --ranks says that they belong together."""
    if "SKYPILOT_NODE_RANK" not in environ or "SKYPILOT_NODE_IPS" not in environ:
        return None
    by, addresses = "SkyPilot", environ["SKYPILOT_NODE_IPS"].split()
    each = environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "1")
    count = int(each) if each.isdecimal() and int(each) else 1
    machines = len(addresses)
    port = _port(environ, PORT if machines > 1 else 0)
    return Machine(
        _number(environ, "SKYPILOT_NODE_RANK", by), machines, count, addresses[0] if machines > 1 else "", port, by
    )


def first_host(hosts: str) -> str:
    """The first machine of SLURM's short form: gpu[007-012,015],login → gpu007. Without `scontrol`."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", hosts)
    if found is None:
        return ""
    name, numbers, rest = found.groups()
    return name if numbers is None else f"{name}{re.split('[-,]', numbers)[0]}{rest or ''}"


def slurm_port(job: str, step: str) -> int:
    """One of a job step's own, so that two jobs on one machine do not meet."""
    digits = [int(word) if word.isdecimal() else 0 for word in (job, step)]
    return 20_000 + (digits[0] * 7 + digits[1]) % 40_000


def _port(environ: Mapping[str, str], otherwise: int) -> int:
    port = _number(environ, "MASTER_PORT", "the environment") if environ.get("MASTER_PORT") else otherwise
    if not 0 <= port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is no port; give one from 1024 to 65535, the same everywhere")
    return port


def _number(environ: Mapping[str, str], name: str, by: str) -> int:
    word = _word(environ, name, by)
    if not word.isdecimal() or len(word) > 9:
        raise ConfigError(f"{name}={word!r} is not a whole number ({by} sets it); start it again")
    return int(word)


def _word(environ: Mapping[str, str], name: str, by: str) -> str:
    word = environ.get(name, "").strip()
    if not word:
        raise ConfigError(
            f"{name} is not set, although {by} has started several processes; set it, or start through torchrun"
        )
    return word
