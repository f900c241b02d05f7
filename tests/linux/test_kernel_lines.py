"""What lines of the kernel log mean; every line is in the form that its source prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.linux import kernel_lines as lines

XIDS = [
    (
        (
            "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp "
            "Exception on (GPC 7, TPC 7, SM 0)"
        ),
        "0000:cb:00.0",
        13,
    ),
    (
        (
            "NVRM: Xid (PCI:0000:66:00): 79, pid=1797828, name=pt_main_thread, GPU has fallen "
            "off the bus."
        ),
        "0000:66:00.0",
        79,
    ),
    ("NVRM: Xid (PCI:0000:66:00): 79, GPU has fallen off the bus.", "0000:66:00.0", 79),
    (
        (
            "NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 "
            "0x00000000)"
        ),
        "0009:01:00.0",
        149,
    ),
    ("NVRM: Xid (0000:03:00): 62, 10ab(2a38) 00000000 00000000", "0000:03:00.0", 62),
    ("NVRM: Xid (PCI:0000:4b:00 GPU-I:05): 31, pid=1, name=x, Ch 00000008", "0000:4b:00.0", 31),
    (
        "NVRM: Xid (PCI:0000:4b:00 GPU-I:05 GPU-CI:01): 31, pid=1, name=x, Ch 00000008",
        "0000:4b:00.0",
        31,
    ),
]

SPOOFED_XIDS = [
    # a process of that name
    "NVRM: Xid (PCI:[24117]: segfault at 0 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4",
    "NVRM: Xid (PCI:: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL)",
    "python[7]: segfault NVRM: Xid (PCI:0000:cb:00): 79, GPU has fallen off the bus.",
    " NVRM: Xid (PCI:0000:cb:00): 79, GPU has fallen off the bus.",
    r"NVRM: API mismatch: the client has the version 1\x0aNVRM: Xid (PCI:0000:cb:00): 79, x, but",
    "NVRM: Xid (PCI:0000:cb:00): none, what follows is 79,",
    "NVRM: Xid (PCI:0000:cb:00): 79 is what a program printed",
    "NVRM: Xid (PCI:zzzz:cb:00): 79, GPU has fallen off the bus.",
    "nvrm: xid (pci:0000:cb:00): 79, GPU has fallen off the bus.",
]

EVENTS = {
    "gpu_firmware_timeout": [
        "NVRM: GPU0 _kgspIsHeartbeatTimedOut: Heartbeat timed out, timeout 5200",
        "NVRM: _kgspIsHeartbeatTimedOut: Heartbeat timed out",
        "NVRM: GPU3 _kgspRpcRecvPoll: GSP RM heartbeat timed out",
        "NVRM: _kgspLogRpcTimeout: ********************************* GSP Timeout **********************************",
    ],
    "lustre_operation_failed": [
        "LustreError: 11-0: lfs-OST0003-osc-ffff8a: operation ost_write to node 10.0.0.4@o2ib failed: rc = -107",
    ],
    "oom_kill": [
        (
            "Out of memory: Killed process 4021 (python3) total-vm:81920kB, anon-rss:65536kB, "
            "UID:1000 pgtables:200kB"
        ),
        (
            "Memory cgroup out of memory: Killed process 4022 (pt_data_worker) total-vm:81920kB, "
            "anon-rss:65536kB, file-rss:0kB"
        ),
    ],
    "allocation_failure": [
        (
            "kworker/u8:2: page allocation failure: order:7, "
            "mode:0x40cc0(GFP_KERNEL|__GFP_COMP), nodemask=(null)"
        )
    ],
    "memory_error_corrected": [
        (
            "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 "
            "slot:0 page:0x12345)"
        )
    ],
    "memory_error_uncorrected": [
        (
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 "
            "slot:0 page:0x12345)"
        )
    ],
    "machine_check": [
        "mce: [Hardware Error]: CPU 15: Machine Check Exception: 5 Bank 6: bb80000000000e0b",
        "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 4: e600000000020408",
    ],
    "open_files_exhausted": ["VFS: file-max limit 1048576 reached"],
    "time_wait_overflow": ["TCP: time wait bucket table overflow"],
    "conntrack_full": ["nf_conntrack: nf_conntrack: table full, dropping packet"],
    "fork_rejected": ["cgroup: fork rejected by pids controller in /system.slice/slurmd.service"],
    "hung_task": [
        "INFO: task python3:31337 blocked for more than 120 seconds.",
        "INFO: task jbd2/nvme0n1p2-8:411 blocked in I/O wait for more than 122 seconds.",
    ],
    "soft_lockup": ["watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:31337]"],
    "hard_lockup": [
        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 17",
        "watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3",
    ],
    "kernel_panic": [
        "Kernel panic - not syncing: Fatal exception in interrupt",
        "Kernel panic - not syncing: softlockup: hung tasks",
    ],
    "rcu_stall": [
        "rcu: INFO: rcu_preempt self-detected stall on CPU",
        "rcu: INFO: rcu_sched detected stalls on CPUs/tasks:",
    ],
    "kernel_oops": [
        "Oops: 0002 [#1] PREEMPT SMP NOPTI",
        "general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
    ],
    "cpu_throttled": [
        "mce: CPU4: Package temperature above threshold, cpu clock throttled (total events = 1)"
    ],
    "io_error": [
        "I/O error, dev nvme0n1, sector 45400 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2",
        (
            "blk_update_request: critical medium error, dev sdb, sector 2048 op 0x0:(READ) flags "
            "0x0 phys_seg 1 prio class 0"
        ),
        "Buffer I/O error on dev dm-0, logical block 77, lost async page write",
    ],
    "nvme_timeout": [
        (
            "nvme nvme0: I/O tag 70 (e046) opcode 0x2 (I/O Cmd) QID 6 timeout, aborting "
            "req_op:READ(0) size:131072"
        )
    ],
    "nvme_failure": [
        "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10"
    ],
    "filesystem_error": [
        (
            "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1456: inode #2: comm python3: "
            "reading directory lblock 0"
        ),
        'XFS (nvme1n1): metadata I/O error in "xfs_imap_to_bp+0x5c" at daddr 0x40 len 32 error 5',
        "Aborting journal on device nvme0n1p1-8.",
        "EXT4-fs (dm-0): I/O error while writing superblock",
        "EXT4-fs (dm-0): previous I/O error to superblock detected",
        "JBD2: Detected IO errors while flushing file data on dm-0-8",
        "BTRFS: error (device nvme0n1p2) in btrfs_commit_transaction:2334: errno=-5 IO failure",
        "BTRFS: error (device dm-3: state EA) in cleanup_transaction:1992: errno=-5 IO failure",
        "BTRFS critical (device nvme0n1p2): corrupt leaf: root=5 block=30572544",
    ],
    "filesystem_read_only": [
        "EXT4-fs (nvme0n1p1): Remounting filesystem read-only",
        "BTRFS info (device nvme0n1p2: state E): forced readonly",
    ],
    "nvme_path_lost": [
        "block nvme0n1: no available path - failing I/O",
        "block nvme0n1: no usable path - requeuing I/O",
    ],
    "raid_disk_failed": [
        "md/raid0md127: Disk failure on nvme1n1 detected, failing array.",
        "md/raid0:md127: Disk failure on nvme1n1 detected, failing array.",
        "md/raid1:md0: Disk failure on sdb1, disabling device.",
        "md/raid:md0: Disk failure on sdb1, disabling device.",
        "md/linearmd2: Disk failure on sdc detected, failing array.",
    ],
    "nfs_state_lost": [
        "NFS: nfs4_reclaim_open_state: Lock reclaim failed!",
        "NFS: __nfs4_reclaim_open_state: Lock reclaim failed!",
        "nfs4_reclaim_open_state: Lock reclaim failed!",
        "NFS: nfs4_reclaim_open_state: unhandled error -524",
        "NFS: state manager: lease expired failed on NFSv4 server 10.0.0.5 with error 13",
    ],
    "nfs_unresponsive": [
        "nfs: server 10.0.0.5 not responding, still trying",
        "nfs: server filer not responding, timed out",
    ],
    "lustre_connection_lost": [
        (
            "Lustre: scratch-OST003a-osc-ff30: Connection to scratch-OST003a (at "
            "172.28.1.43@tcp) was lost; in progress operations will wait"
        ),
    ],
    "lustre_evicted": [
        (
            "LustreError: 167-0: scratch-OST0001-osc: This client was evicted by "
            "scratch-OST0001; in progress operations will fail."
        ),
    ],
    "link_down": [
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN",
        "mlx5_core 0000:5e:00.0 ib0: Link down",
        "ixgbe 0000:03:00.0 eth1: NIC Link is Down",
    ],
    "transmit_timeout": [
        "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out",
        "mlx5_core 0000:5e:00.0 eth0: NETDEV WATCHDOG: CPU: 3: transmit queue 3 timed out 5016 ms",
    ],
    "adapter_failure": [
        (
            "mlx5_core 0000:41:00.0: poll_health:471:(pid 0): device's health compromised - "
            "reached miss count"
        )
    ],
    "adapter_command_failed": [
        (
            "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:803:(pid 4711): CREATE_MKEY(0x200) "
            "op_mod(0x0) failed, status bad resource state(0x9), syndrome (0x305684), err(-22)"
        ),
        (
            "mlx5_core 0000:41:00.0: mlx5_cmd_check:810:(pid 4711): ACCESS_REG(0x805) op_mod(0x0) "
            "failed, status internal error(0x1), syndrome (0x15c356)"
        ),
        "infiniband efa_0: Failed to process command CREATE_QP (opcode 1) comp_status 6 err -12",
        "efa 0000:00:1d.0 efa_0: Failed to process command CREATE_AH (opcode 5) comp_status 2 err -5",
    ],
    "adapter_command_timed_out": [
        (
            "mlx5_core 0000:41:00.0: wait_func:1168:(pid 4711): ENABLE_HCA(0x104) timeout. "
            "Will cause a leak of a command resource"
        ),
    ],
    "adapter_overheated": [
        (
            "mlx5_core 0000:41:00.1: temp_warn:170:(pid 0): High temperature on sensors with bit "
            "set 0 1"
        )
    ],
    "adapter_power_insufficient": [
        (
            "mlx5_core 0000:12:00.0: mlx5_pcie_event:299:(pid 268): Detected insufficient power "
            "on the PCIe slot (27W)."
        )
    ],
    "module_error": [
        "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High Temperature"
    ],
    "module_unplugged": ["mlx5_core 0000:5c:00.0: Port module event: module 0, Cable unplugged"],
    "pcie_error_corrected": [
        (
            "pcieport 0000:00:1c.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, "
            "(Receiver ID)"
        )
    ],
    "pcie_error_uncorrected": [
        (
            "nvidia 0000:66:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), "
            "type=Transaction Layer, (Requester ID)"
        )
    ],
    "pcie_slot_down": ["pcieport 0000:64:01.0: pciehp: Slot(1-2): Link Down"],
    "iommu_fault": [
        (
            "DMAR: [DMA Write NO_PASID] Request device [5e:00.0] fault addr 0xfe000000 [fault "
            "reason 0x05] PTE Write access is not set"
        ),
        (
            "nvidia 0000:66:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0021 "
            "address=0xfe000000 flags=0x0020]"
        ),
    ],
    "pcie_containment": [
        "pcieport 0000:64:01.0: DPC: containment event, status:0x1f01 source:0x0000"
    ],
    "pcie_recovery_failed": [
        "pcieport 0000:64:01.0: AER: device recovery failed",
        "nvidia 0000:66:00.0: device recovery failed",
    ],
    "gpu_off_bus": [
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: GPU 0000:66:00.0: GPU has fallen off the bus.",
    ],
    "gpu_init_failed": [
        "NVRM: GPU 0000:66:00.0: RmInitAdapter failed! (0x62:0x40:1860)",
        "NVRM: RmInitAdapter failed! (0x26:0xffff:1290)",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).",
        "NVRM: GPU 0000:66:00.0: GPU does not have the necessary power cables connected.",
    ],
    "nvlink_detect_failed": [
        "NVRM: GPU2 knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
        "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
    ],
    "peermem_error": [
        (
            "nvidia-peermem nv_get_p2p_free_callback:139 ERROR detected invalid context, "
            "skipping further processing"
        ),
    ],
    "nccl_segfault": [
        (
            "python3[4711]: segfault at 7f12 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 "
            "in libnccl.so.2[7f7c7a000000+a000000] likely on CPU 1 (core 1, socket 0)"
        ),
        (
            "traps: pt_main_thread[4711] general protection fault ip:7f7c7ac69996 sp:7f7c12fd7c30 "
            "error:0 in libnccl.so.2.27.3[7f7c7a000000+a000000]"
        ),
    ],
    "cuda_segfault": [
        (
            "python3[4711]: segfault at 0 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 6 "
            "in libcuda.so.570.133.20[7f7c7a000000+a000000]"
        ),
    ],
    "nvidia_version_mismatch": ["NVRM: API mismatch: the client has the version 545.23.08, but"],
}

AFTER_A_NAME = [
    (
        "[99]: segfault at 0 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in libc.so.6 likely "
        "on CPU 1 (core 1, socket 0)"
    ),
    (
        " invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, "
        "oom_score_adj=0"
    ),
    (
        ": page allocation failure: order:4, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), "
        "nodemask=(null),cpuset=/,mems_allowed=0"
    ),
    " (99): drop_caches: 3",
    "[99] bad frame in rt_sigreturn frame:000000 ip:7f sp:7f orax:ffffffffffffffff",
]
"""What the kernel prints behind a process name that begins a line."""

HARMLESS = [
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT",
    "LustreError: 11-0: lfs-MDT0000-mdc-ffff8a: operation mds_getattr to node 10.0.0.4@o2ib failed: rc = -2",
    "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0",
    # A monitor asked for a register or a state that this firmware does not have.
    (
        "mlx5_core 0000:d2:00.0: mlx5_cmd_out_err:838:(pid 1441871): ACCESS_REG(0x805) op_mod(0x1) "
        "failed, status bad operation(0x2), syndrome (0x9a6171), err(-22)"
    ),
    (
        "mlx5_core 0000:41:00.0: mlx5_cmd_check:810:(pid 4711): ACCESS_REG(0x805) op_mod(0x0) "
        "failed, status bad parameter(0x3), syndrome (0x15c356)"
    ),
    (
        "mlx5_core 0000:41:00.0: mlx5_cmd_out_err:838:(pid 812): QUERY_VPORT_COUNTER(0x770) "
        "op_mod(0x0) failed, status bad parameter(0x3), syndrome (0x6231e6), err(-22)"
    ),
    "mlx5_core 0000:5e:00.0 ib0: Link up",
    (
        "EXT4-fs (vda): mounted filesystem 00000000-0000-0000-0000-000000000000 r/w without "
        "journal. Quota mode: none."
    ),
    # the floppy that virtual machines do not have
    "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    (
        "operation not supported error, dev loop0, sector 8 op 0x9:(WRITE_ZEROES) flags 0x800 "
        "phys_seg 0 prio class 2"
    ),
    "nfs: server 10.0.0.5 OK",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "INFO: task python3:12 is blocked on a mutex likely owned by task python3:13.",
    "python3[31337]: Out of memory: Killed process 1 (init)",
    'audit: type=1400 audit(1.1:2): comm="Oops: 1 [#1]" name="I/O error, dev sda, sector 1"',
    "Oops: [#1][99]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6",
    "I/O error, dev [99]: segfault at 0 ip 00007f sp 00007f error 4 in libc.so.6",
    "traps: python3[7] general protection fault ip:7f sp:7f error:0 in libtorch.so[7f+1]",
    "block nvme0n1: the capability attribute has been deprecated.",
    "BTRFS info (device nvme0n1p2): using free-space-tree",
    "pcieport 0000:64:01.0: DPC: enabled with IRQ 41",
    "nvidia-peermem nv_mem_client_init:1 registered",
    "x EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
]


@pytest.mark.parametrize(("line", "pci", "code"), XIDS)
def test_xid(line: str, pci: str, code: int) -> None:
    """An Xid is told with its GPU's address as sysfs writes it, on a MIG instance too."""
    found = lines.xid(line)
    assert found is not None
    assert (found.pci_bus_id, found.code) == (pci, code)


