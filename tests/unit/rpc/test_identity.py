"""What a certificate's names permit, also names that were issued by mistake."""

from __future__ import annotations

import pytest

from elastic.rpc.identity import (
    JobRole,
    coordinator_identity,
    job_identity,
    missing_identity,
    roles_named,
    unknown_roles,
)

DIGITS = "digits.job.elastic"


@pytest.mark.parametrize("slip", ["viewr", "", "viewer.viewer", "admin", "*"])
def test_a_role_that_does_not_exist_grants_nothing(slip: str) -> None:
    names = [DIGITS, f"{slip}.{DIGITS}"]
    assert roles_named(names, "digits") == frozenset()
    assert unknown_roles(names, "digits") == [f"{slip}.{DIGITS}"]
    for method in ("Attend", "GetStatus", "Drain", "Txn", "Stop"):
        assert missing_identity(names, "digits", method)
    assert coordinator_identity(names, "digits") == f"coordinator.{DIGITS}"


def test_a_role_beside_an_unknown_one_keeps_its_rights() -> None:
    names = [DIGITS, f"viewr.{DIGITS}", f"agent.{DIGITS}"]
    assert roles_named(names, "digits") == {JobRole.AGENT}


@pytest.mark.parametrize("role", ["Viewer", "VIEWER", "viewer"])
def test_names_are_compared_without_case(role: str) -> None:
    names = ["Digits.Job.Elastic", f"{role}.digits.JOB.elastic"]
    assert roles_named(names, "digits") == {JobRole.VIEWER}
    assert missing_identity(names, "digits", "GetStatus") == ""
    assert missing_identity(names, "digits", "Drain") == f"operator.{DIGITS}"


def test_a_name_of_several_labels_of_another_job_is_no_role() -> None:
    long = "a" * 63 + "digits"
    names = [DIGITS, job_identity(long)]
    assert job_identity(long).endswith(f".{DIGITS}")
    assert roles_named(names, "digits") is None
    assert missing_identity(names, "digits", "Drain") == ""
    assert roles_named([*names, f"viewer.{job_identity(long)}"], long) == {JobRole.VIEWER}


def test_without_an_entry_for_a_role_everything_is_allowed() -> None:
    assert roles_named([DIGITS, "n1.example"], "digits") is None
    assert missing_identity([DIGITS], "digits", "Drain") == ""
    assert missing_identity(["n1.example"], "digits", "Drain") == DIGITS
