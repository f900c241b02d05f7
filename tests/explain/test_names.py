"""Which rank, host and pod an answer names: what the text says of them, wherever it says it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from dshealthd.explain.names import numbers
from tests.explain.explaining import explained, explained_files
from tests.explain.test_facts_of_several_lines import summary

XID = "[Mon Jan  5 10:00:00 2026] NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the bus."
OOM = "RuntimeError: CUDA error: out of memory"
SUMMARY = summary("gpu-6", 11, pid=100)
COMM = "ncclCommInitRankConfig comm 0x5e rank {} nranks 16 cudaDev 6 nvmlDev 6 busId {} commId 0x9"


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[launch] local_rank=6 pid=4711 gpu=0000:dc:00.0 NVIDIA B200", 6),
        ("[launch] local_rank=6 pid=4711 gpu=0000:1b:00.0 NVIDIA B200", None),
        ("gpu-7:4711:4712 [6] NCCL INFO " + COMM.format(14, "dc000"), 14),
        ("gpu-7:4711:4712 [6] NCCL INFO " + COMM.format(14, "1b000"), None),
        ("rank 14, local 6, pid 4711, device 0000:dc:00.0", 14),
    ],
)
def test_a_gpu_has_the_rank_that_a_line_puts_beside_its_address(
    line: str, rank: int | None
) -> None:
    """A table of the launcher, or NCCL's own line; the number of a device alone is no rank."""
    finding = explained("gpu-7: a job begins", line, XID)
    assert (finding.slug, finding.ranks) == ("gpu-lost", () if rank is None else (rank,))


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("| distributed init (rank 3, local 3, world 8, node gpu-12)", "gpu-12"),
        ("[train] world=8 rank=3 local_rank=3 host=gpu-12", "gpu-12"),
        ("process rank 3 on node gpu-12 is ready", "gpu-12"),
        ("srun: error: gpu-12: tasks 0,2-5,7: Killed", "gpu-12"),
        ("gpu-12:77:78 [3] NCCL INFO " + COMM.format(3, "dc000"), "gpu-12"),
        ("process rank 3 lost its peer on node gpu-12", None),
        ("process rank 3 cannot reach host gpu-12", None),
        ("| distributed init (rank 4, local 4, world 8, node gpu-12)", None),
    ],
)
def test_a_rank_is_on_the_host_that_a_line_puts_beside_it(line: str, host: str | None) -> None:
    """In a row of names and values, or in srun's list of tasks; not in a sentence about a peer."""
    finding = explained(line, "[rank3]: " + OOM)
    assert (finding.ranks, finding.host) == ((3,), host)


@pytest.mark.parametrize(("rank", "ranks"), [(1, (1,)), (9, ())])
def test_a_task_of_srun_is_a_rank_unless_its_lines_have_others(
    rank: int, ranks: tuple[int, ...]
) -> None:
    """Each task may be the launcher of a node."""
    lines = [f"{task}: [rank{one}]: up" for task, one in ((0, 0), (1, rank))]
    assert explained(*lines, "1: ValueError: a wrong label").ranks == ranks


def test_a_rank_that_two_hosts_had_has_none() -> None:
    """It was started again elsewhere, and nothing says which of the two failed."""
    lines = [f"| distributed init (rank 3, local 3, world 8, node gpu-{n})" for n in (12, 13)]
    assert explained(*lines, "[rank3]: " + OOM).host is None


KNOWN = "gpu-12:77:78 [3] NCCL INFO Bootstrap : Using eth0:192.0.2.3<0>"
OTHER = "gpu-13:77:78 [3] NCCL INFO Bootstrap : Using eth0:192.0.2.4<0>"
FAULT = "EXT4-fs error (device nvme0n1): ext4_find_entry:1455: inode #2: comm python: reading"


@pytest.mark.parametrize(
    ("above", "host"),
    [
        ("## gpu-12", "gpu-12"),
        ("==== gpu-12 ====", "gpu-12"),
        ("==> node gpu-12 (rank 1) ==>", "gpu-12"),
        ("==> /logs/dmesg.gpu-12.txt <==", "gpu-12"),
        ("==> /logs/dmesg.gpu-14.txt <==", None),
        ("gpu-12:", "gpu-12"),
        ("[ops@login ~]$ ssh gpu-12 'dmesg | tail'", "gpu-12"),
        ("root@gpu-12:/# dmesg | tail", "gpu-12"),
        ("fatal: [gpu-12]: FAILED! => {", "gpu-12"),
        ("gpu-12 | CHANGED | rc=0 >>", "gpu-12"),
        ("## gpu-12 and gpu-13", None),
        ("## gpu-12 / gpu-19", None),  # of which nothing else is known
        ("## gpu-14", None),
        ("## after the run", None),
        ("## gpu-12".ljust(199, "."), "gpu-12"),
        ("## gpu-12".ljust(200, "."), None),
        ("[ops@login ~]$ torchrun --master_addr gpu-12 train.py", None),
        ("the job on gpu-12 began", None),
    ],
)
def test_a_part_of_a_text_is_of_the_host_over_it(above: str, host: str | None) -> None:
    """If other lines know that host, or the tool prints nothing else there."""
    finding = explained(KNOWN, OTHER, "## before", "the table:", above, FAULT)
    assert (finding.outcome, finding.host) == ("found", host)


