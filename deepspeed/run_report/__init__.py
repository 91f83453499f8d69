"""What a run tells about itself: `deepspeed report` and `deepspeed top` (docs/adr/0023-run-report.md).

    RUN_DIR/rank-00000.jsonl, rank-00001.jsonl, ...     appended to by the run itself
       |
    lines     one line as a record of run_log                            tolerant: another version may have written it
       |
    files     what was appended --> segments, columns: a rank's numbers from a start to the next
       |
    reading   ranks --> attempts, joined over restarts                   also while the run still writes
       |
    facts     what happened, in numbers: curves, memory, waits, ...      pure
       |                                 |
    charts    geometry, downsampled      top     one frame of text
       |
    sections  what the page shows, in order --> page: one HTML file

Lives here: readers alone. Does not live here: whoever writes the log. Called by the launcher's command.
"""

from deepspeed.run_report.reading import Attempt, Run, RunLogNotFoundError, RunReader, read_run

__all__ = ["Attempt", "Run", "RunLogNotFoundError", "RunReader", "read_run"]
