"""What a role needs, refuses and prefers."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.engine.roles import check_answer_length, check_role, load_policy_of
from milepost.engine.stores import StoreOptions
from milepost.errors import ConfigError, RequestError
from milepost.stores.address import parse_addresses
from milepost.stores.peer_nixl import READ_AREA_BYTES

PEER, SHARED, OWN = "peer://127.0.0.1:1", "redis://127.0.0.1", "memory://"


@pytest.mark.parametrize(
    ("role", "stores", "serves_peers", "is_fine"),
    [
        ("both", [], False, True),
        ("prefill", [], False, False),
        ("prefill", [OWN, PEER], False, False),
        ("prefill", [], True, True),
        ("prefill", [PEER, SHARED], False, True),
        ("decode", [], True, False),
        ("decode", [OWN], False, False),
        ("decode", [PEER], False, True),
        ("decode", [SHARED], False, True),
        ("encode", [PEER], True, False),
    ],
)
def test_what_a_role_needs(role: str, stores: list[str], serves_peers: bool, is_fine: bool) -> None:
    addresses = parse_addresses(stores)
    if is_fine:
        check_role(role, addresses, serves_peers=serves_peers)
        return
    with pytest.raises(ConfigError) as raised:
        check_role(role, addresses, serves_peers=serves_peers)
    assert raised.value.field == "role"


def test_a_decode_replica_loads_whatever_it_can_unless_told_otherwise() -> None:
    assert [load_policy_of(role, None) for role in ("both", "prefill", "decode")] == [
        "auto",
        "auto",
        "always",
    ]
    assert load_policy_of("decode", "auto") == "auto" and load_policy_of("both", "always") == "always"
    with pytest.raises(ConfigError, match="kv_load_policy"):
        load_policy_of("both", "never")


def test_a_prefill_replica_gives_one_token() -> None:
    check_answer_length("prefill", 1, "max_tokens")
    check_answer_length("decode", 500, "max_tokens")
    with pytest.raises(RequestError, match="--role prefill") as raised:
        check_answer_length("prefill", 2, "max_completion_tokens")
    assert raised.value.param == "max_completion_tokens" and raised.value.code == "prefill_only"


def test_options_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    StoreOptions(serve_kv="127.0.0.1:0", role="prefill").check()
    for options, field in (
        ({"role": "prefill"}, "role"),
        ({"serve_kv": "0.0.0.0:0"}, "serve_kv"),
        ({"serve_kv": "127.0.0.1:0", "peer_token_file": tmp_path / "none"}, "peer_token_file"),
        ({"load_policy": "never"}, "kv_load_policy"),
    ):
        with pytest.raises(ConfigError) as raised:
            StoreOptions(**options).check()  # type: ignore[arg-type]
        assert raised.value.field == field


def test_memory_for_bytes_on_their_way_is_planned() -> None:
    assert StoreOptions().memory_bytes() == 0
    assert StoreOptions(("memory://?bytes=5MiB", PEER)).memory_bytes() == (5 << 20) + READ_AREA_BYTES
    assert StoreOptions(serve_kv="127.0.0.1:1?bytes=7MiB").memory_bytes() == 7 << 20


def test_the_secret_goes_to_every_peer_that_has_none_of_its_own(tmp_path: Path) -> None:
    token = tmp_path / "token"
    options = StoreOptions((PEER, f"{PEER}2?name=other&token_file=/other", OWN), peer_token_file=token)
    first, other, own = options.addresses()
    assert first.options["token_file"] == str(token)
    assert other.options["token_file"] == "/other"
    assert "token_file" not in own.options
