"""A fleet as series: nodes with the life that they have, healthy or with faults, for promtool to
replay.
"""
