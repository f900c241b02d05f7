"""What is wrong with this node now: the one home of that judgement.

`judge` reads samples as the collectors, the probes and the watch for hangs left them, and returns
`Finding`s. Each is one alert of `dshealthd.symptoms`, as far as one moment on one node shows it:
slug, severity, wording and first step come from there, limits from `limits`. The page, `dshealthd
status`, the health check of NVRx and whoever reads `/api/v1/status` render findings and judge
nothing themselves.

What takes history (a rate, a day's median) or other nodes is left to Prometheus.
"""
