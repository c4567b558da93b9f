"""The number of connections is limited by the file descriptors of the process."""

import pytest

from baton.api.config import Config
from baton.api.connections import limits
from baton.api.connections.limits import OTHER_DESCRIPTORS, REFUSALS, connection_limits, descriptor_limit, router_limits


@pytest.mark.parametrize("descriptors", [512, 1024, 4096])
def test_there_are_descriptors_left_for_refusals_and_files(monkeypatch: pytest.MonkeyPatch, descriptors: int) -> None:
    monkeypatch.setattr(limits, "descriptor_limit", lambda: descriptors)
    limit = connection_limits(Config())
    assert limit.connections + limit.refusals + OTHER_DESCRIPTORS == descriptors


def test_with_enough_of_them_the_option_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 2**20)
    assert connection_limits(Config(max_connections=77)).connections == 77


def test_with_hardly_any_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 64)
    assert connection_limits(Config()).connections == 1


def test_a_router_has_two_for_each_client_and_one_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(engine=("http://e",) * 1000)
    monkeypatch.setattr(limits, "descriptor_limit", lambda: OTHER_DESCRIPTORS + REFUSALS + 1000 + 2 * 77)
    assert router_limits(config).connections == 77
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 1024)
    assert router_limits(config).connections == 1
    monkeypatch.setattr(limits, "descriptor_limit", lambda: 2**20)
    assert router_limits(config).connections == config.max_connections


def test_bytes_in_flight_hold_one_body_at_least() -> None:
    assert connection_limits(Config(bytes_in_flight=1, body_limit=2**20)).held == 2**20


def test_this_process_has_a_limit() -> None:
    assert descriptor_limit() > REFUSALS
