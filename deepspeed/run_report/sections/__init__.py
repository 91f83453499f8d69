"""What the page shows, in order: sections of charts and tables, and what is not in the log with the setting that writes it.

    Run --> facts --> [Section("Training", [LineChart, ...]), ...] + [Absent("Experts", "..."), ...]

Called by `page`. Does not live here: numbers (`facts`), geometry (`charts`, `grids`), markup (the templates).
"""

from deepspeed.run_report.sections.kinds import Absent, Block, Section
from deepspeed.run_report.sections.page_order import sections

__all__ = ["Absent", "Block", "Section", "sections"]
