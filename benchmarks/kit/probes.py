"""Programs that measure a network from both of its ends: round trips, losses and throughput.

Started in network namespaces by emulation.py; a client prints one JSON object. Standard library only, so that they
start at once.

    python -m benchmarks.kit.probes serve HOST PORT
    python -m benchmarks.kit.probes client HOST PORT N_PACKETS SPACING_S N_BYTES
"""

import json
import socket
import sys
import threading
import time

N_BYTES = 1 << 16
END = b"end"


def echo_packets(udp: socket.socket) -> None:
    """Send back each packet, but for the last one, which asks which came."""
    seen: set[bytes] = set()
    while True:
        packet, sender = udp.recvfrom(N_BYTES)
        if packet == END:
            udp.sendto(str(len(seen)).encode(), sender)
        else:
            seen.add(packet)
            udp.sendto(packet, sender)


def serve(host: str, port: int) -> None:
    """Echo packets of UDP, and send as many bytes as each TCP connection asks for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.create_server((host, port)) as tcp:
        udp.bind((host, port))
        threading.Thread(target=echo_packets, args=(udp,), daemon=True).start()
        print("ready", flush=True)
        while True:
            connection, _ = tcp.accept()
            with connection:
                connection.sendall(bytes(int(connection.recv(64))))


def packets(host: str, port: int, n: int, spacing_s: float) -> dict[str, object]:
    """Send numbered packets, far enough apart not to meet, and time those that come back."""
    sent = [0.0] * n
    times: dict[int, float] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((host, port))
        udp.settimeout(2.0)

        def receive() -> None:
            try:
                while len(times) < n:
                    number = int(udp.recv(N_BYTES))
                    times[number] = time.perf_counter() - sent[number]
            except TimeoutError:
                pass

        receiver = threading.Thread(target=receive)
        receiver.start()
        start = time.perf_counter()
        for number in range(n):
            time.sleep(max(0.0, start + number * spacing_s - time.perf_counter()))
            sent[number] = time.perf_counter()
            udp.send(b"%d" % number)
        receiver.join()
        n_seen = b""
        while not n_seen:
            udp.send(END)
            try:
                n_seen = udp.recv(N_BYTES)
            except TimeoutError:
                continue
    return {"n_sent": n, "n_seen": int(n_seen), "round_trips_s": [times[number] for number in sorted(times)]}


def throughput(host: str, port: int, n_bytes: int) -> dict[str, object]:
    """Fetch bytes over TCP; the first quarter, in which congestion control finds the rate, is left out."""
    arrivals = []
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"%d" % n_bytes)
        n = 0
        while data := connection.recv(N_BYTES):
            n += len(data)
            arrivals.append((time.perf_counter(), n))
    first = next(arrival for arrival in arrivals if arrival[1] >= n_bytes / 4)
    last = arrivals[-1]
    return {"bits_per_s": (last[1] - first[1]) * 8 / (last[0] - first[0]) if last != first else None}


def main() -> None:
    """Run one end."""
    what, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "serve":
        serve(host, port)
    n, spacing_s, n_bytes = int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    print(json.dumps(packets(host, port, n, spacing_s) | throughput(host, port, n_bytes)))


if __name__ == "__main__":
    main()
