"""Benchmarks: what is timed, how, and the tables and figures that show it. Needs the extra `bench`.

`kernels` runs the kernels of one GDN layer on a GPU: `workload` says what is timed, `peers` does the same with other
people's packages, `timing` replays it, `floors` counts the bytes that must move, `records` is what is written, `tables`
and `plot` show it.
"""