@pytest.mark.parametrize(
    ("prompt", "host"),
    [
        ("[gpu-12] $ dmesg -T | tail -2", "gpu-12"),
        ("ops@gpu-12:~$ sudo dmesg", "gpu-12"),
        ("[root@gpu-12 ~]# journalctl -k", "gpu-12"),
        ("[root@gpu-12 ~]# cat kernel.log", None),
        ("[admin] $ dmesg", None),
        ("[gpu-12] # dmesg", None),  # a comment
        ("root@7c1f0e9a2b3d:/# dmesg", None),  # a container's number
    ],
)
def test_the_kernel_that_is_asked_is_that_of_the_prompt(prompt: str, host: str | None) -> None:
    """Whether or not another line knows that host; other commands may show any host's."""
    assert explained("the table:", prompt, FAULT).host == host


@pytest.mark.parametrize(
    ("end", "host"),
    [
        ("pdsh@mgr: ml-b: ssh exited with exit code 1", "ml-b"),
        ("pdsh@mgr: ml-c: mcmd: connect failed: Connection timed out", None),
        ("pdsh@mgr: caught a signal", None),
    ],
)
def test_pdsh_says_which_word_is_a_host(end: str, host: str | None) -> None:
    """A name without a number may be any word, unless it stands where only a host can."""
    lines = ("ml-a: [rank0]: step 1", f"ml-b: [rank3]: {OOM}", end)
    for said in (lines, [json.dumps({"log": f"{line}\n"}) for line in lines]):
        finding = explained(*said)
        assert (finding.ranks, finding.host) == ((3,), host)


def test_the_next_heading_ends_a_part() -> None:
    """Whoever it names: what follows it is no longer of the first host."""
    assert explained(KNOWN, OTHER, "## gpu-12", "up 3 days", "## the job", FAULT).host is None


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("mlx5_0", "mlx5_0"), ("mlx4_0", "mlx4_0"), ("mlx5_bond_0", "mlx5_bond_0"),
        ("bnxt_re3", "bnxt_re3"), ("irdma1", "irdma1"), ("ionic_0:1", "ionic_0:1"),
        ("rocep24s0", "rocep24s0"), ("ibp24s0f1", "ibp24s0f1"), ("rdmap16s27", "rdmap16s27"),
        ("roceP1p24s0f1v2:1", "roceP1p24s0f1v2:1"), ("ibs5", "ibs5"), ("opao3", "opao3"),
        ("rocex525400c0fe123455", "rocex525400c0fe123455"),
        ("ibsen1", None), ("ribs5", None), ("ibp24s0.local", None), ("iwonder", None),
    ],
)  # fmt: skip
def test_an_rdma_device_is_known_by_the_kernel_s_name_and_by_rdma_core_s(
    name: str, device: str | None
) -> None:
    """rdma-core renames devices by slot, bus, board or GUID; NCCL says of any that it is one."""
    finding = explained(f"gpu1:7:9 [0] NCCL WARN NET/IB : Got async event : port error, {name}")
    assert finding.device == device
    completion = "NET/IB : Got completion from peer 10.0.0.7<4> with error 12, opcode 0"
    assert explained(f"gpu1:7:9 [0] NCCL WARN {completion} hca mlx5_ib0").device == "mlx5_ib0"


@pytest.mark.parametrize(
    ("seat", "ranks"),
    [
        ("- (ip=10.0.0.{}, pid=512{}) world_rank={}, local_rank=0, node_rank=1", (2,)),
        ("- (node_id=ab1, ip=10.0.0.{}, pid=512{}) world_rank={}, local_rank=0", (2,)),
        ("started: local_rank=0 pid=512{1} host=10.0.0.{0}", ()),
    ],
)
def test_a_process_has_its_rank_in_the_job_not_within_its_node(
    seat: str, ranks: tuple[int, ...]
) -> None:
    """Ray Train lists both; of local ranks on two hosts alone, the rank in the job is unknown."""
    finding = explained(
        *(f"(TrainController pid=77) {seat.format(n, n, n)}" for n in (0, 2)),
        "(RayTrainWorker pid=5122, ip=10.0.0.2) ValueError: no labels",
    )
    assert (finding.host, finding.ranks) == ("10.0.0.2", ranks)


EVENT = "  Warning  Failed  13m  kubelet  Error: write /var/lib/kubelet/x: no space left on device"
TABLE = (
    "NAME             READY   STATUS              RESTARTS   AGE   IP           NODE     NOMINATED",
    "sft-worker-0     1/1     Running             0          16m   10.2.9.12    gpu-12   <none>",
    "sft-worker-1     0/1     RunContainerError   7 (42s ago)   16m   10.2.4.77    gpu-8    <none>",
)


@pytest.mark.parametrize(
    "lines",
    [
        TABLE,
        ("  Normal  Scheduled  16m  scheduler  Successfully assigned ml/sft-worker-1 to gpu-8",),
    ],
)  # fmt: skip
def test_a_pod_is_on_the_node_that_kubernetes_says(lines: tuple[str, ...]) -> None:
    """The wide table of pods and the scheduler's event say it; the command names the pod."""
    finding = explained(*lines, "$ kubectl describe pod -n ml sft-worker-1 | tail -3", EVENT)
    assert (finding.host, finding.pod) == ("gpu-8", "sft-worker-1")
    assert explained(*lines, "$ kubectl describe pod -n ml sft-worker-7", EVENT).host is None


