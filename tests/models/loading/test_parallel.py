import subprocess
import sys
from pathlib import Path
from threading import Barrier, active_count

import pytest

from baton.models.loading.parallel import in_threads


def test_each_item_is_worked_on_once_and_several_at_a_time() -> None:
    together = Barrier(4, timeout=60)

    def meet(item: int) -> int:
        together.wait()
        return item * item

    assert sorted(in_threads(meet, range(20), 4)) == [n * n for n in range(20)]
    assert list(in_threads(meet, [], 4)) == []


def test_an_error_ends_it() -> None:
    begun, threads = list[int](), active_count()

    def fail(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise ValueError("the fourth")
        return item

    found = in_threads(fail, range(1000), 1)
    with pytest.raises(ValueError, match="the fourth"):
        list(found)
    assert begun[:4] == [0, 1, 2, 3]
    assert active_count() == threads


def test_stopping_early_leaves_no_thread() -> None:
    threads = active_count()
    found = in_threads(lambda item: item, range(1000), 3)
    next(found)
    found.close()
    assert active_count() == threads


FORSAKEN = """
import threading, time
from baton.models.loading.parallel import in_threads
begun = threading.Event()
def work(item):
    begun.set()
    time.sleep(60)
threading.Thread(target=lambda: list(in_threads(work, range(9), 2)), daemon=True).start()
begun.wait()
"""


def test_a_process_ends_while_its_threads_are_at_work() -> None:
    subprocess.run([sys.executable, "-c", FORSAKEN], cwd=Path(__file__).parents[3], check=True, timeout=50)
