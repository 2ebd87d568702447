"""The demo: three small trainings on real images that show what the detector does, and what it costs.

Nothing is planted: the numbers go bad by themselves, for the reasons for which they do in real runs. The code is
written as a user would write it, and reports point into it.
"""
