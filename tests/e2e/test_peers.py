"""Replicas that pull from each other, as processes: turns that go on elsewhere, roles, and sudden deaths."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import pytest
from tests.e2e.peers import PeerReplica
from tests.e2e.pooled import UNIT, Conversation, Generate
from tests.engine.replicas import replica
from tests.stores.services import Server, free_port

from milepost.engine.serving import EMBEDDED_MODEL
from milepost.engine.tokenizer import Tokenizer
from milepost.models.loading import load_model

# Three processes are started one after the other.
pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
SETTLE_SECONDS = 60.0


@pytest.fixture(scope="module")
def generate() -> Iterator[Generate]:
    with replica(load_model(EMBEDDED_MODEL), Tokenizer.from_directory(EMBEDDED_MODEL)) as uninterrupted:
        yield lambda prompt, length: uninterrupted.ask(prompt, length).tokens


def together(*starts: Callable[[], PeerReplica]) -> list[PeerReplica]:
    """Start replicas side by side: each takes many seconds."""
    with ThreadPoolExecutor() as starting:
        futures = [starting.submit(start) for start in starts]
    made = [future.result() for future in futures if future.exception() is None]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for each in made:
            each.end()
        raise
    return made


@pytest.fixture(params=["wire", "nixl"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[PeerReplica], str]]:
    """Two replicas that know each other; the list may be changed."""
    transport = request.param
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="the nixl extra is not installed")
    ports = [free_port(), free_port()]
    running = together(
        lambda: PeerReplica(tmp_path, port=ports[0], peers=ports[1:], transport=transport),
        lambda: PeerReplica(tmp_path, port=ports[1], peers=ports[:1], transport=transport),
    )
    yield running, transport
    for each in running:
        each.end()


def reached(here: PeerReplica, there: PeerReplica, transport: str, generate: Generate) -> None:
    """Until bulk bytes go the way they are to go; the first ones come over the connection."""
    end = time.monotonic() + SETTLE_SECONDS
    rng = Random(77)
    before = there.metric("milepost:peer_segments_total", transport=transport)
    while there.metric("milepost:peer_segments_total", transport=transport) == before:
        conversation = Conversation(generate, rng)
        conversation.turn(there, 70, 4)
        conversation.turn(here, 8, 4)
        assert time.monotonic() < end
        time.sleep(0.1)


# ---------------------------------------------------------------- turns that go on elsewhere


def test_turns_go_on_at_the_other_replica_and_the_first_one_is_killed_in_the_middle_of_a_load(
    pair: tuple[list[PeerReplica], str], tmp_path: Path, generate: Generate
) -> None:
    running, transport = pair
    first, second = running
    reached(second, first, transport, generate)
    reached(first, second, transport, generate)
    conversations = [Conversation(generate, Random(seed)) for seed in range(3)]
    for number in range(4):
        for index, conversation in enumerate(conversations):
            turn = conversation.turn(running[(number + index) % 2], 150 if number == 0 else 40)
            assert turn.is_within_bound, turn
            if number:
                assert turn.told.load == "loaded" and turn.told.num_loaded_tokens > 0, turn
    for here in running:
        for fault in ("corrupt", "foreign", "error"):
            assert here.metric("milepost:store_segments_total", outcome=fault, operation="load") == 0, fault
        assert here.metric("milepost:peer_refused_total") == 0

    rng = Random(5)
    for pause in (0.01, 0.05):
        asked = []
        for _ in range(4):
            conversation = Conversation(generate, rng)
            conversation.turn(first, 2500, 4)
            asked.append(conversation)
        with ThreadPoolExecutor(4) as asking:
            turns = [asking.submit(conversation.turn, second, 40, 12) for conversation in asked]
            time.sleep(pause)
            first.kill()
            for turn in turns:
                turn.result()  # the right answer, however much had come
        assert second.process.poll() is None
        for conversation in asked:
            assert conversation.turn(second, 16, 4).is_within_bound
        assert second.metric("milepost:store_segments_total", outcome="corrupt") == 0
        first.end()
        running[0] = first = PeerReplica(
            tmp_path, port=first.peer_port, peers=[second.peer_port], transport=transport
        )
        # The breaker of the second one notices that the first one is back, and NIXL that it is another one.
        reached(second, first, transport, generate)


def test_without_the_secret_nothing_is_given(tmp_path: Path, generate: Generate) -> None:
    port = free_port()
    other = tmp_path / "other"
    other.mkdir()
    wrong = other / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("another-secret-altogether\n")
    address = f"peer://127.0.0.1:{port}?transport=wire&token_file={wrong}"
    first, second = together(
        lambda: PeerReplica(tmp_path, port=port), lambda: PeerReplica(other, "--kv-store", address)
    )
    try:
        conversation = Conversation(generate, Random(1))
        conversation.turn(first, 100)
        turn = conversation.turn(second)
        assert turn.told.num_cached_tokens == 0 and turn.told.load in ("failed", "too_late")
        assert first.metric("milepost:peer_refused_total") >= 1
        assert second.metric("milepost:store_segments_total", outcome="error") >= 1
    finally:
        first.end()
        second.end()


# ---------------------------------------------------------------- roles


class Proxied:
    """A prefill and a decode replica behind the example's proxy, and one server to compare with."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port(), free_port()]
        self.alone, self.prefill, self.decode = together(
            lambda: PeerReplica(folder),
            lambda: PeerReplica(folder, "--role", "prefill", port=ports[0], peers=ports[1:]),
            lambda: PeerReplica(folder, "--role", "decode", port=ports[1], peers=ports[:1], policy=None),
        )
        self.proxy = Server(self._command, folder)
        self.url = f"http://127.0.0.1:{self.proxy.port}"
        self.client = httpx.Client(timeout=120, trust_env=False)

    def _command(self, port: int) -> list[str]:
        return [
            sys.executable, str(ROOT / "deploy" / "prefill_decode_proxy.py"), "--port", str(port),
            "--prefill", self.prefill.url, "--decode", self.decode.url,
        ]  # fmt: skip

    def close(self) -> None:
        self.client.close()
        self.proxy.kill()
        for each in (self.alone, self.prefill, self.decode):
            each.end()


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    made = Proxied(tmp_path_factory.mktemp("roles"))
    yield made
    made.close()