def test_a_record_in_json_has_a_rank() -> None:
    """A key of its own says it, as others say time and host."""
    record = {"ts": "2026-01-05T10:00:00Z", "host": "gpu-7", "rank": 5, "msg": OOM}
    finding = explained(json.dumps(record))
    assert (finding.ranks, finding.host) == ((5,), "gpu-7")
    assert explained(json.dumps({**record, "rank": "all"})).ranks == ()
    own = json.dumps({"level": "error", "rank": record["rank"], "msg": OOM})
    finding = explained(json.dumps({"labels": {"node": "gpu-7"}, "ts": record["ts"], "line": own}))
    assert (finding.ranks, finding.host) == ((5,), "gpu-7")
    labels = {"host": record.pop("host"), "rank": str(record.pop("rank"))}
    finding = explained(json.dumps({**record, "labels": labels}))
    assert (finding.ranks, finding.host) == ((5,), "gpu-7")


@pytest.mark.parametrize(("group", "host"), [("0(default_pg)", "gpu-1"), ("5(tp)", None)])
def test_a_rank_that_others_wait_for_is_on_its_own_host(group: str, host: str | None) -> None:
    """Not on that of a rank that reports it, even if no prefix says which rank that is."""
    hung = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
        "NumelIn=1, NumelOut=1, Timeout(ms)=6000) ran for 6089 milliseconds before timing out."
    )
    last = "{} PG status: last enqueued work: {}, last completed work: 6"
    said = [(rank, hung) for rank in range(3)]
    said += [(0, last.format("failure detected by watchdog at work sequence id: 7", 8))]
    said += [(3, last.format("Observed flight recorder dump signal from another rank.", 6))]
    lines = [f"gpu-{rank // 2} | [PG ID 0 PG GUID {group} Rank {rank}] {line}"
             for rank, line in said]  # fmt: skip
    assert explained(*(f"gpu-{rank // 2} | WORLD_SIZE=4" for rank in range(4)), *lines).host == host


def test_the_labels_of_a_collector_say_where_a_line_is_from() -> None:
    """Loki puts them before each line; a pod is on the node that other lines say."""
    label = '2026-01-05T10:00:00Z {{container="trainer", {}}} [rank3]: ' + OOM
    assert explained(label.format('host="gpu-7"')).host == "gpu-7"
    on = "Normal  Scheduled  9m  default-scheduler  Successfully assigned ml/vit-1 to gpu-8"
    finding = explained(label.format('pod="vit-1"'), on)
    assert (finding.host, finding.pod) == ("gpu-8", "vit-1")
    finding = explained(label.format('pod="vit-1"'))
    assert (finding.host, finding.pod, finding.excluded) == (None, "vit-1", ())


@pytest.mark.parametrize(
    ("prefix", "host", "pod"),
    [
        ("sft-worker-1 pytorch ", "gpu-8", "sft-worker-1"),
        ("sft-worker-7 pytorch ", None, None),
        ("[pod/sft-worker-1/pytorch] ", "gpu-8", "sft-worker-1"),
        ("[train-12:117] ", None, None),
    ],
)
def test_what_stands_before_a_line_is_a_pod_or_a_host(
    prefix: str, host: str | None, pod: str | None
) -> None:
    """Stern and kubectl say it; a file and its line are none."""
    finding = explained(TABLE[-1].replace("RunContainerError", "Running"), prefix + OOM)
    assert (finding.host, finding.pod) == (host, pod)


def test_fluent_bit_says_host_and_pod_in_an_object_of_its_own() -> None:
    """Beside the line, under `kubernetes`."""
    record = {"log": OOM, "time": "2026-01-05T10:00:00Z", "kubernetes": {"host": "gpu-8"}}
    assert explained(json.dumps(record)).host == "gpu-8"


def test_ranks_that_a_launcher_saw_fail_may_each_have_printed_what_came_twice() -> None:
    """An exception without a rank is that of the first one only if it came once."""
    error = "ValueError: matrix contains invalid numeric entries"
    summary = ["Failures:"]
    for rank in (1, 0):
        summary += ["Root Cause (first observed failure):"] * (not rank)
        summary += [f"[{rank}]:", f"  time : 2026-01-05_10:00:0{rank}"]
        summary += [f"  rank : {rank} (local_rank: {rank})", f"  exitcode : 1 (pid: 7{rank})"]
    summary.append("=" * 60)
    assert explained(error, *summary).ranks == (0,)
    assert explained(error, error, *summary).ranks == ()


def test_a_rank_within_a_node_is_none_where_several_nodes_have_some() -> None:
    """Nothing says where the first rank of each node is."""
    ready = "[default{}]: up"
    one = ("gpu-1: " + ready.format(0), "gpu-1: [default1]:" + OOM)
    assert explained(*one).ranks == explained("world_size=16", *one).ranks == (1,)
    assert explained("world_size=17", *one).ranks == ()
    hosts = [f"gpu-{number}: {ready.format(0)}" for number in (1, 2, 1, 2)]
    assert explained(*hosts, "gpu-2: [default1]:" + OOM).ranks == ()


