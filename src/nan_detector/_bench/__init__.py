"""What watching costs, measured: workloads, what they are compared with, and the clock.

`nan-detector bench` is a quick look; `benchmarks/` has the whole, and says how to read it.
"""
