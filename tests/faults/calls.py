"""Calls a worker must survive. A module of its own, so that workers load it and nothing heavy."""

import builtins
import os
import random
import signal
import subprocess
import time


def behave(what):
    """Do what the item says."""
    return {
        "raises": raises,
        "exits": lambda: os.sys.exit(0),
        "ends": lambda: os._exit(3),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sleeps": lambda: time.sleep(1000),
        "spins": spins,
        "deaf": deaf,
        "stuck in C": lambda: sum(range(10**14)),
        "unsendable": lambda: lambda: None,
        "moves": moves,
        "big": lambda: "x" * 3_000_000,
        "odd text": lambda: "\0\x1b[31m\ud800",
        "interrupt": interrupt,
        "draw": random.random,
        "where": lambda: (os.getcwd(), os.environ.get("MOVED")),
        "pid": os.getpid,
        "patches": patches,
        "prints to nobody": prints_to_nobody,
    }[what]()


def patches():
    """And sees to it that nobody finds out."""
    builtins.all, builtins.map, builtins.sum = (lambda *_: True), (lambda *_: ()), len
    return sum((5, 5))


def raises():
    raise ValueError("no\nsuch reward")


def interrupt():
    raise KeyboardInterrupt


def spins():
    while True:
        pass


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    spins()


def moves():
    os.chdir("/")
    os.environ["MOVED"] = "1"
    return "moved"


def prints_to_nobody():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    print("on a full disk", flush=True)


def starts_another(path):
    started = subprocess.Popen(["sleep", "1000"])
    with open(path, "w") as file:
        file.write(str(started.pid))
    spins()


def clear(items):
    items.clear()


class Unreadable:
    """Goes out, cannot come back."""

    def __reduce__(self):
        return (int, ("not a number",))


def give_unreadable(_):
    return Unreadable()
