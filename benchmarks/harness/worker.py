"""One rank of one run: `python worker.py JOB.json` writes `result.RANK.json` beside the job.

The job names a benchmark, a contender and its arguments; the figures, the versions that made them, or one line of error
come back. Runs under the contender's own interpreter, so everything it imports from here works without this package being
installed: our tree comes first on the path of every contender but the original, and last for that one.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    job_file = Path(sys.argv[1])
    job = json.loads(job_file.read_text())
    is_original = job["contender"] == "original"
    sys.path[0:1] = [] if is_original else [str(_ROOT)]
    if is_original:
        sys.path.append(str(_ROOT))
    status = 0
    try:
        measure = importlib.import_module(f"benchmarks.{job['benchmark']}").measure
        result: dict[str, Any] = dataclasses.asdict(measure(job["contender"], job["arguments"]))
        result["versions"] = _versions(is_original=is_original)
    except Exception as error:  # the process boundary: any failure is a result of this run
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip() or f"in {last.name}: {last.line}").splitlines()[0]
        result, status = {"error": f"{type(error).__name__}: {text}"}, 1
    job_file.with_name(f"result.{os.environ['RANK']}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking the interpreter down is no part of any benchmark


def _versions(*, is_original: bool) -> dict[str, str]:
    """Return what was measured; refuse a run that measured the other package."""
    versions = {"python": sys.version.split()[0], "torch": sys.modules["torch"].__version__}
    package = sys.modules.get("deepspeed")
    if package is not None:
        versions["deepspeed"] = package.__version__
        is_ours = _ROOT in Path(str(package.__file__)).resolve().parents
        if is_ours == is_original:
            raise RuntimeError(
                f"measured deepspeed {package.__version__} {'of this tree' if is_ours else 'from elsewhere'}; needed the "
                f"{'original package: install it into the interpreter given by --peer' if is_original else 'tree itself'}."
            )
    return versions


if __name__ == "__main__":
    main()
