"""Stacks of all threads as text, for the message of a test that hangs."""

from __future__ import annotations

import threading

from gradsync.runtime.stacks import read_stack, running_threads, stack_lines


def all_stacks() -> str:
    """Name and stack of every Python thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident in running_threads():
        parts.append(f"--- thread {names.get(ident, ident)}")
        parts.append("".join(stack_lines(read_stack(ident))))
    return "\n".join(parts)
