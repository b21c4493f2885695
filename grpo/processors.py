"""How many processors are this process's own: as many workers, threads or games at a time are worth having."""

import os


def processors() -> int:
    """Those this process may run on (taskset, a container's set), at most its share of a machine with other ranks."""
    share = (os.cpu_count() or 1) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if hasattr(os, "sched_getaffinity") and not _threads_are_bound():
        share = min(share, len(os.sched_getaffinity(0)))
    return max(1, share)


def _threads_are_bound() -> bool:
    """Whether OpenMP may have bound this thread, and so what is asked for the process, to a processor of its own."""
    told = os.environ.get("OMP_PROC_BIND", "").lower()
    return told != "false" if told else bool({"OMP_PLACES", "GOMP_CPU_AFFINITY"} & os.environ.keys())
