"""Who may speak to a server, and how much: terms, channels and byte credits. Pure.

Every client actor's highest term is remembered and lower ones are refused, in the handshake and at
each later request. Credits are counted here as well as at the client, so that memory stays bounded
even if a client miscounts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from k3ray.config.supernode import LanesConfig
from k3ray.errors import CapacityError, FencedError, HandshakeError, TransportError
from k3ray.ids import Incarnation, refuse_lower_term
from k3ray.transport.envelope import MAX_IN_FLIGHT, Hello, Welcome
from k3ray.transport.lanes import lane_configs
from k3ray.transport.protocol import PROTOCOL_VERSION, Lane

MAX_CHANNELS = 1024
"""Open channels of one server."""


@dataclass(slots=True, kw_only=True)
class ClientChannel:
    """A client's open channel; `identity` is how the transport addresses it."""

    identity: Hashable
    client: Incarnation
    generation: int
    in_flight: int = 0
    used_bytes: list[int] = field(default_factory=lambda: [0 for _ in Lane])


class Admission:
    """Channels of one server incarnation."""

    def __init__(self, me: Incarnation, *, lanes: LanesConfig, digest: str) -> None:
        self._me = me
        self._digest = digest
        self._grants = tuple(config.credit_bytes for config in lane_configs(lanes))
        self._terms: dict[str, int] = {}
        self._channels: dict[Hashable, ClientChannel] = {}

    @property
    def channels(self) -> tuple[ClientChannel, ...]:
        """Open channels."""
        return tuple(self._channels.values())

    def full(self) -> bool:
        """Whether another handshake would be refused."""
        return len(self._channels) >= MAX_CHANNELS

    def open(self, identity: Hashable, hello: Hello) -> Welcome:
        """Open a channel.

        Raises:
            HandshakeError: other protocol, code or bits.
            FencedError: an old client, or a client that looks for another life of this server.
            CapacityError: too many channels.
        """
        self._check_digest(hello)
        if hello.server != self._me:
            raise FencedError(
                f"{hello.client} looks for {hello.server} and found {self._me}",
                remedy="ask the controller for the current plan",
                peer=str(self._me),
                operation="handshake",
            )
        self._check_term(hello.client)
        if self.full():
            raise CapacityError(
                f"{self._me} has {MAX_CHANNELS} open channels",
                remedy="disconnect clients that are no longer used",
                retry_after_s=1.0,
            )
        self._terms[hello.client.actor] = hello.client.term
        self._channels[identity] = ClientChannel(
            identity=identity, client=hello.client, generation=hello.generation
        )
        return Welcome(server=self._me, generation=hello.generation, grants=self._grants)

    def _check_digest(self, hello: Hello) -> None:
        code, _, bits = self._digest.partition("/")
        their_code, _, their_bits = hello.digest.partition("/")
        if hello.protocol != PROTOCOL_VERSION or their_code != code:
            raise HandshakeError(
                f"{hello.client} speaks protocol {hello.protocol} with code {their_code[:12]}, "
                f"{self._me} protocol {PROTOCOL_VERSION} with code {code[:12]}",
                remedy="run one version of k3ray everywhere: k3ray down, then up",
                peer=str(self._me),
                operation="handshake",
            )
        if their_bits != bits:
            raise HandshakeError(
                f"{hello.client} computes other bits ({their_bits or 'untested'}) than "
                f"{self._me} ({bits or 'untested'})",
                remedy="use one kind of CPU and one torch for a deterministic line, or "
                "numeric_mode=fast",
                peer=str(self._me),
                operation="handshake",
            )

    def find(self, identity: Hashable) -> ClientChannel:
        """The open channel of this identity.

        Raises:
            TransportError: no handshake.
            FencedError: its client has been replaced.
        """
        channel = self._channels.get(identity)
        if channel is None:
            raise TransportError(
                f"a request reached {self._me} before a handshake",
                remedy="connect first",
                peer=str(self._me),
            )
        self._check_term(channel.client)
        return channel

    def charge(self, channel: ClientChannel, lane: Lane, cost: int) -> None:
        """Take `cost` bytes of the lane's credit.

        Raises:
            CapacityError: the client spends more than it was granted.
        """
        left = self._grants[lane] - channel.used_bytes[lane]
        if cost > left or channel.in_flight >= MAX_IN_FLIGHT:
            raise CapacityError(
                f"{channel.client} sent {cost} bytes on lane {lane.name} with {left} left and "
                f"{channel.in_flight} requests in flight",
                remedy="wait for replies before sending more",
                peer=str(self._me),
                retry_after_s=0.1,
            )
        channel.used_bytes[lane] += cost
        channel.in_flight += 1

    def release(self, channel: ClientChannel, lane: Lane, cost: int) -> None:
        """Give the credit of an answered request back."""
        channel.used_bytes[lane] -= cost
        channel.in_flight -= 1

    def is_current(self, channel: ClientChannel) -> bool:
        """Whether the channel is open and its client has not been replaced."""
        known = self._channels.get(channel.identity) is channel
        return known and channel.client.term >= self._terms[channel.client.actor]

    def forget(self, channel: ClientChannel) -> None:
        """Drop a channel whose client is gone."""
        if self._channels.get(channel.identity) is channel:
            del self._channels[channel.identity]

    def _check_term(self, client: Incarnation) -> None:
        seen = self._terms.get(client.actor, 0)
        refuse_lower_term(seen=seen, offered=client.term, who=client.actor)
