"""The node health check that NVIDIA's Resiliency Extension (NVRx) requests before a node joins a
job.

`ft_launcher --ft-node-health-check-endpoint SOCKET` calls `nvhcd.HealthCheckService/RunHealthCheck`
by gRPC over a Unix socket. A separate process (`server`) answers on behalf of the agent
(`service`), which alone knows the verdict (`dshealthd.nvrx.fitness`). The interface is that of NVRx
0.6.0: `src/nvidia_resiliency_ext/shared_utils/proto/nvhcd.proto` and `health_check.py`.
"""
