"""How the ranks find each other: at a store that all of them know."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from step0_monolith.options import UsageError
from step2_comms.launch import Launch

# Ranks come to the start one after another, as the machine loads their programs: this much later than a message may.
START_SECONDS = 5.0
# A launcher's store is there before its ranks are: when nobody listens for so long, the launcher has died.
LAUNCHER_IS_GONE_SECONDS = 2.0


def check_master() -> None:
    """Raises UsageError for a host without an address, which torch would look for until its timeout, and longer."""
    if _store_is_the_launchers():
        return  # torchrun has found it, and runs the store there
    host = os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"MASTER_ADDR={host!r} has no address ({error}); give the host of rank 0, or start with torchrun"
        ) from None


def _store_is_the_launchers() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(launch: Launch, timeout: float) -> dist.Store:
    """The job's store, once all ranks have come to it; `timeout` in seconds. Raises RuntimeError when one has not."""
    limit = timedelta(seconds=timeout + START_SECONDS)
    if launch.rank > 0 or _store_is_the_launchers():
        _await_store(timeout + START_SECONDS)
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=limit))
    # A launcher that starts failed ranks again may keep its store: each attempt has keys of its own.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"here/{launch.rank}", "")
    store.wait([f"here/{rank}" for rank in range(launch.size)], limit)
    return store


def _await_store(seconds: float) -> None:
    """Waits until somebody listens at the store's port; torch's own client would try for three times as long.

    Raises RuntimeError when nobody does in time, or the launcher dies meanwhile.
    """
    address, launcher = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), os.getppid()
    start = time.monotonic()
    deadline = start + seconds
    while True:
        try:
            socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            # It may have died before this process looked who it was, while torch was still being imported.
            refused = isinstance(error, ConnectionRefusedError) and _store_is_the_launchers()
            if os.getppid() != launcher or (refused and time.monotonic() > start + LAUNCHER_IS_GONE_SECONDS):
                raise RuntimeError("the launcher died") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out: nobody listens at {address[0]}:{address[1]} ({error})") from None
            time.sleep(0.1)


def why_not(launch: Launch, timeout: float, error: Exception) -> str:
    """What to say when the process group did not open because of `error`."""
    text = str(error).partition("\n")[0]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"rank {launch.rank}: the port is taken; add --standalone to torchrun, which picks a free one ({text})"
    if "imed out" in text or "imeout" in text or "clients joined" in text:
        return (
            f"rank {launch.rank}: not all of the {launch.size} ranks came within {timeout + START_SECONDS:g} s "
            f"(--timeout and {START_SECONDS:g}); is each one started, with the same MASTER_ADDR and "
            f"MASTER_PORT? ({text})"
        )
    return f"rank {launch.rank}: the process group did not open: {text}"
