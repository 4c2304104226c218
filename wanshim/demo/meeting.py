"""The address at which the processes of a demo on this machine meet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served_store() -> Iterator[dict[str, str]]:
    """A store for one process group of this machine, which this process serves on 127.0.0.1 alone.

    Nobody can take its port before the ranks come: it is bound once and stays open.

    Yields:
        the variables by which `init_process_group` finds it: torch takes it for that of torchrun's agent.
    """
    import torch.distributed as dist

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        descriptor = listening.detach()
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    yield {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    del store
