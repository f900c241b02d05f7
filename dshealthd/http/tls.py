"""TLS from the exporter-toolkit's `tls_server_config`, as far as Python supports it.

A key that Python cannot honor exactly is refused by name. The names of versions, suites and curves
are those of Go's `crypto/tls`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dshealthd.core.host import regular
from dshealthd.core.options import Errors, decode, join, option

if TYPE_CHECKING:
    Wrong = Callable[[str, str], None]
    """Records a key and what is wrong with its value."""

log = logging.getLogger(__name__)

CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Policies; those that request a certificate but accept any are left out, as Python's `ssl` always
verifies it."""
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
SUITES = {
    f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{ours}"
    for key in ("ECDSA", "RSA")
    for name, ours in {
        "AES_128_CBC_SHA": "AES128-SHA",
        "AES_256_CBC_SHA": "AES256-SHA",
        "AES_128_GCM_SHA256": "AES128-GCM-SHA256",
        "AES_256_GCM_SHA384": "AES256-GCM-SHA384",
        "CHACHA20_POLY1305_SHA256": "CHACHA20-POLY1305",
    }.items()
}
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1"}
_UNSUPPORTED = {
    "cert": "not supported; put the certificate into a file and name it in cert_file",
    "key": "not supported; put the key into a file and name it in key_file",
    "client_ca": "not supported; put the certificates into a file and name it in client_ca_file",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of new connections."""

    context: ssl.SSLContext
    allowed_sans: frozenset[str]
    """Subject alternative names; a client's certificate must have one of them.

    If empty, any verified certificate is accepted.
    """

    def permits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Return whether a client with this certificate, from `getpeercert()`, may connect."""
        return not self.allowed_sans or bool(self.allowed_sans & _names(certificate or {}))

    def loosens(self, before: Tls) -> bool:
        """Return whether these settings admit clients that `before` did not."""
        return self.context.verify_mode < before.context.verify_mode or bool(
            before.allowed_sans and not self.allowed_sans
        )


def _names(certificate: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(
        str(ipaddress.ip_address(name.strip())) if kind == "IP Address" else name
        for kind, name in certificate.get("subjectAltName", ())
        if kind in {"DNS", "email", "URI", "IP Address"}
    )


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """A `tls_server_config`."""

    cert_file: str = option("", "")
    key_file: str = option("", "")
    client_ca_file: str = option("", "")
    client_auth_type: Literal[
        "", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"
    ] = option("", "")
    client_allowed_sans: tuple[str, ...] | None = option(None, "")
    min_version: Literal["TLS12", "TLS13"] = option("TLS12", "")
    max_version: Literal["TLS12", "TLS13"] = option("TLS13", "")
    cipher_suites: tuple[str, ...] = option([], "")
    prefer_server_cipher_suites: bool = option(True, "")
    curve_preferences: tuple[str, ...] = option([], "")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the keys of `tls_server_config` whose values cannot be used, and why."""
        mode, names = CLIENT_AUTH[self.client_auth_type], self.client_allowed_sans
        for name in ("cert_file", "key_file"):
            if not getattr(self, name):
                yield name, "is missing"
        if self.min_version > self.max_version:
            yield "min_version", "is later than max_version"
        for suite in set(self.cipher_suites) - SUITES.keys():
            known = ", ".join(sorted(SUITES))
            yield "cipher_suites", f'"{suite}" is not supported; for TLS 1.2 there are {known}'
        if len(self.curve_preferences) > 1:
            reason = "only one curve is supported; omit the key to offer the default ones"
            yield "curve_preferences", reason
        elif curves := set(self.curve_preferences) - CURVES.keys():
            reason = f'"{curves.pop()}" is not supported; there are {", ".join(CURVES)}'
            yield "curve_preferences", reason
        if self.client_ca_file and mode is ssl.CERT_NONE:
            yield "client_ca_file", "is set, but client_auth_type requests no certificate"
        if not self.client_ca_file and mode is not ssl.CERT_NONE:
            yield "client_ca_file", f"is needed for client_auth_type {self.client_auth_type}"
        if names is not None and mode is not ssl.CERT_REQUIRED:
            yield "client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert"
        elif names == ():
            yield "client_allowed_sans", "is empty, so that no client could connect"


def files(table: Mapping[str, Any], directory: str) -> dict[str, str]:
    """Return the paths of the files in a `tls_server_config`, by key.

    Relative paths are relative to the config's directory.
    """
    names = ("cert_file", "key_file", "client_ca_file")
    return {
        key: os.path.join(directory, table[key])
        for key in names
        if isinstance(table.get(key), str) and table[key]
    }


def build(table: Mapping[str, Any], directory: str, key: str, errors: Errors) -> Tls | None:
    """Return the TLS settings of a `tls_server_config`.

    If it is invalid, add the reasons to `errors`, each at its key: what is returned is of no use.
    """
    before = len(errors)
    for name in _UNSUPPORTED.keys() & table.keys():
        errors.add(join(key, name), _UNSUPPORTED[name])
    known = {str(name): value for name, value in table.items() if name not in _UNSUPPORTED}
    given = decode(TlsSettings, known, key, errors)
    if len(errors) > before:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[given.min_version]
    context.maximum_version = VERSIONS[given.max_version]
    if given.cipher_suites:
        context.set_ciphers(":".join(SUITES[suite] for suite in given.cipher_suites))
    if not given.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    for curve in given.curve_preferences:
        context.set_ecdh_curve(CURVES[curve])

    def wrong(name: str, reason: str) -> None:
        errors.add(join(key, name), reason)

    places = files(table, directory)
    if "client_ca_file" in places:
        try:
            context.load_verify_locations(regular(places["client_ca_file"]))
        except OSError as error:
            place = places["client_ca_file"]
            wrong("client_ca_file", f"{place} holds no certificate: {_reason(error)}")
        context.verify_mode = CLIENT_AUTH[given.client_auth_type]
    _set_certificate(context, places, key, wrong)
    return Tls(context, frozenset(map(_plain, given.client_allowed_sans or ())))


def _plain(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except (ValueError, ArithmeticError):
        return name


def _set_certificate(
    context: ssl.SSLContext, places: Mapping[str, str], key: str, wrong: Wrong
) -> None:
    for name in ("cert_file", "key_file"):
        if not os.access(places[name], os.R_OK) or not os.path.isfile(places[name]):
            wrong(name, f"{places[name]} cannot be read")
            return
    try:
        # Checked separately, so that an error names the file: load_cert_chain does not say which of
        # the two is invalid.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(places["cert_file"])
    except OSError as error:  # ssl's errors are OSErrors, too
        wrong("cert_file", f"{places['cert_file']} holds no certificate: {_reason(error)}")
        return
    mode = os.stat(places["key_file"]).st_mode
    if mode & stat.S_IROTH:
        log.warning(
            "%s.key_file: %s can be read by every user of this node (mode %03o)",
            key,
            places["key_file"],
            stat.S_IMODE(mode),
        )
    try:
        context.load_cert_chain(places["cert_file"], places["key_file"], password=lambda: "")
    except OSError as error:
        wrong(
            "key_file",
            f"{places['key_file']} is not the key of {places['cert_file']}, or is encrypted: "
            f"{_reason(error)}",
        )


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)
