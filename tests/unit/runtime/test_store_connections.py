"""Connections to the store: none blocks another thread."""

from __future__ import annotations

import dataclasses
import socket
import threading
from datetime import timedelta
from time import perf_counter
from typing import Any, cast

import pytest
import torch.distributed as dist

from stretto.errors import CommTimeout
from stretto.runtime.ranks import Ranks
from stretto.runtime.store import _connect, missing_after, own_connection


def ranks_over(store: Any) -> Ranks:
    return Ranks(rank=0, size=2, names=(0, 1), store=store, timeout_s=20.0)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))


def test_a_wait_on_one_connection_leaves_the_other_free(store: dist.TCPStore) -> None:
    mine = own_connection(ranks_over(dist.PrefixStore("a", store)))
    waiting = threading.Thread(target=lambda: mine.wait(["late"]))
    waiting.start()
    store.set("a/late", "")  # waits for the wait's end over one shared connection
    waiting.join()
    ranks = ranks_over(mine)
    found = missing_after(
        dataclasses.replace(ranks, timeout_s=0.0), mine, ["late", "never"]
    )
    assert found is not None
    assert found.ranks == [1]


def test_a_store_that_can_not_be_cloned_is_used_as_it_is() -> None:
    class Plain(dist.Store):
        def check(self, _keys: list[str]) -> bool:
            return False

    plain = Plain()
    assert own_connection(ranks_over(plain)) is plain


def test_a_store_that_is_gone_is_not_connected_to_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore(
        "127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    del server
    began = perf_counter()
    assert own_connection(ranks_over(client)) is client
    # A clone would retry for longer than the store's timeout.
    assert perf_counter() - began < 15


class NeverAnswering:
    """A store of which each connection is shut while it is opened."""

    def check(self, _keys: list[str]) -> bool:
        threading.Event().wait(30.0)
        raise RuntimeError("shut")


def test_ranks_that_have_parted_wait_for_no_connection() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    try:
        with pytest.raises(CommTimeout, match="have parted"):
            _connect(cast("Any", NeverAnswering()), group, lambda: True)
    finally:
        dist.destroy_process_group()
