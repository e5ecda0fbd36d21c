"""Multipart messages on a ZeroMQ socket, with as little Python per message as it takes.

pyzmq's own `send_multipart`, `recv_multipart` and flag enums cost more than the rest of a hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from k3ray.transport.wire import Frame

_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_EVENTS = int(zmq.EVENTS)


def send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    """Send one message without waiting; large frames are sent from where they are.

    Raises:
        zmq.ZMQError: EAGAIN or EHOSTUNREACH, and then nothing was sent.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _NOBLOCK if index == last else _NOBLOCK_MORE
        # Small ones are bytes and cheaper to copy than to track.
        socket.send(frame, flags, copy=isinstance(frame, bytes))


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a whole message waits."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def receive(socket: zmq.Socket[bytes], num_small: int) -> list[Frame]:
    """Take one message that waits: the first `num_small` frames as bytes, the rest in place."""
    frames: list[Frame] = []
    while True:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame.bytes if len(frames) < num_small else frame.buffer)
        if not frame.more:
            return frames
