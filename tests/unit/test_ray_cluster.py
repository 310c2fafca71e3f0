"""What ``@ray_launch`` leaves of Ray on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_torchdist.ranks.ray_cluster import current_cluster_kept


@pytest.mark.parametrize(
    ("before", "written", "after"),
    [
        (None, "10.0.0.1:4711", None),
        ("10.0.0.1:6379", "10.0.0.1:4711", "10.0.0.1:6379"),
        ("10.0.0.1:6379", "10.0.0.1:5000", "10.0.0.1:5000"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        (None, None, None),
    ],
    ids=["none", "another cluster", "another one since", "Ray did not start", "nothing"],
)
def test_the_address_of_the_cluster_that_ends_is_not_left(
    before: str | None, written: str | None, after: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    if before:
        file.write_text(before)
    with current_cluster_kept("127.0.0.1:4711"):
        if written:
            file.write_text(written)
    assert (file.read_text() if file.exists() else None) == after
