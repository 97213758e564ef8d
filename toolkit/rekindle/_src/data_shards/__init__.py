"""Data shards: several groups of devices, each with the whole model, that a session serves with one dispatch.

A shard has pages and request slots of its own. On the host, pages and slots are numbered consecutively: shard i's
follow shard i - 1's. On the devices each shard counts its own from 0, so its programs are as in a session without the
axis. Arrays that a program takes or returns for every shard have one part after the other along their first axis.

A session without the axis imports `sizes` alone of this room.
"""
