from collections.abc import Iterator

import pytest
import torch

from tests.models.oracle import Oracle, running_oracle


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    with running_oracle(tmp_path_factory.mktemp("oracle")) as running:
        yield running