@pytest.mark.parametrize(
    ("beside", "elsewhere", "ranks"),
    [
        ([line for line in SUMMARY if "host" not in line], (), (13,)),
        ((), SUMMARY, (13,)),  # by its host
        (("rank=8 local_rank=0 pid=4",), (), (13,)),
        ((), ("rank=8 local_rank=0 host=gpu-6",), (13,)),
        ((), [f"rank={rank} local_rank=0 pid={rank}" for rank in (8, 0)], ()),  # of any host
        ((), ("rank=0 local_rank=0 pid=4",), (5,)),
        (
            ("rank=8 local_rank=0 pid=4",),
            [f"rank={rank} local_rank=0 host=gpu-6" for rank in (8, 0)],
            (),
        ),
    ],
)
def test_a_rank_within_a_node_is_counted_from_the_first_of_the_node(
    beside: Sequence[str], elsewhere: Sequence[str], ranks: tuple[int, ...]
) -> None:
    """As a launcher's summary or another line says it, of this log or of this host."""
    chatter = [f"gpu-{number}: up" for number in (5, 6)] * 3
    lines = [*chatter, f"gpu-6: [default5]:{OOM}", *beside]
    assert explained_files({"a.log": lines, "b.log": elsewhere}).ranks == ranks


def test_only_ranks_with_the_same_words_fail_alike() -> None:
    """The last of two exceptions that no pattern knows may follow from the first."""
    first, last = "[rank{}]: ValueError: no shard {}", "[rank{}]: RuntimeError: a thread failed"
    world = "world_size=8"
    assert explained(world, first.format(5, 7), last.format(2)).ranks == (5,)
    assert explained(world, first.format(5, 7), first.format(2, 8)).ranks == (2, 5)
    seats = [f"process rank {rank} on node gpu-{rank} is ready" for rank in (2, 5)]
    assert explained(world, *seats, first.format(5, 7), first.format(2, 8)).host is None


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        ({0: "gpu-1", 1: "gpu-1", 2: "gpu-1", 3: "gpu-1", 4: "gpu-2"}, (1, 2, 3)),
        ({0: "gpu-1", 1: "gpu-1", 2: "gpu-1", 3: "gpu-1"}, ()),
        ({0: "gpu-1", 1: "gpu-1", 2: "gpu-2", 3: "gpu-3"}, ()),
        ({}, ()),
    ],
)
def test_three_ranks_that_fail_alike_are_to_blame_only_if_they_share_a_host(
    hosts: dict[int, str], ranks: tuple[int, ...]
) -> None:
    """And others are elsewhere: else the code, the data or a service fails on all."""
    lines = [f"process rank {rank} on node {host} is ready" for rank, host in hosts.items()]
    errors = [f"[rank{rank}]: ValueError: no shard {rank}" for rank in (1, 2, 3)]
    finding = explained("world_size=8", "[rank0]: up", *lines, *errors)
    assert (finding.ranks, finding.slug) == (ranks, "child-failed")


def test_what_failed_on_a_host_is_shown_by_its_first_rank_that_failed() -> None:
    """A killed process of a pod, or a lost file system, has no rank of its own."""
    lines = [f"process rank {rank} on node gpu-{rank // 4} is ready" for rank in range(8)]
    errors = [f"[rank{rank}]: OSError: [Errno 107] not connected: '/d'" for rank in (2, 6)]
    killed = "Jan  5 10:00:00 gpu-1 kernel: Memory cgroup out of memory: Killed process 4711 (fuse)"
    finding = explained(*lines, *errors, killed + " total-vm:9kB, anon-rss:8123kB, file-rss:0kB")
    assert (finding.slug, finding.host, finding.ranks) == ("host-memory-pressure", "gpu-1", (6,))


def test_who_only_lost_a_peer_is_not_the_host_of_the_cause() -> None:
    """Neither by its own line nor by its launcher's report of what followed."""
    lost = "gpu-1:77:90 [0] NCCL WARN socketProgress: Connection closed by remote peer gpu-2<51234>"
    finding = explained(lost)
    assert (finding.outcome, finding.host) == ("undecided", None)
    finding = explained(
        "W0505 15:40:10.1 7711 torch/distributed/elastic/multiprocessing/api.py:897] a node begins",
        "[W505 15:40:11.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4, "
        "addr=[gpu-1]:40112, remote=[gpu-2]:29500): failed to recv, got 0 bytes",
        "srun: error: gpu-1: task 1: Exited with exit code 1",
    )
    assert (finding.outcome, finding.host) == ("undecided", None)


def test_the_host_whose_key_has_changed_is_named() -> None:
    """OpenSSH says it in the line before the one that fails."""
    finding = explained(
        "Host key for gpu-3 has changed and you have requested strict checking.",
        "Host key verification failed.",
    )
    assert (finding.host, finding.statement.partition(":")[0]) == ("gpu-3", "SSH to gpu-3 failed")


def test_what_was_skipped_may_have_had_another_heading(tmp_path: object) -> None:
    """A heading counts up to the lines that were not examined."""
    from pathlib import Path

    from tests.explain.explaining import explained_text

    chatter = "".join(f"step {n} | lr 0.1\n" for n in range(20000))
    text = f"{KNOWN}\n{OTHER}\n## gpu-12\n{{}}{FAULT}\n"
    folder = Path(str(tmp_path))
    assert explained_text(folder, text.format("")).host == "gpu-12"
    assert explained_text(folder, text.format(chatter)).host is None