@pytest.mark.parametrize("line", SPOOFED_XIDS)
def test_spoofed_xid(line: str) -> None:
    """FAULT 20: what a process name or a string of a user made look like an Xid is none, and no
    other event.
    """
    assert lines.xid(line) is None
    assert lines.event(line) in {None, "allocation_failure", "nvidia_version_mismatch"}


@pytest.mark.parametrize(
    ("detail", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "gpu_reset"),
        (
            "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "node_reboot",
        ),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", "node_reboot"),
        ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", "none"),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "drain_and_reset"),
        (
            "GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)",
            "recover_imex_domain",
        ),
        (
            (
                "pid=4711, name=pt_main_thread, "
                "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
            ),
            "gpu_reset",
        ),
        (
            (
                "pid='<unknown>', name=<unknown>, "
                "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
            ),
            "node_reboot",
        ),
        (
            (
                "pid=4711, name=a, b, c, "
                "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
            ),
            "drain_and_reset",
        ),
        ("GPU recovery action changed from 0x0 (None) to 0x9 (Call Home)", "other"),
        ("something else", None),
    ],
)
def test_recovery_action(detail: str, action: str | None) -> None:
    """Xid 154 requests an action by its number; the text differs between drivers."""
    assert lines.recovery_action(lines.Xid("0000:cb:00.0", 154, detail)) == action
    assert lines.recovery_action(lines.Xid("0000:cb:00.0", 153, detail)) is None


