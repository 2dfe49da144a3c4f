"""Connecting to a federation's server: TCP, and with an NVIDIA FLARE startup kit the TLS handshake."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from medfl.core import Config, InputError, Refused, json_values, printable

_CONNECT_SECONDS = 5.0
_REFUSAL_SECONDS = 2.0  # within which a server reports that it rejects the certificate
_FILES = ("rootCA.pem", "client.crt", "client.key")


@dataclass(frozen=True)
class Kit:
    """A site's startup kit.

    Attributes:
        folder: with the certificates.
        server: (host, port) given in the kit, None if there is none.
        name: of the server, which its certificate must have; "" if the kit does not give it.
    """

    folder: Path
    server: tuple[str, int] | None = None
    name: str = ""

    @classmethod
    def open(cls, folder: Path) -> Kit:
        """Find the certificates in a kit's folder, or in its `startup` subfolder; InputError if they are missing."""
        for candidate in (folder, folder / "startup"):
            if all((candidate / name).is_file() for name in _FILES):
                server, name = _server_of(candidate / "fed_client.json")
                return cls(candidate, server, name)

        raise InputError(
            f"--kit {printable(folder)}",
            f"the folder of a site's startup kit, with {', '.join(_FILES)}",
            "check the path",
        )


def _server_of(path: Path) -> tuple[tuple[str, int] | None, str]:
    """Return the address and the name of a kit's first server; (None, "") if the file does not give them."""
    try:
        server = json_values(path)["servers"][0]
        target = address(str(server["service"]["target"]), "the kit's server")
        return target, str(server.get("identity", ""))
    except (Refused, ValueError, KeyError, TypeError, AttributeError, IndexError, InputError):
        return None, ""


def address(text: str, flag: str = "--server") -> tuple[str, int]:
    """Parse HOST:PORT; InputError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(
            f"{flag} {printable(text)}",
            "HOST:PORT, as fl.example.org:8002",
            "write the host and port",
        )
    return host.strip("[]"), int(port)


def reach(server: tuple[str, int] | None, kit: Kit | None = None) -> str:
    """Connect to a server, by default the kit's, and describe the result.

    With a kit the TLS handshake is performed too.

    Raises:
        InputError: no connection, or an untrusted one; says why.
    """
    if server is None and kit is not None:
        server = kit.server
    if server is None:
        raise InputError("no server", "--server HOST:PORT, or a kit that names one", "add --server")

    where = f"{printable(server[0])}:{server[1]}"
    try:
        with socket.create_connection(server, _CONNECT_SECONDS) as plain:
            if kit is None:
                return f"{where} takes connections (no --kit: certificates were not tried)"
            with _context(kit).wrap_socket(plain, server_hostname=server[0]) as secure:
                _await_refusal(secure)
                subject = _subject(secure.getpeercert() or {}, kit)
                return f"{where} takes connections, {secure.version()}, {subject}"
    except ssl.SSLError as error:
        raise InputError(
            f"the server {where} and this site do not trust each other ({printable(error.reason or error)})",
            "both have certificates of one federation",
            "ask for a new startup kit, or look for something in between",
        ) from error
    except OSError as error:
        raise InputError(
            f"the server {where} cannot be reached ({error.strerror or error})",
            "outgoing connections to it are let through",
            "check the address, the firewall and that the server runs",
        ) from error


def _context(kit: Kit) -> ssl.SSLContext:
    """Trust only the federation's own authority, whose certificates contain server names instead of addresses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(kit.folder / "rootCA.pem")
    context.load_cert_chain(kit.folder / "client.crt", kit.folder / "client.key")
    context.set_alpn_protocols(["h2"])  # FLARE's servers speak gRPC
    return context


def _await_refusal(secure: ssl.SSLSocket) -> None:
    """Wait for the server's first message: in TLS 1.3 it refuses a client's certificate only after the handshake."""
    secure.settimeout(_REFUSAL_SECONDS)
    with suppress(TimeoutError):  # no message: it waits for a request
        if not secure.recv(1):
            raise ConnectionResetError("it closed the connection after the handshake")


def _subject(certificate: Config, kit: Kit) -> str:
    """Describe the server's certificate.

    Raises:
        InputError: it does not belong to the server named in the kit.
    """
    # each part of a subject is a tuple of pairs, nearly always just one
    subject = dict(chain.from_iterable(certificate.get("subject", ())))
    name = str(subject.get("commonName", "?"))
    names = {name, *(value for _, value in certificate.get("subjectAltName", ()))}
    if kit.name and kit.name not in names:
        raise InputError(
            f"the server's certificate is of {printable(name)}",
            f"the kit is for {printable(kit.name)}",
            "check the address",
        )

    return f"certificate of {printable(name)}, valid until {printable(certificate.get('notAfter', '?'))}"