def test_a_pid_has_the_rank_that_another_file_gives_it() -> None:
    """DeepSpeed's launcher lists its processes, the kernel names the one that it killed."""
    spawned = "process 4711 spawned with command: ['/u/python', '-u', 't.py', '--local_rank=2']"
    killed = (
        "Jan  5 10:00:00 gpu-1 kernel: Memory cgroup out of memory: Killed process 4711 (python)"
    )
    kernel = killed + " total-vm:9kB, anon-rss:8123kB, file-rss:0kB"
    finding = explained_files({"job.out": [spawned], "kern.log": [kernel]})
    assert (finding.ranks, finding.host) == ((2,), "gpu-1")


LISTS = (
    "[launch] node gpu-12 rank 0-7 | gpu-13 rank 8-15",
    "[launch] global_rank_mapping={'gpu-12': [6, 7, 8], 'gpu-13': [9, 10, 11]}",
    "[launch] GPUs of no rank={'gpu-12': [8, 9, 10], 'gpu-13': [8, 9, 10]}",
    "[launch] node gpu-13 rank 8-15",
)


@pytest.mark.parametrize(
    ("line", "host"),
    list(zip(LISTS, ("gpu-13", "gpu-13", None, None), strict=True)),
)
def test_a_launcher_lists_hosts_and_their_ranks(line: str, host: str | None) -> None:
    """Two hosts at least, and no rank on two of them: else the numbers are others."""
    assert explained(line, "[rank9]: " + OOM).host == host


def test_a_process_has_the_rank_of_its_place_in_a_list() -> None:
    """A launcher numbers the processes of a node; another one says which ranks these are."""
    finding = explained(
        "gpu-13: [launch] ranks: {'gpu-12': [0, 1, 2, 3], 'gpu-13': [4, 5, 6, 7]}",
        "gpu-13: process 7711 spawned with ['train.py', '--local_rank=1']",
        "gpu-12: step 1",
        "gpu-12: step 2",
        "gpu-12: [rank2]: RuntimeError: the loader stopped",
        "gpu-13$ dmesg",
        "[Mon Jan  5 10:00:00 2026] EDAC MC4: 1 UE memory read error on DIMM#0 (page:0x5d rank:0)",
        "[Mon Jan  5 10:00:00 2026] Memory failure: 0x5d: Sending SIGBUS to python3:7711 due to "
        "hardware memory corruption",
    )
    assert (finding.ranks, finding.host) == ((5,), "gpu-13")


@pytest.mark.parametrize(
    ("name", "ranks"), [("out/worker_5.log", (5,)), ("out/worker_6.log", ()), ("worker_5.log", ())]
)
def test_a_log_is_of_the_rank_that_a_launcher_gave_it(name: str, ranks: tuple[int, ...]) -> None:
    """Any number may stand in the name of a file."""
    finding = explained(
        "Start worker with rank id:5, log file:out/worker_5.log. RANK_ID=5 is exported.",
        f"==> {name} <==",
        "RuntimeError: the image cannot be read",
    )
    assert finding.ranks == ranks


def test_an_exception_that_ranks_pass_on_is_of_the_rank_that_it_names() -> None:
    """Whoever else prints it; none is named if all are."""
    full = "[rank{}]: OSError: [Errno 28] No space left on device"
    passed = "[rank0]: SaveError: SaveError ranks:dict_keys([{}])"
    lines = ["WORLD_SIZE=8", *(full.format(rank) for rank in (0, 2, 6))]
    assert explained(*lines).ranks == ()
    assert explained(*lines, passed.format("6")).ranks == ()
    assert explained(*lines, passed.format("0, 6")).ranks == (0, 6)
    assert explained(lines[3], lines[1], passed.format("6")).ranks == (6,)
    assert explained(*lines, passed.format("0, 1, 2, 3, 4, 5, 6, 7")).ranks == ()


def test_who_is_known_of_those_that_say_the_same_is_not_all_of_them() -> None:
    """One process has a rank and the other has none: both ranks of the host failed next."""
    none = "gpu-1:9{0}:9{0} [{0}] x.c:7 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data"
    error = (
        "[rank{}]: torch.distributed.DistBackendError: NCCL error in: a.cpp:9, {}, NCCL version 2"
    )
    finding = explained(
        *(f"rank={rank} local_rank={rank % 2} host=gpu-{rank // 2}" for rank in range(4)),
        "rank=2 local_rank=0 pid=90 host=gpu-1",
        *map(none.format, (1, 0)),
        *(error.format(rank, "invalid usage (run with NCCL_DEBUG=WARN)") for rank in (2, 3)),
        error.format(0, "remote process exited or there was a network error"),
    )
    assert (finding.ranks, finding.host) == ((2, 3), "gpu-1")


