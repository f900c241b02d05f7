"""What is wrong with this node now. This package alone judges that.

`judge` judges each time the samples change: rules (`gpus`, `gpu_links`, `storage` and others) yield
signs from the samples of this moment (`series`) and their past (`past`), `episodes` makes them
findings after their hold and keeps them over restarts, and `catalogue` words them from
`dshealthd.symptoms`. Limits are options (`limits`). The page, `dshealthd status`, Slurm,
Kubernetes, NVRx and the alerts show these findings and judge nothing themselves. A rule that fails
hides none of what the others see.

What takes several nodes is left to Prometheus, which compares findings.
"""
