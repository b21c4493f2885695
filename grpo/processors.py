"""How many processors are this process's own: as many workers, threads or games at a time are worth having."""

import os


def processors() -> int:
    """Those this process may run on (taskset, a container's set), at most its share of a machine with other ranks."""
    share = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "sched_getaffinity") and not {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"} & os.environ.keys():
        share = min(share, len(os.sched_getaffinity(0)))  # OpenMP may have bound this thread alone
    return max(1, share)
