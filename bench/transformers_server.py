"""transformers' own model behind the smallest server that `bench/peers.py` can ask: one request at a time.

    python bench/transformers_server.py MODEL --port 8004 --dtype bfloat16

`POST /v1/completions` with a prompt of token ids, streamed, greedy; `GET /health`. It keeps nothing between
requests: transformers has no prefix cache. Runs in the environment that has transformers, not Milepost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def generate(model: Any, prompt: list[int], max_tokens: int) -> Iterator[int]:
    """Greedy tokens, one forward pass each after that of the prompt."""
    inputs = torch.tensor([prompt])
    cache = None
    for _ in range(max_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        inputs = output.logits[:, -1].argmax(-1, keepdim=True)
        yield int(inputs)


def make_handler(model: Any) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            with torch.inference_mode():
                for token in generate(model, body["prompt"], body["max_tokens"]):
                    self._send(json.dumps({"choices": [{"index": 0, "token_ids": [token]}]}))
            self._send("[DONE]")

        def _send(self, payload: str) -> None:
            self.wfile.write(f"data: {payload}\n\n".encode())
            self.wfile.flush()

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged."""

    return Handler


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    server = HTTPServer(("127.0.0.1", options.port), make_handler(model))
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
