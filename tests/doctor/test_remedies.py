"""Each check of the doctor: the test that makes its fault, and how that test mends it."""

from __future__ import annotations

from dshealthd.doctor import node
from dshealthd.doctor.job import checks
from tests.findings.player import FILES
from tests.test_fault_table import exists

PASTED = "pasted"
"""The remedy is run as it is printed, and the check passes."""
STATE = "state"
"""What the remedy leads to is put in place, and the check passes."""
SCENES = "scenes"
"""The check shows findings of its symptom, whose scenes in tests/findings/scenes begin and end
them."""

CHECKS = {
    "agent": (STATE, "test_agent::test_file_that_is_refused"),
    "batch-sizes": (STATE, "job/test_config::test_batch_offers"),
    "checkpoint": (PASTED, "job/test_checkpoint::test_remedy_of_latest"),
    "clock": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "collectives": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "config-conflicts": (STATE, "job/test_config::test_mended_key"),
    "config-file": (STATE, "job/test_config::test_mended_form"),
    "config-keys": (STATE, "job/test_config::test_mended_key"),
    "cuda-devices": (STATE, "test_fabric::test_torch_that_does_not_see_the_gpus"),
    "disk-space": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "fabric-manager": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "gpu-direct": (STATE, "test_gpu_direct::test_peer_memory"),
    "gpu-memory": (STATE, "test_gpu_faults::test_each_fault_is_found_and_passes_once_mended"),
    "gpu-metrics": (STATE, "test_gpu_faults::test_gpus_that_are_released"),
    "gpu-throttling": (STATE, "test_gpu_faults::test_each_fault_is_found_and_passes_once_mended"),
    "gpus": (STATE, "test_gpu_faults::test_each_fault_is_found_and_passes_once_mended"),
    "host-memory": (STATE, "test_host_checks::test_memory_that_runs_out"),
    "host-name": (PASTED, "test_host_name::test_remedies_of_the_host_name"),
    "hostfile": (STATE, "job/test_hosts::test_lines"),
    "hostfile-names": (STATE, "job/test_hosts::test_names"),
    "imex": (STATE, "test_fabric::test_imex"),
    "host-errors": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "infiniband": (STATE, "test_network_checks::test_infiniband_ports_of_one_board"),
    "job-ends": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "job-devices": (STATE, "test_running_jobs::test_ranks_devices_and_variables"),
    "job-hangs": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "job-cpus": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "job-heartbeats": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "job-losses": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "job-nccl-settings": (STATE, "test_running_jobs::test_ranks_devices_and_variables"),
    "launcher": (STATE, "job/test_launcher::test_torchrun_once_on_each_node"),
    "link-suspects": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "listeners": (STATE, "test_network_checks::test_rendezvous_ports_in_time_wait"),
    "loopback": (STATE, "test_network_checks::test_loopback_that_is_down"),
    "maintenance": (PASTED, "test_agent::test_maintenance_that_is_over"),
    "manifest": (STATE, "job/test_manifest::test_faults"),
    "master-address": (STATE, "job/test_hosts::test_master_address"),
    "master-port": (PASTED, "job/test_master_port::test_ports_that_are_none"),
    "job-steps": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "nccl-releases": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "nccl-variables": (PASTED, "job/test_nccl::test_variables"),
    "nvlink": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "nvml": (STATE, "test_gpu_faults::test_broken_nvml"),
    "open-files": (STATE, "test_host_checks::test_asynchronous_requests_that_run_out"),
    "paths": (STATE, "test_host_checks::test_paths_of_the_command_line"),
    "pcie-acs": (STATE, "test_gpu_direct::test_acs"),
    "pcie": (STATE, "test_gpu_faults::test_each_fault_is_found_and_passes_once_mended"),
    "ports": (PASTED, "test_network_checks::test_rendezvous_ports_inside_the_ephemeral_range"),
    "probe-failures": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "probe-rounds": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "process-limits": (STATE, "test_host_checks::test_limits_of_open_files_and_locked_memory"),
    "ranks-and-gpus": (PASTED, "job/test_launcher::test_ranks_and_gpus"),
    "job-rendezvous": (STATE, "test_network_checks::test_master_that_does_not_answer"),
    "job-gpus": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "shared-memory": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "software": (STATE, "test_software::test_software"),
    "ssh": (PASTED, "job/test_hosts::test_new_host_key"),
    "straggler": (SCENES, "test_snapshot_check::test_findings_of_an_agent"),
    "transports": (PASTED, "job/test_nccl::test_transports"),
}


def test_every_check_has_its_line() -> None:
    """The table has the checks that there are; each is mended in a test that exists."""
    names = {check.name for check in node.CHECKS} | {check.name for check in checks.CHECKS}
    assert set(CHECKS) == names
    for name, (level, test) in CHECKS.items():
        assert level in {PASTED, STATE, SCENES}, name
        file, _, function = test.partition("::")
        assert exists(f"tests/doctor/{file}.py::{function}"), name
    slugs = {check.slug for check in node.CHECKS if CHECKS[check.name][0] == SCENES}
    assert slugs <= {file.stem for file in FILES}
