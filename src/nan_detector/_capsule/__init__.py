"""A capsule: a folder from which one bad step can be run again in another process, on another machine.

`write` makes it while the training runs, `read` opens it as the untrusted input that it is, and `again` runs its step
with a model that the user's code makes. In between: `tensors` and `plain` (values to files and back), `functions` (the
closed list of what may be called), `tape` (the recorded calls), `state` (weights and settings), `evidence` and
`repro` (the guilty operation alone).
"""
