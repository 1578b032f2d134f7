"""Stacks of all threads as text, for the message of a test that hangs."""

from __future__ import annotations

import sys
import threading
import traceback


def all_stacks() -> str:
    """Name and stack of every Python thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"--- thread {names.get(ident, ident)}")
        parts.append("".join(traceback.format_stack(frame)))
    return "\n".join(parts)
