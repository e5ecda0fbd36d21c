"""The journal: durable, torn tails cut, later terms fence earlier writers."""

import os
import subprocess
import sys
import textwrap

import pytest

from k3ray.control.journal import Journal, TornTail, latest_term, read_records
from k3ray.control.records import (
    ActorReady,
    PeerRecord,
    PlanSwitched,
    StepCommitted,
    SupernodeUp,
    TermGranted,
    decode,
    encode,
)
from k3ray.errors import FencedError, JournalError
from k3ray.ids import Incarnation, Role

LIFE = Incarnation(actor="group-0", term=1)
RECORDS = (
    SupernodeUp(name="k3", preset="k3-tiny", line="main", partition=((0, 1), (2, 3))),
    TermGranted(incarnation=LIFE, role=Role.EXPERT_GROUP),
    ActorReady(
        incarnation=LIFE, role=Role.EXPERT_GROUP, node="n", pid=7,
        process_started_unix_s=1.5, endpoint="ipc:///x",
    ),
    PlanSwitched(version=1, layout=1, peers=(PeerRecord(incarnation=LIFE, endpoint="ipc:///x"),)),
    StepCommitted(
        lease_id="l", line="main", step=1, attempt=2,
        body={"loss": 1.25, "text": "line\nbreak", "holder_digests": {"group-0#1": "ab"}},
    ),
)  # fmt: skip


def write_all(path):
    journal = Journal.open(path)
    for record in RECORDS:
        journal.append(record)
    journal.close()


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.type)
def test_records_round_trip(record):
    text = encode(record)
    assert "\n" not in text
    assert decode(text) == record


def test_unknown_record_is_refused():
    with pytest.raises(JournalError, match="does not understand"):
        decode('{"type": "teleported"}')


def test_reopen_reads_everything_and_takes_the_next_term(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_all(path)
    again = Journal.open(path)
    assert (again.term, again.records, again.torn) == (2, RECORDS, None)
    assert read_records(path) == RECORDS


def test_torn_at_every_byte_recovers_a_prefix(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write_all(whole)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    path = tmp_path / "torn.jsonl"
    borders = {end + shift for end in ends for shift in (-1, 0, 1)}
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        num = max(sum(end <= size for end in ends) - 1, 0)
        assert read_records(path) == RECORDS[:num]
        if size not in borders:
            continue  # opening writes and fsyncs: only where it matters most
        journal = Journal.open(path)
        assert journal.records == RECORDS[:num]
        good = max((end for end in ends if end <= size), default=0)
        expected = TornTail(offset=good, size_bytes=size - good) if size > good else None
        assert journal.torn == expected
        journal.append(RECORDS[0])  # and it goes on from there
        journal.close()
        assert read_records(path) == (*RECORDS[:num], RECORDS[0])


def test_a_flipped_bit_before_the_tail_is_damage_not_a_tail(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_all(path)
    data = bytearray(path.read_bytes())
    data[120] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(JournalError, match="damaged at byte"):
        Journal.open(path)
    assert path.read_bytes() == bytes(data)


def test_an_earlier_controller_is_fenced_at_its_next_append(tmp_path):
    path = tmp_path / "journal.jsonl"
    old = Journal.open(path)
    old.append(RECORDS[0])
    new = Journal.open(path)
    before = path.read_bytes()
    with pytest.raises(FencedError, match="term 1 is over, term 2"):
        old.append(RECORDS[1])
    assert path.read_bytes() == before
    new.append(RECORDS[1])
    assert read_records(path) == RECORDS[:2]


def test_a_taken_term_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    Journal.open(path)
    monkeypatch.setattr("k3ray.control.journal.latest_term", lambda path: 0)  # lost the race
    with pytest.raises(JournalError, match="another controller took term 1"):
        Journal.open(path)


def test_many_openers_get_distinct_terms(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from k3ray.control.journal import Journal
        from k3ray.errors import JournalError
        for _ in range(20):
            try:
                print(Journal.open(Path(sys.argv[1])).term)
            except JournalError:
                pass
    """)
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    terms = [int(line) for run in runs for line in run.communicate()[0].split()]
    assert len(terms) == len(set(terms)) == latest_term(path)
    assert all(run.returncode == 0 for run in runs)


def test_full_disk_leaves_no_part_of_the_record(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from k3ray.control.journal import Journal
        from k3ray.control.records import SupernodeDown
        from k3ray.errors import JournalError
        journal = Journal.open(Path(sys.argv[1]))
        journal.append(SupernodeDown(reason="first"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        try:
            journal.append(SupernodeDown(reason="x" * 500))
        except JournalError as error:
            print(error.fields["errno"])
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
    assert [record.reason for record in read_records(path)] == ["first"]


def test_unwritable_place_is_a_typed_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(JournalError, match="cannot open the journal"):
        Journal.open(blocker / "journal.jsonl")
    assert os.listdir(tmp_path) == ["file"]