@pytest.mark.parametrize(
    ("code", "detail", "expected"),
    [
        (
            74,
            (
                "pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, "
                "0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
            ),
            ("14", "fatal"),
        ),
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)", ("9", "fatal")),
        (149, "NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]", ("1", "fatal")),
        (145, "RLW_REMAP        Nonfatal XC1 i0 Link -1 (0x00000004 0x80000000)", ("", "nonfatal")),
        (145, "RLW_REMAP        Nonfatal XC1 i0 Link 99 (0x00000004 0x80000000)", ("", "nonfatal")),
        (
            145,
            "pid=4711, name=python, RLW_REMAP Nonfatal XC1 i0 Link 07 (0x00000004 0x80000000)",
            ("7", "nonfatal"),
        ),
        (
            149,
            "pid='<unknown>', name=<unknown>, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x025525c6)",
            ("9", "fatal"),
        ),
        (149, "pid=4711, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x025525c6)", ("9", "fatal")),
        (147, "TLW_RX/TLW_RX_PIPE0 Fatal XC0 i0 Link 03 (0x0000001 0x0)", ("3", "fatal")),
        (74, "something else", None),
        (79, "NVLink: fatal error detected on link 1(", None),
    ],
)
def test_link_error(code: int, detail: str, expected: tuple[str, str] | None) -> None:
    """NVLink errors name their link, of NVLink 4 and 5, and whether they are fatal."""
    found = lines.link_error(lines.Xid("0000:cb:00.0", code, detail))
    assert (found and (found.link, found.severity)) == expected


