"""A program with two workers. Prints their numbers, then does what its argument says. Started by test_ends.py."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time

import torch

from tests.unit.workers import functions
from wanshim.core.workers import AHEAD, Workers

CPU = torch.device("cpu")


def main(how: str) -> None:
    if how.startswith("ahead"):  # they wait, and nobody takes them
        AHEAD.start(2, ("torch",))
        print(*(worker.process.pid for worker in AHEAD._workers), flush=True)
        if how == "ahead":
            time.sleep(600)
        sys.exit(3)
    workers = Workers(CPU, [CPU, CPU], deadline=200)
    start = threading.Thread(target=workers.hold, args=(functions.Scale(),))  # a thread that ends
    start.start()
    if how == "starting":
        while len(workers.pids) < 2:
            time.sleep(0.01)
    else:
        start.join()
    if how == "forked":  # a child that lives on, with this process's ends of the links
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    print(*workers.pids, flush=True)
    if how in ("working", "forked"):
        calls = [workers.call(place, functions.sleep, 600.0) for place in range(2)]
        calls[0].result()
    if how in ("idle", "starting"):
        time.sleep(600)
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("of the program")
    if how == "_exit":
        os._exit(4)


if __name__ == "__main__":
    main(sys.argv[1])
