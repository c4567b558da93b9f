from pathlib import Path

import pytest

from baton.api.cluster.file import read_cluster
from baton.api.config import ConfigError

WHOLE = """
model = "granite"
launcher = "ray"

[options]
memory = "2G"

[router]
port = 8000

[engines.prefill]
replicas = 2
options = {role = "prefill"}

[engines.decode]
min = 1
max = 4
port = 9000
gpus = 1
variables = {OMP_NUM_THREADS = "2"}
options = {role = "decode", max_running = 8}

[scaling]
queue = 0.5
"""


def read(tmp_path: Path, text: str) -> str:
    """Return the error of a file."""
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    return str(caught.value)


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(WHOLE)
    cluster = read_cluster(path)
    prefill, decode = cluster.engines["prefill"], cluster.engines["decode"]
    assert (prefill.least, prefill.most, decode.least, decode.most) == (2, 2, 1, 4)
    assert cluster.scaling.queue == 0.5 and cluster.scaling.up_after == 5.0 and cluster.model == "granite"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "engines"),
        ("[engines]", "engines"),
        ("[engines.a]\nreplica = 2", "replica"),
        ("[engines.A]", "engines"),
        ("[engines.a]\nmin = 3\nmax = 2", "engines.a: max = 2 is less than min = 3"),
        ("[engines.a]\nreplicas = -1", "replicas"),
        ("[engines.a]\noptions = {maximum = 1}", "engines.a: there is no option 'maximum'"),
        ("[engines.a]\noptions = {port = 1}", "engines.a: the cluster sets 'port' itself"),
        ("[engines.a]\noptions = {uds = 'a'}", "engines.a: 'uds' is not possible, because a cluster's processes"),
        ("[engines.a]\n[router]\nuds = 'a'", "the router listens on `host` and `port` of [router]"),
        ("[engines.a]\n[options]\ntls_cert = 'a'", "engines.a: 'tls_cert' is not possible, because a cluster's"),
        ("[engines.a]\n[router]\ntls_key = 'a'", "put a proxy with TLS in front of the router"),
        ("[engines.a]\noptions = {max_running = 'many'}", "engines.a: --max-running"),
        ("[engines.a]\n[options]\nmemory = 'all'", "engines.a: --memory"),
        ("[engines.a]\n[router]\nengine = ['x']", "router: the cluster sets 'engine' itself"),
        ("launcher = 'k8s'\n[engines.a]", "k8s"),
        ("[engines.a", "cluster.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    assert why in read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_cluster(tmp_path / "none.toml")