GONE = "Oct  2 18:02:11 gpu-13 kernel: NVRM: Xid (PCI:0000:dc:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        (("gpu-12: [rank1]: ncclRemoteError: Connection closed by remote peer",), (8, 11)),
        (("gpu-13: [rank9]: step 1",), (8, 11)),
        ((), ()),
    ],
)
def test_what_failed_on_a_host_struck_the_ranks_that_failed_there(
    others: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    """None of them alone where these are all ranks."""
    lines = [f"gpu-13: [rank{rank}]: RuntimeError: no device {rank}" for rank in (8, 11)]
    before = [f"gpu-{n}: a line of the launcher" for n in (12, 13, 12, 13)]
    finding = explained(*before, *others, *lines, "$ ssh gpu-13 journalctl -k", GONE)
    assert (finding.ranks, finding.host) == (ranks, "gpu-13")


BROKEN = (
    "kernel: NVRM: Xid (PCI:0000:61:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error "
    "detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
)
STOPPED = "kernel: NVRM: Xid (PCI:0000:61:00): 45, pid=4713, name=python3, Ch 0000001b"


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        ((STOPPED,), (3,)),
        (
            ("trainer: [rank3]: RuntimeError: CUDA error: uncorrectable NVLink error detected",),
            (3,),
        ),
        ((), (0, 2)),
    ],
)
def test_a_fault_of_a_host_struck_no_rank_that_only_followed(
    lines: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    """Neither where the kernel names the process of one, nor where one failed of its own."""
    seats = [f"trainer: [rank{rank}] pid={4710 + rank} local_rank={rank} up" for rank in range(6)]
    failed = (
        "trainer: [rank{}]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, "
    )
    failed += "unhandled cuda error, NCCL version 2.26.2"
    said = (*seats, BROKEN, *lines, *(failed.format(rank) for rank in (0, 2)))
    finding = explained(*(f"Oct  2 18:02:11 gpu-13 {one}" for one in said))
    assert (finding.slug, finding.host, finding.ranks) == ("bad-link", "gpu-13", ranks)


@pytest.mark.parametrize(
    ("form", "host"),
    [
        ("2026-01-05T10:00:00.1Z | {} | {}", "job-pod-1"),
        ("{} train > {}", "job-pod-1"),
        ("{} trainer {}", "job-pod-1"),
        ("[{}] {}", "job-pod-1"),
        ("[{}][rank3] {}", "job-pod-1"),
        ("[{}][dmesg] [ 1377.930310] {}", "job-pod-1"),
        ("[rank{:.0s}3] {}", None),
    ],
)
def test_a_collector_puts_a_pod_before_each_line(form: str, host: str | None) -> None:
    """Two of them at least: a single name may be the program's."""
    said = [("job-pod-0", "step 1"), ("job-pod-1", "step 1")] * 3
    said += [("job-pod-1", "ValueError: a wrong label")]
    assert explained(*(form.format(pod, text) for pod, text in said)).host == host
    assert explained(*(form.format("job-pod-1", text) for _, text in said)).host is None


@pytest.mark.parametrize("form", ["a-job/train/{} {}", "2026-01-05T10:00:00Z train@{}: {}"])
@pytest.mark.parametrize(("says", "is_host"), [("node=gpu-13", True), ("up", False)])
def test_a_stream_s_last_part_is_a_host_that_lines_name(
    form: str, says: str, *, is_host: bool
) -> None:
    """Elsewhere, too: the path may as well be that of a file."""
    said = [("gpu-12", "loads"), ("gpu-13", says)] * 4 + [("gpu-13", "ValueError: a wrong label")]
    finding = explained(*(form.format(*one) for one in said))
    assert finding.host == ("gpu-13" if is_host else None)


@pytest.mark.parametrize(
    ("form", "ranks", "host"),
    [
        ("2026-01-05 10:00:00,500 gpu-{0} r{1:02d} {2}", (11,), "gpu-13"),
        ("gpu-{0} r{1} {2}", (11,), "gpu-13"),
        ("r{1} {2}", (), None),  # a round, a replica, a request
        ("gpu-{}/rank{}  | {}", (11,), "gpu-13"),
        ("\x1b[32m10:08:43\x1b[0m gpu-{} [rank {}]  > {}", (11,), "gpu-13"),
        ("gpu-{}/rank{}          | {}", (), None),
        ("[rank {1}|gpu-{0}] {2}", (11,), "gpu-13"),
        ("(gpu-{}, rank {}) {}", (11,), "gpu-13"),
        ("I0105 10:00:00.123 99 x.py:3] [rank {1} on gpu-{0}] {2}", (11,), "gpu-13"),
        ("[rank {1}|epoch{0}] {2}", (11,), None),
        ("gpu-{} rank{} {}", (11,), "gpu-13"),
        ("2026-01-05 10:00:00,500 - rank{1} - INFO - {2}", (11,), None),
        ("[W{1}] {2}", (), None),  # a worker, a warning
        ("[GPU{1}] {2}", (), None),
    ],
)
def test_a_rank_of_one_letter_is_one_beside_a_host(
    form: str, ranks: tuple[int, ...], host: str | None
) -> None:
    """In a column of hosts, each of which has several."""
    seats = [(12, 3), (12, 7), (13, 9), (13, 11)] * 2
    said = [(*seat, "INFO step 1 loss 2.1") for seat in seats] + [(13, 11, OOM)]
    finding = explained(*(form.format(*one) for one in said))
    assert (finding.ranks, finding.host) == (ranks, host)


@pytest.mark.parametrize(
    ("world", "pods", "ranks"),
    [(3, 3, (2,)), (6, 3, ()), (3, 2, ())],  # three more ranks may be anywhere
)
def test_the_only_rank_of_a_host_is_that_of_all_its_lines(
    world: int, pods: int, ranks: tuple[int, ...]
) -> None:
    """If each of all ranks has a host of its own, as JAX's processes have."""
    said = [(rank % pods, f"process_index={rank} process_count={world}") for rank in range(3)]
    said += [(pod, "loads the data") for pod in range(pods)] * 2
    said += [(2 % pods, "ValueError: a wrong label")]
    finding = explained(*(f"job-pod-{pod} train {text}" for pod, text in said))
    assert (finding.ranks, finding.host) == (ranks, f"job-pod-{2 % pods}")


def test_a_pod_is_known_by_its_host_name_too() -> None:
    """Kubernetes appends five characters to it where a job makes pods."""
    pod = "Successfully assigned ml/trainer-0-x7k2m to gpu-12"
    lines = ("trainer-0:77:78 [3] NCCL INFO " + COMM.format(3, "dc000"), "[rank3]: " + OOM)
    assert explained(pod, *lines).host == "gpu-12"
    assert explained(pod.replace("-x7k2m", "-10-x7k2m"), *lines).host == "trainer-0"


def test_where_several_hosts_say_the_same_none_is_named() -> None:
    """None of them is known to be the first."""
    lines = [f"srun: error: gpu-{n}: task {n}: Exited with exit code 1" for n in (12, 13)]
    assert explained("torchrun", lines[0]).host == "gpu-12"
    assert explained("torchrun", *lines).host is None


def test_a_launcher_that_several_hosts_have_is_of_none() -> None:
    """Their names have no number that shows a column, and pdsh is who knows them."""
    end = ["['python'] exits with return code = 1", "pdsh@a: {}: ssh exited with exit code 1"]
    lines = [f"{name}: {line.format(name)}" for line in end for name in ("wks-a", "wks-b")]
    lines = [line.partition(": ")[2] if "pdsh" in line else line for line in lines]
    assert explained(*lines).host is None
    assert explained(*lines[::2]).host == "wks-a"


@pytest.mark.parametrize(("form", "first"), [("gpu-{}: {}", 12), ("{}: slurmstepd: {}", 1)])
def test_what_no_pattern_knows_is_of_no_host_where_several_say_it(form: str, first: int) -> None:
    """Not even of the one that says it first: what they share is to blame."""
    numbers = range(first, first + 3)
    begin = [form.format(n, "begin") for n in numbers] * 3
    said = [form.format(n, "error: cannot import the image of the job") for n in numbers]
    ends = [f"srun: error: gpu-{n + 11}: task {n}: Exited with exit code 1" for n in numbers]
    ends = ends if first == 1 else []
    one, several = explained(*begin, said[0], *ends), explained(*begin, *said, *ends)
    assert (one.statement, one.host) == (several.statement, "gpu-12")
    assert several.host is None


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("rank 3 in world size 8 is assigned", (3,)),
        ("Process rank: 3, world size: 8, device: cuda:3", (3,)),
        ("train.py: rank 3/8 local_rank 3", (3,)),
        ("[info] RANK=3 LOCAL_RANK=3 WORLD_SIZE=8", (3,)),
        ("tensor parallel rank 3/8 is ready", ()),
        ("rank 3 has 8 shards", ()),
        ("rank 9/8", ()),
    ],
)
def test_a_process_says_which_rank_it_is(line: str, ranks: tuple[int, ...]) -> None:
    """Its pid, or a log of its own, shows whose the other lines are."""
    other = "rank 0 in world size 8 is assigned"
    one, two = "==> a.log <==", "==> b.log <=="
    assert explained(one, other, two, line, "ValueError: a wrong label").ranks == ranks
    assert explained(one, line, two, line, "ValueError: a wrong label").ranks == ()
    assert explained(f"(W pid=77) {line}", "(W pid=77) ValueError: a wrong label").ranks == ranks


