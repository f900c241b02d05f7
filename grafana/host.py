"""The rows of the dashboard *Node* about the host: fabric, memory, sockets, storage, the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana import ports
from grafana.board import Row, Source
from grafana.panels import BLUE, ORANGE, RED, UP, YELLOW, graph
from grafana.queries import ROWS, increase, most
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def board_rows(source: Source) -> list[Row]:
    """Return the rows about a node's host: memory, sockets, storage, the agent."""
    return [
        Row(title="InfiniBand and network", panels=ports.panels(source), closed=True),
        Row(title="Memory, CPU, kernel", panels=_kernel(source), closed=True),
        Row(title="Sockets and open files", panels=_sockets(source), closed=True),
        Row(title="Storage", panels=_storage(source), closed=True),
        Row(title="Software and the agent", panels=_agent(), closed=True),
    ]


def _kernel(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    events = "dshealthd_kernel_events_total{@node}"
    logged = increase(events, 'dshealthd_collector_up{@node,collector="kernel_log"}')
    return [
        graph(
            "Memory",
            """Memory available without swapping, shared (tmpfs and shared segments), and locked,
            against all memory that the kernel manages.""",
            ("max(dshealthd_memory_available_bytes{@node})", "available"),
            ("max(dshealthd_memory_shared_bytes{@node})", "shared"),
            ("max(dshealthd_memory_locked_bytes{@node})", "locked"),
            ("max(dshealthd_memory_total_bytes{@node})", "total"),
            unit="bytes",
            limits=["total"],
        ),
        graph(
            "Time spent waiting",
            """Share of time in which some, or all (full), tasks waited for a resource. The
            threshold is for memory, full.""",
            (
                "max by (resource, tasks) (dshealthd_pressure_stalled_ratio{@node})",
                "{{resource}} {{tasks}}",
            ),
            unit="percentunit",
            steps=((limits["memory_pressure_ratio"], ORANGE),),
            maximum=1,
        ),
        graph(
            "Load",
            """Tasks that run, want to run or sleep uninterruptibly, averaged over 5 minutes, and
            the number of CPUs.""",
            ('max(dshealthd_load_average{@node,minutes="5"})', "load"),
            ("max(dshealthd_cpus_online{@node})", "CPUs"),
            limits=["CPUs"],
        ),
        rows(
            "Kernel log",
            f"""Faults that the kernel reported since boot, and in the time shown: at most {ROWS}
            kinds and devices.""",
            [
                Column("Event", "event"),
                Column("Device", "device"),
                Column(
                    "Since boot",
                    expr=most("max", "event, device", f"{events} > 0"),
                ),
                Column(
                    "In the time shown",
                    expr=f"""round(max by (event, device) ({logged})) and on (event, device)
                    topk({ROWS}, max by (event, device) ({events} > 0))""",
                    steps=((None, BLUE), (1, ORANGE)),
                ),
            ],
            sort=("In the time shown", True),
        ),
        graph(
            "Threads and asynchronous I/O",
            """Threads of all processes and reserved asynchronous I/O requests, as shares of the
            system's limits.""",
            ("max(dshealthd_threads{@node} / dshealthd_threads_limit{@node})", "threads"),
            (
                "max(dshealthd_aio_requests{@node} / dshealthd_aio_requests_limit{@node})",
                "asynchronous I/O",
            ),
            unit="percentunit",
        ),
        graph(
            "OOM kills",
            "Processes killed by the OOM killer per hour.",
            ("max(increase(dshealthd_oom_kills_total{@node}[1h]))", "kills"),
        ),
    ]


def _sockets(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    return [
        graph(
            "TCP sockets",
            "Sockets of the agent's network namespace, by state.",
            ("max by (state) (dshealthd_tcp_sockets{@node})", "{{state}}"),
        ),
        graph(
            "Rendezvous ports",
            """Sockets that hold one of the rendezvous ports of training jobs, by state. TIME_WAIT
            holds a port for a minute.""",
            ("max by (state) (dshealthd_rendezvous_sockets{@node})", "{{state}}"),
        ),
        rows(
            "Listeners on rendezvous ports",
            """Listeners and the age of the oldest. Orphaned: the process that started the
            listener's owner is gone.""",
            [
                Column("Orphaned", "orphaned"),
                Column(
                    "Listeners", expr="max by (orphaned) (dshealthd_rendezvous_listeners{@node})"
                ),
                Column(
                    "Oldest",
                    expr="max by (orphaned) (dshealthd_rendezvous_listener_age_seconds{@node})",
                    unit="s",
                    steps=((None, BLUE), (limits["orphan_listener_seconds"], YELLOW)),
                ),
            ],
        ),
        graph(
            "TCP limits",
            """Sockets in TIME_WAIT, ephemeral ports in use, and connections that the firewall
            tracks, as shares of their limits.""",
            (
                """max(dshealthd_tcp_sockets{@node,state="time_wait"}) /
                max(dshealthd_tcp_time_wait_limit{@node})""",
                "TIME_WAIT",
            ),
            (
                """max(dshealthd_tcp_ephemeral_ports_used{@node} /
                dshealthd_tcp_ephemeral_ports{@node})""",
                "ephemeral ports",
            ),
            (
                """max(dshealthd_conntrack_entries{@node} /
                dshealthd_conntrack_entries_limit{@node})""",
                "tracked connections",
            ),
            unit="percentunit",
            steps=((limits["limit_used_ratio"], ORANGE),),
        ),
        graph(
            "Open files",
            """Open files as a share of the limit: of the system, of the process nearest to its own
            limit, and of the worst process of any job.""",
            (
                "max by (scope) (dshealthd_open_files{@node} / dshealthd_open_files_limit{@node})",
                "{{scope}}",
            ),
            unit="percentunit",
            steps=((limits["limit_used_ratio"], ORANGE),),
        ),
        graph(
            "Loopback",
            "Time the agent takes to connect to itself over 127.0.0.1.",
            ("max(dshealthd_loopback_connect_seconds{@node})", "connect"),
            unit="s",
            steps=((limits["loopback_connect_seconds"], ORANGE),),
        ),
    ]


def _storage(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    full = (
        (limits["filesystem_used_ratio"], ORANGE),
        (limits["filesystem_used_critical_ratio"], RED),
    )
    return [
        graph(
            "Space in use",
            "Share of space in use on the file systems of the configured paths.",
            (
                """1 - min by (path) (dshealthd_filesystem_free_bytes{@node} /
                dshealthd_filesystem_size_bytes{@node})""",
                "{{path}}",
            ),
            unit="percentunit",
            steps=full,
            maximum=1,
        ),
        graph(
            "Inodes in use",
            "Share of inodes in use, if the file system has a fixed number of them.",
            (
                """1 - min by (path) (dshealthd_filesystem_files_free{@node} /
                dshealthd_filesystem_files{@node})""",
                "{{path}}",
            ),
            unit="percentunit",
            steps=full,
            maximum=1,
        ),
        graph(
            "Write tests",
            """Duration of the last write test that passed: create, write 4 KiB, sync, remove. Only
            for paths with a write test.""",
            ("max by (path) (dshealthd_path_write_seconds{@node})", "{{path}}"),
            unit="s",
            steps=((limits["path_write_seconds"], ORANGE),),
        ),
        graph(
            "Disk request time",
            "Mean time of a disk's read or write, in the kernel's queue and in the disk.",
            (
                f"""topk({ROWS}, sum by (disk)
                (rate(dshealthd_disk_request_seconds_total{{@node,operation!="discard"}}
                [$__rate_interval])) / sum by (disk)
                (rate(dshealthd_disk_requests_total{{@node,operation!="discard"}}
                [$__rate_interval])))""",
                "{{disk}}",
            ),
            unit="s",
            steps=((limits["disk_request_seconds"], ORANGE),),
        ),
        graph(
            "Waiting for disks",
            "Disk requests in flight, and processes hung in the kernel.",
            (most("max", "disk", "dshealthd_disk_requests_in_flight{@node}"), "{{disk}}"),
            ("max(dshealthd_processes_stuck{@node})", "stuck processes"),
        ),
        rows(
            "Failing paths",
            "Configured paths that cannot be read or written, and why.",
            [
                Column("Path", "path"),
                Column("Reason", "reason"),
                Column(expr="max by (path, reason) (dshealthd_path_failing{@node}) == 1"),
            ],
            size=(12, 8),
        ),
    ]


def _agent() -> list[dashboard.Panel]:
    failures = increase("dshealthd_worker_failures_total{@node}", "up{@node}", "10m")
    return [
        rows(
            "Versions",
            f"""Software of the node, of configured environments, and of the jobs' environments: at
            most {4 * ROWS}.""",
            [
                Column("Component", "component"),
                Column("Version", "version"),
                Column("Environment", "environment"),
                Column("Job", "training_job"),
                Column(
                    expr=most(
                        "max",
                        "component, version, environment, training_job",
                        "dshealthd_software_info{@node}",
                        limit=4 * ROWS,
                    )
                ),
            ],
            sort=("Component", False),
            size=(12, 9),
        ),
        rows(
            "Collectors",
            """Whether the last collection succeeded, how long it took, and the time of the last
            success. Sources that this machine lacks are left out.""",
            [
                Column("Collector", "collector"),
                Column(
                    "Up",
                    expr="max by (collector) (dshealthd_collector_up{@node})",
                    states=UP,
                    width=60,
                ),
                Column(
                    "Took",
                    expr="max by (collector) (dshealthd_collector_duration_seconds{@node})",
                    unit="s",
                ),
                Column(
                    "Last success",
                    expr="""1000 * max by (collector)
                    (dshealthd_collector_last_success_timestamp_seconds{@node})""",
                    unit="dateTimeFromNow",
                ),
            ],
            sort=("Up", False),
            unknown="unknown",
            size=(12, 9),
        ),
        graph(
            "Worker failures",
            "Worker processes given up in ten minutes, by reason.",
            (
                f"sum by (worker, reason) ({failures})",
                "{{worker}} {{reason}}",
            ),
        ),
        graph(
            "Agent: CPU",
            "CPU time of the agent itself, as a share of one core; its workers are not counted.",
            ("max(rate(process_cpu_seconds_total{@node}[$__rate_interval]))", "agent"),
            unit="percentunit",
        ),
        graph(
            "Agent: memory",
            "Resident memory of the agent itself, without its workers.",
            ("max(process_resident_memory_bytes{@node})", "agent"),
            unit="bytes",
        ),
    ]
