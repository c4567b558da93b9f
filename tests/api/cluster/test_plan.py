from pathlib import Path

import msgspec

from baton.api.cluster.commands import in_folder
from baton.api.cluster.file import ClusterFile
from baton.api.cluster.plan import engine_spec, peer_addresses, router_spec


def cluster(**fields: object) -> ClusterFile:
    engines = {"decode": {"min": 2, "max": 3, "port": 9000}, "prefill": {"options": {"role": "prefill"}}}
    return msgspec.convert({"engines": engines, "options": {"memory": "1G", "api_key": ["a"]}, **fields}, ClusterFile)


def test_of_two_engines_the_later_one_connects() -> None:
    peers = peer_addresses(cluster(), Path("run/peers"))
    assert list(peers) == ["prefill-0", "decode-0", "decode-1", "decode-2"]
    options = engine_spec(cluster(), "decode", 1, peers).options
    assert options["peer_listen"] == "unix:run/peers/decode-1"
    assert options["peer"] == ["unix:run/peers/prefill-0", "unix:run/peers/decode-0"]
    assert engine_spec(cluster(), "prefill", 0, peers).options["peer"] == []


def test_an_engine_that_leaves_hands_over_to_one_that_stays() -> None:
    peers = peer_addresses(cluster(), Path("run"))
    successors = [engine_spec(cluster(), "decode", number, peers).options.get("drain_to") for number in range(3)]
    assert successors == ["decode-1", "decode-0", "decode-1"]
    assert "drain_to" not in engine_spec(cluster(), "prefill", 0, peers).options


def test_engines_can_be_apart() -> None:
    assert peer_addresses(cluster(linked=False), Path("run")) == {}
    assert peer_addresses(msgspec.convert({"engines": {"a": {}}}, ClusterFile), Path("run")) == {}
    assert "peer_listen" not in engine_spec(cluster(), "decode", 0, {}).options


def test_the_command_of_an_engine() -> None:
    arguments = engine_spec(cluster(model="granite"), "decode", 1, {}).arguments("127.0.0.1", 80)
    assert arguments[:4] == ["-m", "baton.api.cli", "serve", "granite"]
    pairs = dict(zip(arguments[4::2], arguments[5::2], strict=True))
    assert pairs == {
        "--host": "127.0.0.1", "--port": "9001", "--log-format": "json", "--engine-name": "decode-1", "--memory": "1G",
        "--api-key": "a",
    }  # fmt: skip


def test_the_router_has_the_engines_keys() -> None:
    spec = router_spec(cluster(router={"port": 8000}), ["http://a", "http://b"])
    assert spec.options == {"port": 8000, "engine": ["http://a", "http://b"], "api_key": ["a"]}
    assert spec.arguments("127.0.0.1", 1)[-5:].count("--engine") == 2


def test_the_model_of_a_cluster_is_a_folder_or_a_name(tmp_path: Path) -> None:
    assert in_folder(cluster(), tmp_path).model is None
    assert in_folder(cluster(model="granite"), tmp_path).model == str(tmp_path / "granite")
    assert in_folder(cluster(model="org/model@v1"), tmp_path).model == "org/model@v1"
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert in_folder(cluster(model="org/model"), tmp_path).model == str(tmp_path / "org" / "model")
