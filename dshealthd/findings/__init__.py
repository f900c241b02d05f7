"""What is wrong with this node now. This package alone judges that.

`judge` reads the last samples of the collectors, the probes and the hang detector, and returns
`Finding`s. Each is one alert of `dshealthd.symptoms`, as far as one moment on one node shows it:
slug, severity, wording and first step come from there, limits from `limits`. The page, `dshealthd
status`, the NVRx health check and clients of `/api/v1/status` render findings and judge nothing
themselves.

Anything that needs history (a rate, a day's median) or other nodes is left to Prometheus.
"""
