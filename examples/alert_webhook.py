"""Alerts over HTTP: each event is posted as JSON, without a wait and without a new dependency.

    python examples/alert_webhook.py http://127.0.0.1:8000/alerts

A callback of the detector runs in the training loop, so what may take long (a network) is given to a thread.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import urllib.error
import urllib.request

import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent


class Webhook:
    """Posts events to an address, in order, from a thread of its own; one that cannot be reached is let go.

    Args:
        url: Where to; anything that takes a JSON body by POST.
        timeout: Seconds to wait for an answer.
    """

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        """Start the thread."""
        self.url, self.timeout = url, timeout
        self._waiting: queue.Queue[NaNEvent | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, event: NaNEvent) -> None:
        """Take an event; returns at once."""
        self._waiting.put(event)

    def close(self) -> None:
        """Wait until all is posted."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (event := self._waiting.get()) is not None:
            body = {
                "text": str(event).splitlines()[0].strip(),
                "step": event.step,
                "phase": event.phase,
                "layer": event.layer_name,
                "operation": event.op,
                "line": None if event.location is None else f"{event.location.file}:{event.location.line}",
                "cause": None if event.cause is None else event.cause.code,
                "weights": event.weights,
            }
            request = urllib.request.Request(
                self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=self.timeout):
                    pass
            except (urllib.error.URLError, OSError) as error:
                print(f"the alert was not delivered: {error}", file=sys.stderr)


def main(url: str) -> None:
    """Train with a bad batch, and post what is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    alert = Webhook(url)
    with NaNDetector(model, on_nan="skip", on_event=alert) as det:
        for step in range(20):
            x, y = torch.rand(32, 16), torch.randint(0, 4, (32,))
            if step == 12:
                x[7] = x[7] / 0.0
            det.set_batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    alert.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/alerts")
