"""Choice of the network interface on which the ranks of several nodes connect."""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import sys


def interface_towards(address: str) -> str | None:
    """Return the network interface by which this machine reaches ``address``; None if unknown.

    ``address`` may be an address of this machine.
    """
    source = _source_address(address)
    return None if source is None else _owners().get(source)


def resolves_to_network(name: str) -> bool:
    """Return True if a name resolves to a non-loopback address of this machine, which other machines may reach."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    owners = _owners()
    return any(not is_loopback(address) and (not owners or plain(address) in owners) for address in addresses)


def is_loopback(address: str) -> bool:
    """Return True for 127.0.0.0/8, ::1, and 127.0.0.0/8 mapped into IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def is_own(address: str) -> bool:
    """Return True if ``address`` is an address of this machine."""
    return plain(address) in _owners() or is_loopback(address)


def _source_address(address: str) -> str | None:
    """Return the local address of the route to another address; connecting a UDP socket sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return plain(str(probe.getsockname()[0]))
    except OSError:
        return None


def plain(address: str) -> str:
    """Return an address without its IPv6 zone; an IPv4 address mapped into IPv6 is returned as an IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


class _Address(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3), as Linux has it."""


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _owners() -> dict[str, str]:
    """Return the network interface of each address of this machine, by address; empty on systems other than Linux."""
    if sys.platform != "linux":
        return {}
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Address)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return {}
    names: dict[str, str] = {}
    try:
        entry = first
        while entry:
            if entry.contents.address and (text := _text(entry.contents.address)):
                names[text] = entry.contents.name.decode()
            entry = entry.contents.next
    finally:
        library.freeifaddrs(first)
    return names


def _text(sockaddr: int) -> str | None:
    family = ctypes.c_ushort.from_address(sockaddr).value
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(sockaddr + 8, 16))
    return None
