"""Writes down every KV event batch of vLLM engines: one JSON object a line.

    recorder.py NAME=ENDPOINT...

It shares nothing with Kinference: libzmq reads the sockets, msgspec the
batches. Lines are {"engine", "up": true} for a new connection, and {"engine",
"seq", "batch"} for a batch, whose digests are written in hex. It ends with its standard input.
"""

import json
import sys
import threading

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message


def main() -> None:
    context = zmq.Context()
    poller = zmq.Poller()
    data, monitors = {}, {}
    for arg in sys.argv[1:]:
        name, endpoint = arg.split("=", 1)
        sub = context.socket(zmq.SUB)
        sub.set_hwm(0)  # never drop
        # An engine that starts anew must not publish before we are back.
        sub.setsockopt(zmq.RECONNECT_IVL, 10)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(endpoint)
        data[sub], monitors[monitor] = name, name
        poller.register(sub, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    decoder = msgspec.msgpack.Decoder()
    while not done.is_set():
        for socket, _ in poller.poll(100):
            if socket in monitors:
                recv_monitor_message(socket)
                write({"engine": monitors[socket], "up": True})
                continue
            _, seq, payload = socket.recv_multipart()
            write({"engine": data[socket], "seq": int.from_bytes(seq, "big"), "batch": decoder.decode(payload)})
        sys.stdout.flush()


def write(line: dict) -> None:
    sys.stdout.write(json.dumps(line, default=bytes.hex) + "\n")


main()
