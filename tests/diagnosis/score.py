"""How many of the cases get their cause: ``python -m tests.diagnosis.score``, or ``make diagnose-score``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_torchdist.diagnosis import logs, reading
from jupyter_torchdist.protocol.events import Finding

CASES = Path(__file__).parent / "cases"
FOLDERS = ("recorded", "seen", "held-out")


@dataclass(frozen=True)
class Case:
    """A log whose cause is known. ``wanted``: the codes that are right as the first finding."""

    path: Path
    told: dict[str, Any]

    @property
    def healthy(self) -> bool:
        return bool(self.told["healthy"])

    @property
    def wanted(self) -> tuple[str, ...]:
        return (self.told["cause"], *self.told.get("also", ()))

    def findings(self) -> list[Finding]:
        return logs.diagnose([reading.of_file(self.path)])

    def is_right(self, found: list[Finding]) -> bool:
        """A healthy log may have warnings; another one has its cause first."""
        if self.healthy:
            return all(finding.severity != "fault" for finding in found)
        return bool(found) and found[0].code in self.wanted


def cases(folder: str) -> Iterator[Case]:
    """Of one folder, by name."""
    for path in sorted((CASES / folder).glob("*.json")):
        yield Case(path.with_suffix(".log"), json.loads(path.read_text("utf-8")))


def main() -> None:
    """Recall: failed jobs whose cause comes first. Precision: first faults that are right. Misses by name, of seen."""
    for folder in FOLDERS:
        judged = [(case, case.findings()) for case in cases(folder)]
        failed = [(case, found) for case, found in judged if not case.healthy]
        right = sum(case.is_right(found) for case, found in failed)
        named_right = sum(case.is_right(found) and found[0].severity == "fault" for case, found in failed)
        faults = sum(bool(found) and found[0].severity == "fault" for _, found in judged)
        ranks = [(case.told["rank"], found) for case, found in failed if case.told.get("rank") is not None]
        named = sum(bool(found) and found[0].rank == rank for rank, found in ranks)
        print(
            f"{folder:9} {len(judged):3} cases  recall {right}/{len(failed)} = {right / len(failed):.0%}  "
            f"precision {named_right}/{faults} = {named_right / faults:.0%}  culprit's rank {named}/{len(ranks)}"
        )
        for case, found in judged if folder != "held-out" else ():
            if not case.is_right(found):
                codes = ", ".join(one.code for one in found) or "none"
                print(f"  {case.path.stem}: {case.told['cause']}, found {codes}")


if __name__ == "__main__":
    main()
