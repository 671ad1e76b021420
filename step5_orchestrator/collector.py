"""Python's garbage collector, paused while a table is worked through."""

import contextlib
import gc


@contextlib.contextmanager
def paused_collector():
    """No cycle collection inside; it goes on afterwards as before.

    A table of hundreds of thousands of small tuples makes the collector look through all of them again and again, which
    doubles the time; none of them is in a cycle, so there is nothing to collect.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