def test_a_pid_is_of_a_host() -> None:
    """In every container it is 1."""
    lines = [f"pod-{n}:1:8 [0] NCCL INFO " + COMM.format(n, "dc000") for n in (2, 3)]
    error = "pod-3:1:8 [0] init.cc:77 NCCL WARN Cuda failure 'out of memory'"
    assert explained(*lines, error).ranks == (3,)


def test_a_host_has_its_shortest_name() -> None:
    """A scheduler knows it by that one."""
    summary = "srun: error: gpu-3: task 3: Exited with exit code 1"
    assert explained("gpu-3.cluster:77:78 [3] NCCL INFO " + COMM.format(3, "dc000"),
                     "[rank3]: " + OOM, summary).host == "gpu-3"  # fmt: skip


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Cannot bind to 192.0.2.7:30050", "192.0.2.7"),
        ("Cannot bind to 127.0.0.1:30050", None),
        ("Cannot connect to 192.0.2.7:30050", None),
    ],
)
def test_an_address_that_a_process_binds_is_its_own(text: str, host: str | None) -> None:
    """A launcher's host is that of another process then."""
    summary = "srun: error: gpu-12: task 0: Exited with exit code 1"
    assert explained(f"OSError: {text}", "torchrun", summary).host == host


def test_more_exceptions_than_failed_ranks_may_be_of_other_processes() -> None:
    """A launcher reports its own ranks only."""
    summary = [
        "Root Cause (first observed failure):",
        "  time      : 2026-01-05_10:00:00",
        "  host      : gpu-12",
        "  rank      : 2 (local_rank: 2)",
        "  exitcode  : 1 (pid: 77)",
    ]
    raised = ["Traceback (most recent call last):", '  File "a.py", line 1, in f']
    one, two = [*raised, "ValueError: a label"], [*raised, "OSError: no server"]
    assert explained(*one, *summary).ranks == (2,)
    assert explained(*one, *two, *summary).ranks == ()


