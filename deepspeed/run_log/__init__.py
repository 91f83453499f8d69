"""The run log: what every rank of a run leaves behind, one JSON object a line (docs/adr/0022-run-log.md).

    engine.step_log --> records --> RunLogWriter --> RUN_DIR/rank-00000.jsonl     one file per rank, appended

Lives here: the records and the file. Does not live here: when a record is due and what goes into it (`engine.step_log`),
readers (`run_report`). Knows no torch.
"""

from deepspeed.run_log.records import (
    FORMAT,
    KINDS,
    Checkpoint,
    CommSums,
    End,
    Experts,
    Profile,
    ProfileRow,
    RankStep,
    Record,
    Schedule,
    Start,
    Step,
    line_of,
)
from deepspeed.run_log.writer import RunLogWriter, engine_folder, file_name, free_engine

__all__ = [
    "FORMAT",
    "KINDS",
    "Checkpoint",
    "CommSums",
    "End",
    "Experts",
    "Profile",
    "ProfileRow",
    "RankStep",
    "Record",
    "RunLogWriter",
    "Schedule",
    "Start",
    "Step",
    "engine_folder",
    "file_name",
    "free_engine",
    "line_of",
]
