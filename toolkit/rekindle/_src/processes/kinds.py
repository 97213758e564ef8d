"""The kinds of messages between processes, and the longest content of each.

leader → follower                                   follower → leader
WELCOME       the session's options and model       FACTS     facts that must be the same everywhere
AGREED        values that all processes agreed on   LOADED    programs and weights are there
PREPARE       make a program ready                  READY     it is ready
STEP … RENEW  calls of programs, in their order     DONE      a step's tokens, as a checksum
KEEP          a page's part for host memory
READ          pages to be read from disk            HAVE      the parts of them that are there
STORE         pages whose parts are to be written
FORGET        parts on disk are to be removed
DROP          pages that leave host memory
FETCH         a page that is needed whole           PART      the part of it that is there
LOAD_WEIGHTS  read other weights                    WEIGHTS   their fingerprint, or the error
TAKE_WEIGHTS  and use them; DROP_WEIGHTS: don't
PING          still there                           PING      still there
CLOSE         the session ends                      FAILED    the reason why it can't go on

Between sessions that share pages, which are no team:

caller → sharer                                     sharer → caller
IDENTITY      the identity of its pages             IDENTITY  the same, and memory to share; FAILED: why they don't fit
MAPPED        it reads that memory
LIST          how many pages it has room for        LISTED    an index of the likeliest
WANT          digests and keys of pages             PAGES     those that follow the message; SENT: no more
"""

from __future__ import annotations

import enum

_KIB, _MIB = 1 << 10, 1 << 20


class Kind(enum.IntEnum):
    """The kind of a message; its number is part of the protocol."""

    PING = 1
    CLOSE = 2
    FAILED = 3
    WELCOME = 4
    FACTS = 5
    AGREED = 6
    LOADED = 7
    PREPARE = 8
    READY = 9
    STEP = 10
    CHOOSE = 11
    ADMIT = 12
    GATHER = 13
    SCATTER = 14
    RENEW = 15
    DONE = 16
    LOAD_WEIGHTS = 17
    WEIGHTS = 18
    TAKE_WEIGHTS = 19
    DROP_WEIGHTS = 20
    IDENTITY = 21
    LIST = 22
    LISTED = 23
    WANT = 24
    PAGES = 25
    SENT = 26
    MAPPED = 27
    COLLECT = 28
    KEEP = 29
    DROP = 30
    FETCH = 31
    PART = 32
    READ = 33
    HAVE = 34
    STORE = 35
    FORGET = 36


# Bytes of a message's content. Nothing is allocated for a longer one.
LIMITS = {
    Kind.PING: 0,
    Kind.CLOSE: 0,
    Kind.FAILED: 64 * _KIB,
    Kind.WELCOME: _MIB,
    Kind.FACTS: _MIB,
    Kind.AGREED: _MIB,
    Kind.LOADED: 0,
    Kind.PREPARE: 64,
    Kind.READY: 64 * _KIB,
    Kind.STEP: 64 * _MIB,
    Kind.CHOOSE: 64 * _MIB,
    Kind.ADMIT: 16 * _MIB,
    Kind.GATHER: _KIB,
    Kind.SCATTER: _KIB,
    Kind.RENEW: 0,
    Kind.DONE: 16,
    Kind.LOAD_WEIGHTS: 64 * _KIB,
    Kind.WEIGHTS: 64 * _KIB,
    Kind.TAKE_WEIGHTS: 0,
    Kind.DROP_WEIGHTS: 0,
    Kind.IDENTITY: 64 * _KIB,
    Kind.LIST: 8,
    Kind.LISTED: 64 * _MIB,
    Kind.WANT: 4 * _MIB,
    Kind.PAGES: _MIB,
    Kind.SENT: 0,
    Kind.MAPPED: 0,
    Kind.COLLECT: _KIB,
    Kind.KEEP: 1 << 30,
    Kind.DROP: _MIB,
    Kind.FETCH: 64,
    Kind.PART: 1 << 30,
    Kind.READ: 64 * _MIB,
    Kind.HAVE: 64 * _MIB,
    Kind.STORE: 64 * _MIB,
    Kind.FORGET: 0,
}