def test_a_list_of_too_many_ranks_is_none() -> None:
    """A line must not cost more than its length."""
    assert len(numbers("0-9999")) == 10_000
    assert numbers("0-10000") == numbers("0-9999, 7") == ()
    for last, host in ((9999, "gpu-13"), (10_000, None)):
        line = f"ranks: {{'gpu-12': [0-4], 'gpu-13': [5-{last}]}}"
        assert explained(line, "[rank5]: " + OOM).host == host


LOST = (
    "[rank2]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process "
    "exited or there was a network error, NCCL version 2.27.3"
)


@pytest.mark.parametrize(
    ("said", "host"),
    [
        ("fatal: no free port for the controller", "job-pod-1"),
        ("fatal: another task died, reason: no answer of the controller", None),
    ],
)
def test_who_speaks_of_another_process_is_not_the_host_of_the_cause(
    said: str, host: str | None
) -> None:
    """What no pattern knows may be of the other one."""
    lines = [f"[job-pod-{n}] step {step}" for step in range(3) for n in (0, 1)]
    finding = explained(*lines, f"[job-pod-1] {said}")
    assert (finding.outcome, finding.host) == ("found", host)


@pytest.mark.parametrize(
    ("host", "address", "ranks"),
    [("gpu-7", "dc", (5,)), ("gpu-7", "1b", ()), ("gpu-8", "dc", ())],
)
def test_a_gpu_that_the_kernel_names_is_that_of_the_rank_on_it(
    host: str, address: str, ranks: tuple[int, ...]
) -> None:
    """The driver's own words have no address; the kernel's log, in a part of the text, has it."""
    seats = [
        f"gpu-{host}:{70 + rank}:90 [{rank}] NCCL INFO comm 0x5e rank {rank} nranks 8 cudaDev "
        f"{rank % 4} busId {bus}000 - Init COMPLETE"
        for rank, host, bus in ((1, 6, "1b"), (5, 7, "dc"))
    ]
    hung = "gpu-7: HW Exception by GPU node-9 (Agent handle: 0x55d1c0a7f2b0) reason :GPU Hang"
    kernel = f"[500967.871516] amdgpu 0000:{address}:00.0: amdgpu: GPU reset begin!"
    chatter = ["gpu-6: up", "gpu-7: up"] * 3
    finding = explained(*chatter, *seats, hung, f"==> dmesg ({host}) <==", kernel)
    assert finding.slug == "gpu-lost"
    assert (finding.host, finding.ranks) == ("gpu-7", ranks)


@pytest.mark.parametrize(
    ("number", "divisor"),
    [(10**11, 1), (10**11 + 1000, 1000), (10**14, 1000), (10**14 + 1_000_000, 1_000_000)],
)
def test_a_number_is_a_time_of_its_magnitude(number: int, divisor: int) -> None:
    """In seconds, as Fluent Bit has it, milliseconds, or microseconds, as journald has it."""
    record = {"ts": number, "host": "gpu-7", "msg": OOM}
    assert explained(json.dumps(record)).time == number / divisor


def test_an_answer_has_one_reason_against_each_symptom() -> None:
    """Of victims that say the same, one is enough."""
    lost = "[rank{}]: RuntimeError: NCCL error: remote process exited or there was a network error"
    finding = explained("[rank1]: " + OOM, *(lost.format(rank) for rank in (2, 3, 4)))
    assert len(finding.against) == 1


@pytest.mark.parametrize(
    ("head", "tail", "host"), [(6, 0, "job-pod-1"), (7, 0, None), (0, 2, None)]
)
def test_a_batch_script_may_print_before_a_collector_does(
    head: int, tail: int, host: str | None
) -> None:
    """Less than what has a pod and a container before it: other lines may begin with two words."""
    said = [f"job-pod-{n % 2} trainer step {n}" for n in range(8)]
    error = "job-pod-1 trainer ValueError: a wrong label"
    finding = explained(*["loading modules"] * head, *said, error, *["the end"] * tail)
    assert finding.host == host


def test_what_several_pods_say_is_of_no_pod() -> None:
    """As if the image of all of them lacks something."""
    form = "[pod/job-{}/pytorch] {}"
    begin = [form.format(pod, "begin") for pod in (0, 1, 2)] * 3
    said = [form.format(pod, "error: cannot load the plug-in, pid 80") for pod in (0, 1, 2)]
    one, several = explained(*begin, said[1]), explained(*begin, *said)
    assert (one.statement, one.pod, one.pid) == (several.statement, "job-1", 80)
    assert (several.host, several.pod, several.pid) == (None, None, None)
