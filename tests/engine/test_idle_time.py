"""What is done in idle times, and that it is done once."""

from __future__ import annotations

import threading

from qwenonnx.engine.idle_time import IdleTime


def test_chores_are_done_in_order_and_once_until_there_is_work() -> None:
    done: list[str] = []
    idle = IdleTime(threading.Condition(), [(0.02, lambda: done.append("later")), (0.0, lambda: done.append("soon"))])
    idle.wait_until(lambda: len(done) == 2)
    assert done == ["soon", "later"]
    idle.wait_until(lambda: len(done) == 4)  # the next idle time
    assert done == ["soon", "later"] * 2


def test_work_that_is_there_is_not_kept_waiting() -> None:
    done: list[str] = []
    IdleTime(threading.Condition(), [(0.0, lambda: done.append("chore"))]).wait_until(lambda: True)
    assert done == []


def test_a_notification_ends_the_wait() -> None:
    wake, over = threading.Condition(), threading.Event()
    waiter = threading.Thread(target=IdleTime(wake, [(1e6, over.clear)]).wait_until, args=(over.is_set,))
    waiter.start()
    over.set()
    with wake:
        wake.notify_all()
    waiter.join(20)
    assert not waiter.is_alive()


def test_a_chore_that_fails_takes_nothing_with_it() -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("no")

    IdleTime(threading.Condition(), [(0.0, fail), (0.01, lambda: done.append("next"))]).wait_until(lambda: bool(done))
    assert done == ["next"]
