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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.host import regular
from dshealthd.core.options import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dshealthd.core.options import Errors

    Wrong = Callable[[str, str], None]
    """Records a key and what is wrong with its value."""

log = logging.getLogger(__name__)

VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
OLD_VERSIONS = ("TLS10", "TLS11")
CLIENT_AUTH = {
    "": ssl.CERT_NONE,
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
UNVERIFIED_AUTH = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
"""Policies that request a certificate but accept any: Python's `ssl` always verifies it."""
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
_TYPES: Mapping[str, type] = {
    "cert_file": str,
    "key_file": str,
    "client_ca_file": str,
    "client_auth_type": str,
    "client_allowed_sans": list,
    "min_version": str,
    "max_version": str,
    "cipher_suites": list,
    "prefer_server_cipher_suites": bool,
    "curve_preferences": list,
}
_UNSUPPORTED = {
    "cert": "not supported; put the certificate into a file and name it in cert_file",
    "key": "not supported; put the key into a file and name it in key_file",
    "client_ca": "not supported; put the certificates into a file and name it in client_ca_file",
}
_WORDS = {str: "a string", list: "a list of strings", bool: "true or false"}


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

    If it is invalid, return None and add the reasons to `errors`, each at its key.
    """
    before = len(errors)

    def wrong(name: str, reason: str) -> None:
        errors.add(f"{key}.{name}", reason)

    good: dict[str, Any] = {}
    for name, value in table.items():
        if name in _UNSUPPORTED:
            wrong(name, _UNSUPPORTED[name])
        elif name not in _TYPES:
            wrong(name, unknown(str(name), _TYPES))
        elif type(value) is not _TYPES[name] or (
            isinstance(value, list) and not all(isinstance(item, str) for item in value)
        ):
            wrong(name, f"must be {_WORDS[_TYPES[name]]}")
        else:
            good[name] = value
    for name in ("cert_file", "key_file"):
        if not table.get(name):
            wrong(name, "is missing")
    table = good
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _set_versions(context, table, wrong)
    _set_suites(context, table, wrong)
    _set_curve(context, table, wrong)
    places = files(table, directory)
    _set_clients(context, table, places, wrong)
    _set_certificate(context, places, key, wrong)
    if len(errors) > before:
        return None
    return Tls(context, frozenset(_plain(name) for name in table.get("client_allowed_sans", ())))


def _plain(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except (ValueError, ArithmeticError):
        return name


def _set_versions(context: ssl.SSLContext, table: Mapping[str, Any], wrong: Wrong) -> None:
    bounds = {
        "min_version": table.get("min_version", "TLS12"),
        "max_version": table.get("max_version", "TLS13"),
    }
    for name, version in bounds.items():
        if version in OLD_VERSIONS:
            wrong(name, f"{version} is not supported: it is broken; use TLS12 or TLS13")
        elif version not in VERSIONS:
            wrong(name, f'"{version}" is not one of {", ".join(VERSIONS)}')
    if all(version in VERSIONS for version in bounds.values()):
        low, high = (VERSIONS[version] for version in bounds.values())
        if low > high:
            wrong("min_version", "is later than max_version")
        else:
            context.minimum_version, context.maximum_version = low, high


def _set_suites(context: ssl.SSLContext, table: Mapping[str, Any], wrong: Wrong) -> None:
    suites = table.get("cipher_suites") or []
    for suite in suites:
        if suite not in SUITES:
            wrong(
                "cipher_suites",
                f'"{suite}" is not supported; for TLS 1.2 there are {", ".join(sorted(SUITES))}',
            )
    if suites and all(suite in SUITES for suite in suites):
        context.set_ciphers(":".join(SUITES[suite] for suite in suites))
    if table.get("prefer_server_cipher_suites") is False:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE


def _set_curve(context: ssl.SSLContext, table: Mapping[str, Any], wrong: Wrong) -> None:
    curves = table.get("curve_preferences") or []
    if len(curves) > 1:
        wrong(
            "curve_preferences",
            "only one curve is supported; omit the key to offer the default ones",
        )
    elif curves and curves[0] not in CURVES:
        wrong("curve_preferences", f'"{curves[0]}" is not supported; there are {", ".join(CURVES)}')
    elif curves:
        context.set_ecdh_curve(CURVES[curves[0]])


def _set_clients(
    context: ssl.SSLContext, table: Mapping[str, Any], places: Mapping[str, str], wrong: Wrong
) -> None:
    policy = table.get("client_auth_type", "")
    if policy in UNVERIFIED_AUTH:
        wrong(
            "client_auth_type",
            f"{policy} is not supported: it accepts any certificate; use "
            "RequireAndVerifyClientCert or VerifyClientCertIfGiven",
        )
        return
    if policy not in CLIENT_AUTH:
        wrong(
            "client_auth_type",
            f'"{policy}" is not one of {", ".join(name for name in CLIENT_AUTH if name)}',
        )
        return
    mode = CLIENT_AUTH[policy]
    if "client_ca_file" in places and mode is ssl.CERT_NONE:
        wrong("client_ca_file", "is set, but client_auth_type requests no certificate")
    if "client_ca_file" not in places and mode is not ssl.CERT_NONE:
        wrong("client_ca_file", f"is needed for client_auth_type {policy}")
    if table.get("client_allowed_sans") is not None and mode is not ssl.CERT_REQUIRED:
        wrong("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")
    elif table.get("client_allowed_sans") == []:
        wrong("client_allowed_sans", "is empty, so that no client could connect")
    if "client_ca_file" in places and mode is not ssl.CERT_NONE:
        try:
            context.load_verify_locations(regular(places["client_ca_file"]))
        except OSError as error:
            wrong(
                "client_ca_file",
                f"{places['client_ca_file']} holds no certificate: {_reason(error)}",
            )
        context.verify_mode = mode


def _set_certificate(
    context: ssl.SSLContext, places: Mapping[str, str], key: str, wrong: Wrong
) -> None:
    if not {"cert_file", "key_file"} <= places.keys():
        return
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
