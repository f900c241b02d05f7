"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How fast examples are drawn says more of the machine than of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
