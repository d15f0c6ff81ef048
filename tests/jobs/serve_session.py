"""Two replicas on Ray Serve, their clients, and a kill: in a process and a network of their own.

Prints a line of JSON: what was seen.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

import gerund

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"
TEXTS = [f"text {number} about rivers" for number in range(24)]


def replicas():
    """Return the numbers of the processes in which a model is."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in found.splitlines() if "ray::ServeReplica:" in line}


def until(ready, seconds=200):
    """Wait for something."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not ready in time"
        time.sleep(0.5)


def main(folder):
    client = httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {os.environ['GERUND_API_KEY']}"}, timeout=60)

    def answers():
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def embedded(text):
        answer = client.post("/v1/embeddings", json={"input": text})
        return answer.json()["data"][0]["embedding"] if answer.status_code == 200 else None

    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "ray_serve.py")], stdout=log, stderr=log, start_new_session=True
        )
        until(answers)
        until(lambda: len(replicas()) == 2)
        seen = {"replicas": len(replicas()), "without key": httpx.get(f"{URL}/v1/models").status_code}
        wanted = gerund.load(os.environ["GERUND_MODEL"]).encode(TEXTS, normalize=True)
        seen["difference"] = float(np.abs(np.array([embedded(text) for text in TEXTS]) - wanted).max())
        before = replicas()
        os.kill(min(before), signal.SIGKILL)
        time.sleep(2)  # until the others know
        later = [embedded(text) for text in TEXTS]
        seen["asked after a kill"] = len(TEXTS)
        seen["answered after a kill"] = sum(
            vector is not None and np.allclose(vector, own, atol=1e-6)
            for vector, own in zip(later, wanted, strict=True)
        )
        until(lambda: len(replicas()) == 2 and replicas() != before)
        seen["replicas after a kill"] = len(replicas())
        server.send_signal(signal.SIGINT)
        seen["ended"] = server.wait(60)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
