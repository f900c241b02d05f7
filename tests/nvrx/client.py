"""NVRx's side of the health check.

Its messages, called by a genuine gRPC client, and its judgement of what comes back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FIELD = descriptor_pb2.FieldDescriptorProto
ARGUMENTS = ("--no-slurm", "--group", "prolog", "epilog", "logs", "gpu")
"""What `ft_launcher` sends; 0.6.0 sends the first one alone."""


def _messages() -> tuple[type[Any], type[Any]]:
    """Return the two messages of `nvhcd.proto`, by its names, types and numbers of fields."""
    file = descriptor_pb2.FileDescriptorProto(name="nvhcd.proto", package="nvhcd", syntax="proto3")
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="args", number=1, type=FIELD.TYPE_STRING, label=FIELD.LABEL_REPEATED)
    response = file.message_type.add(name="HealthCheckResponse")
    for number, (name, kind) in enumerate(
        (
            ("success", FIELD.TYPE_BOOL),
            ("exit_code", FIELD.TYPE_INT32),
            ("output", FIELD.TYPE_STRING),
            ("error", FIELD.TYPE_STRING),
        ),
        1,
    ):
        response.field.add(name=name, number=number, type=kind, label=FIELD.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find, made = pool.FindMessageTypeByName, message_factory.GetMessageClass
    return made(find("nvhcd.HealthCheckRequest")), made(find("nvhcd.HealthCheckResponse"))


Request, Response = _messages()


@dataclass(frozen=True)
class Said:
    """What the service said."""

    response: Any = None
    error: grpc.RpcError | None = None

    @property
    def healthy(self) -> bool:
        """What `NodeHealthCheck._perform_health_check` makes of it. An error is taken as if nobody
        had been asked.
        """
        if self.error is not None:
            return True
        if not self.response.success:
            return False
        try:
            return bool(json.loads(self.response.output).get("fail_count") == 0)
        except json.JSONDecodeError:
            return False

    @property
    def status(self) -> grpc.StatusCode:
        """The status of gRPC."""
        return grpc.StatusCode.OK if self.error is None else self.error.code()


def call(channel: grpc.Channel, timeout: float = 60.0, request: Any = None) -> Said:
    """Ask over an open channel."""
    method = channel.unary_unary(
        "/nvhcd.HealthCheckService/RunHealthCheck",
        request_serializer=Request.SerializeToString if request is None else None,
        response_deserializer=Response.FromString,
    )
    try:
        return Said(
            method(Request(args=ARGUMENTS) if request is None else request, timeout=timeout)
        )
    except grpc.RpcError as error:
        return Said(error=error)


def ask(path: Path, timeout: float = 60.0) -> Said:
    """Ask as `ft_launcher` does: a channel for one call."""
    with grpc.insecure_channel(f"unix://{path}") as channel:
        return call(channel, timeout)
