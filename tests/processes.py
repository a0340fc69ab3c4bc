"""Two processes over gloo, for the tests that compare them with one."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def join_group(rank: int, rendezvous: str) -> None:
    """The group is left by the process's end alone.

    Destroyed in Python, it can wait for ever: a DistributedDataParallel that outlives the call frees gloo's threads
    while it holds the interpreter's lock, and one of them may be waiting for that lock to free a tensor (torch 2.13).
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)


def run_two_processes(worker: Callable[..., None], folder: Path, *arguments: Any, seconds: float = 240) -> None:
    """Call worker(rank, rendezvous, *arguments) twice; what one raises is raised, and none outlives the test."""
    # Two fresh interpreters would spend most of the time on their imports; a server forks after them.
    multiprocessing.set_forkserver_preload(["sentence_transformers", "st_aggretriever.losses"])
    processes = torch.multiprocessing.start_processes(
        worker, (str(folder / "rendezvous"), *arguments), nprocs=2, join=False, daemon=True, start_method="forkserver"
    )
    end = time.monotonic() + seconds
    try:
        while not processes.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                raise TimeoutError(f"two processes in {worker.__name__} had not ended after {seconds:.0f} s")
    finally:
        for process in processes.processes:
            process.kill()
