"""Reaching a server: a TCP connection, certificates of one federation, and plain words for everything else."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.partner.connection import Kit, address, reach

x509 = pytest.importorskip("cryptography.x509")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

BEGIN = datetime.datetime(2020, 1, 1)
END = datetime.datetime(2100, 1, 1)


class Authority:
    """Of one federation."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "federation")])
        self.root = self._signed(self.name, self.key.public_key(), ca=True)

    def _signed(self, name, public, *, ca: bool = False):
        made = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self.name).public_key(public)
        )
        made = (
            made.serial_number(x509.random_serial_number())
            .not_valid_before(BEGIN)
            .not_valid_after(END)
        )
        made = made.add_extension(x509.BasicConstraints(ca, None), critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(public)
        known = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        made = made.add_extension(own, critical=False).add_extension(known, critical=False)
        return made.sign(self.key, hashes.SHA256())

    def kit(self, folder: Path, who: str, files: str = "client") -> Path:
        """Write a startup kit."""
        folder.mkdir(parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)])
        pem = serialization.Encoding.PEM
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (folder / f"{files}.key").write_bytes(secret)
        (folder / f"{files}.crt").write_bytes(
            self._signed(name, key.public_key()).public_bytes(pem)
        )
        (folder / "rootCA.pem").write_bytes(self.root.public_bytes(pem))
        return folder


@contextmanager
def serving(
    context: ssl.SSLContext | None, greeting: bytes = b"hello"
) -> Iterator[tuple[str, int]]:
    """A server that takes connections and greets, with TLS where there is a context."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def serve() -> None:
            try:
                plain, _ = listening.accept()
                with plain:
                    plain.settimeout(20)
                    with (
                        context.wrap_socket(plain, server_side=True) if context else plain as secure
                    ):
                        secure.sendall(greeting)
                        secure.recv(1)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()
    thread.join(20)


def trusting(kit: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit / "server.crt", kit / "server.key")
    context.load_verify_locations(kit / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("federation"), Authority()
    authority.kit(folder / "server", "server1", "server")
    authority.kit(folder / "site-1" / "startup", "site-1")
    (folder / "site-1" / "startup" / "fed_client.json").write_text(
        json.dumps({"servers": [{"service": {"target": "127.0.0.1:8002"}, "identity": "server1"}]})
    )
    Authority().kit(folder / "stranger", "site-1")
    return folder


def test_a_server_that_takes_connections_is_reached_without_a_kit() -> None:
    with serving(None) as server:
        assert f"127.0.0.1:{server[1]} takes connections (no --kit" in reach(server)


def test_server_and_site_of_one_federation_shake_hands(federation: Path) -> None:
    kit = Kit.open(federation / "site-1")
    assert (kit.server, kit.name) == (("127.0.0.1", 8002), "server1")
    with serving(trusting(federation / "server")) as server:
        said = reach(server, kit)
    assert "TLSv1" in said
    assert "certificate of server1, valid until Jan  1 00:00:00 2100" in said


def test_certificates_of_another_federation_are_told(federation: Path) -> None:
    with (
        serving(trusting(federation / "server")) as server,
        pytest.raises(InputError, match="do not trust each other"),
    ):
        reach(server, Kit.open(federation / "stranger"))


def test_a_server_that_does_not_trust_the_site_is_told(federation: Path, tmp_path: Path) -> None:
    """The site trusts the server, but brings a certificate that somebody else has signed."""
    mixed = Authority().kit(tmp_path / "mixed", "site-1")
    (mixed / "rootCA.pem").write_bytes((federation / "server" / "rootCA.pem").read_bytes())
    with serving(trusting(federation / "server")) as server, pytest.raises(InputError) as caught:
        reach(server, Kit.open(mixed))
    assert "do not trust each other" in str(caught.value) or "cannot be reached" in str(
        caught.value
    )


def test_another_server_of_the_federation_is_told(federation: Path, tmp_path: Path) -> None:
    kit = Kit(federation / "site-1" / "startup", None, "server2")
    with (
        serving(trusting(federation / "server")) as server,
        pytest.raises(InputError, match="certificate is of server1; the kit is for server2"),
    ):
        reach(server, kit)


def test_a_server_that_is_not_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        server = closed.getsockname()
    with pytest.raises(InputError, match="cannot be reached"):
        reach(server)
    with pytest.raises(InputError, match="no server"):
        reach(None)


@pytest.mark.parametrize("text", ["host", "host:", ":8002", "host:99999", "host:x", "host:0", ""])
def test_addresses_are_host_and_port(text: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        address(text)
    assert address("fl.example.org:8002") == ("fl.example.org", 8002)
    assert address("[::1]:8002") == ("::1", 8002)


def test_a_folder_without_certificates_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"with rootCA.pem, client.crt, client.key"):
        Kit.open(tmp_path)