def test_two_roles_answer_as_one_server_does(proxied: Proxied) -> None:
    rng = Random(3)
    for number_of_tokens in (20, 33, 200, 1500):
        prompt = [rng.randrange(300, 2000) for _ in range(number_of_tokens)]
        for options in ({"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}):
            body = {
                "prompt": prompt,
                "max_tokens": 40,
                "ignore_eos": True,
                "return_token_ids": True,
                **options,
            }
            given = proxied.client.post(f"{proxied.url}/v1/completions", json=body).json()
            alone = proxied.client.post(f"{proxied.alone.url}/v1/completions", json=body).json()
            assert given["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
            assert len(given["choices"][0]["token_ids"]) == 40
            cached = given["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (number_of_tokens - 1) // UNIT * UNIT
    # The prompts were computed by one, the answers by the other.
    assert proxied.prefill.metric("vllm:generation_tokens_total") == 8
    assert proxied.decode.metric("vllm:generation_tokens_total") == 320
    assert proxied.decode.metric("milepost:store_lookups_total", outcome="loaded") >= 3


def test_turns_of_a_chat_through_the_proxy_streamed_and_whole(proxied: Proxied) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "You repeat what you are told. " * 8}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"Turn {turn}: say something about the number {turn}."})
        body = {"messages": messages, "max_completion_tokens": 24, "temperature": 0}
        alone = proxied.client.post(f"{proxied.alone.url}/v1/chat/completions", json=body).json()
        if turn % 2:
            text = ""
            with proxied.client.stream(
                "POST", f"{proxied.url}/v1/chat/completions", json={**body, "stream": True}
            ) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                for line in stream.iter_lines():
                    if line.startswith("data: {"):
                        for choice in json.loads(line[6:])["choices"]:
                            text += choice["delta"].get("content") or ""
        else:
            text = proxied.client.post(f"{proxied.url}/v1/chat/completions", json=body).json()["choices"][0][
                "message"
            ]["content"]
        assert text == (alone["choices"][0]["message"]["content"] or "")
        messages.append({"role": "assistant", "content": text})


def test_a_prefill_replica_that_hangs_is_not_waited_for(proxied: Proxied) -> None:
    rng = Random(9)
    body = {
        "prompt": [rng.randrange(300, 2000) for _ in range(700)], "max_tokens": 10, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    alone = proxied.client.post(f"{proxied.alone.url}/v1/completions", json=body)
    proxied.prefill.process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        given = proxied.client.post(f"{proxied.url}/v1/completions", json=body)
        # Two silences at the proxy, and what a decode replica waits for a peer.
        assert time.monotonic() - begin < 30
        begin = time.monotonic()
        body["prompt"] = [*body["prompt"], 5]
        assert proxied.client.post(f"{proxied.url}/v1/completions", json=body).status_code == 200
        assert time.monotonic() - begin < 15, "it is asked for nothing for a while"
    finally:
        proxied.prefill.process.send_signal(signal.SIGCONT)
    assert given.json()["choices"][0]["token_ids"] == alone.json()["choices"][0]["token_ids"]
    assert given.json()["milepost"]["reuse"]["load"]["outcome"] in ("failed", "too_late")


def test_what_a_role_refuses_and_what_the_proxy_survives(proxied: Proxied) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 2, "temperature": 0}
    refused = proxied.client.post(f"{proxied.prefill.url}/v1/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "prefill_only"
    assert refused.json()["error"]["param"] == "max_tokens"
    unlimited = proxied.client.post(f"{proxied.prefill.url}/v1/completions", json={"prompt": [5] * 40})
    assert unlimited.status_code == 400
    assert proxied.client.post(f"{proxied.decode.url}/v1/completions", json=body).status_code == 200
    wrong = proxied.client.post(f"{proxied.url}/v1/completions", json={"prompt": 7})
    assert wrong.status_code == 400
    assert proxied.client.get(f"{proxied.url}/v1/models").status_code == 200
    proxied.prefill.kill()
    proxied.prefill.process.wait()
    for seed in range(3):
        rng = Random(100 + seed)
        body = {
            "prompt": [rng.randrange(300, 2000) for _ in range(200)], "max_tokens": 10, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        given = proxied.client.post(f"{proxied.url}/v1/completions", json=body)
        alone = proxied.client.post(f"{proxied.alone.url}/v1/completions", json=body)
        assert given.json()["choices"][0]["token_ids"] == alone.json()["choices"][0]["token_ids"]
