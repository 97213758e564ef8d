"""The ledger knows the form of each program, and which ones whole programs are to replace."""

from __future__ import annotations

import pytest

from rekindle._src.programs.buckets import ADMIT, MEMORY, Bucket, Key
from rekindle._src.programs.ledger import Form, Ledger, ProgramRecord

PREFILL, DECODE = Bucket(2, 32), Bucket(2, 0)


def ledger() -> Ledger:
    return Ledger((PREFILL, DECODE, MEMORY), lambda key: isinstance(key, Bucket))


def offer(book: Ledger, key: Key, form: Form) -> object:
    program = object()
    book.offer(book.need(key), form, program, ProgramRecord(key.name, "compiled", 1.0))
    return program


def test_programs_are_made_in_the_form_that_is_enough() -> None:
    book = ledger()
    assert {book.enough(entry) for entry in book.entries.values()} == {Form.WHOLE}
    book.least = Form.PARTS
    assert [book.enough(entry) for entry in book.entries.values()] == [Form.PARTS, Form.PARTS, Form.WHOLE]
    with pytest.raises(KeyError, match="admit is not in the lattice: r2t32, r2t0, memory"):
        book.need(ADMIT)


def test_programs_in_parts_are_replaced_those_that_decode_first() -> None:
    book = ledger()
    book.least = Form.PARTS
    first = offer(book, PREFILL, Form.PARTS)
    book.need(DECODE)  # is being made when parts are enough no more
    offer(book, MEMORY, Form.WHOLE)
    book.least = Form.WHOLE
    assert [entry.key for entry in book.jobs()] == [DECODE, PREFILL] and book.provisional
    offer(book, DECODE, Form.PARTS)
    assert book.ready[PREFILL] is first
    whole = offer(book, PREFILL, Form.WHOLE)
    assert book.ready[PREFILL] is whole and [entry.key for entry in book.jobs()] == [DECODE]
    book.settle(book.entries[DECODE])
    assert not book.jobs() and not book.provisional and book.entries[DECODE].form is Form.PARTS


def test_a_closed_ledger_has_records_and_no_programs() -> None:
    book = ledger()
    offer(book, MEMORY, Form.WHOLE)
    offer(book, DECODE, Form.WHOLE)
    book.close()
    assert not book.ready and [record.name for record in book.records()] == ["r2t0", "memory"]
    assert {entry.form for entry in book.entries.values()} == {Form.NONE}


def test_a_program_is_made_next_until_the_last_of_its_makers_has_left() -> None:
    """Warming and demand may both wait for it; the first to leave took the other's mark along."""
    book = ledger()
    with book.made_next(DECODE):
        with book.made_next(DECODE):
            assert book.soon(DECODE)
        assert book.soon(DECODE) and not book.soon(PREFILL)
    assert not book.soon(DECODE)