def test_sxid() -> None:
    """An SXid is told once, though it goes over three lines."""
    first = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)"
    assert lines.sxid(first) == lines.SXid("3", "0000:c1:00.0", 28006, "nonfatal")
    assert lines.sxid(first.replace("Non-fatal", "Fatal")) == lines.SXid(
        "3", "0000:c1:00.0", 28006, "fatal"
    )
    assert (
        lines.sxid(
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Severity 0 Engine instance 46 "
            "Sub-engine instance 00"
        )
        is None
    )
    assert (
        lines.sxid(
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Data {0x00140004, 0x00100000}"
        )
        is None
    )
    assert lines.sxid("nvidia-nvswitch3: SXid (PCI:[77]: 28006, Fatal") is None


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, examples in EVENTS.items() for line in examples]
)
def test_event(name: str, line: str) -> None:
    """Each event is recognized in the form that the kernel prints."""
    assert lines.event(line) == name


def test_every_event_has_an_example() -> None:
    """No event is without a test."""
    assert set(EVENTS) == set(lines.EVENTS)


@pytest.mark.parametrize("line", HARMLESS)
def test_no_event(line: str) -> None:
    """Harmless lines, and those that hold an event's words in another place, are no event."""
    assert lines.event(line) is None


def comm(line: str) -> str:
    """Return the longest process name that begins a line as `line` begins."""
    return line[:15]


@pytest.mark.parametrize("rest", AFTER_A_NAME)
def test_process_named_like_a_fault(rest: str) -> None:
    """FAULT 20: no process can be called so that a line that begins with its name is taken for a
    fault.
    """
    examples = [
        line
        for name, examples in EVENTS.items()
        for line in examples
        if name != "allocation_failure"
    ]
    for line in [*examples, "EDAC MC0: 1 CE ", "Oops: 0002 [#1]", *(line for line, _, _ in XIDS)]:
        assert lines.xid(comm(line) + rest) is None
        assert lines.event(comm(line) + rest) in {None, "allocation_failure"}


@given(st.text())
def test_any_line(line: str) -> None:
    """Whatever a line holds, there is an answer."""
    assert lines.xid(line) is None or line.startswith("NVRM: Xid (PCI:")
    assert lines.sxid(line) is None or line.startswith("nvidia-nvswitch")
    assert lines.event(line) in {None, *lines.EVENTS}
