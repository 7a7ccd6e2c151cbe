"""The port that the ranks of a test meet at is theirs until they end."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.sharding.ranks import a_port


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", ""])
def test_a_port_is_kept_at_every_address(address: str) -> None:
    with a_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind((address, port))
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        store.set("met", "yes")
        assert TCPStore("localhost", port).get("met") == b"yes"
