"""What a run of tests counted, of the XML file that pytest wrote, with the versions of the Python that runs this.

    .venv-pinned/bin/python tests/studies/versions.py outputs/test-pinned.xml test-pinned versions_pinned_cpu.json

Words: the file, the target of the Makefile that ran the tests, the report.
"""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

from verl_prefix.tools.report import provenance

xml, target, out = sys.argv[1:]
suite = ElementTree.parse(xml).getroot().find("testsuite")
counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
report = provenance("verl_prefix.versions/1") | {"target": target} | counts
Path(out).write_text(json.dumps(report, indent=1) + "\n")
