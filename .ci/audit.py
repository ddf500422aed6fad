"""Looks the pins up in the databases of known vulnerabilities: ``audit.py PIP_AUDIT FILE``.

Always true: what was not looked up is said, and never counts as found well.  pip-audit itself
says "no known vulnerabilities" where its database cannot be reached and it has looked up nothing.

Exit status: 1 if a pin has a known vulnerability; else 0, also where no database can be reached,
which is no fault of the pins: a last line says so (on GitHub as a warning of the run).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# In this order; the first that knows of any of the pins is taken.
_SERVICES = ("pypi", "osv")
_TIMEOUT_S = 600


def look_up(pip_audit: str, requirements: str, service: str) -> list[dict[str, Any]]:
    """What pip-audit says of each pin; nothing if it cannot reach the database."""
    options = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [pip_audit, "--vulnerability-service", service, *options, "--requirement", requirements],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    try:
        told: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = (done.stderr.strip().splitlines() or ["no reason told"])[-1]
        print(f"audit: {service}: {why}", file=sys.stderr)
        return []
    return told


def main(pip_audit: str, requirements: str) -> int:
    for service in _SERVICES:
        told = look_up(pip_audit, requirements, service)
        known = [one for one in told if "skip_reason" not in one]
        if known:
            return report(service, told, known)
        print(f"audit: {service} knows none of the pins, or cannot be reached", file=sys.stderr)
    warn("NOTHING WAS AUDITED: no database of known vulnerabilities can be reached from here")
    return 0


def report(service: str, told: list[dict[str, Any]], known: list[dict[str, Any]]) -> int:
    """Say what was found; 1 if something was."""
    skipped = [one["name"] for one in told if "skip_reason" in one]
    if skipped:
        warn(
            f"{len(skipped)} pins are not in {service}, and were not audited: {', '.join(skipped)}"
        )
    found = [one for one in known if one["vulns"]]
    for one in found:
        for vulnerability in one["vulns"]:
            mended = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            print(f"{one['name']} {one['version']}: {vulnerability['id']}; mended in {mended}")
    print(
        f"audit: {len(known)} of {len(told)} pins looked up in {service}: {len(found)} vulnerable"
    )
    return 1 if found else 0


def warn(what: str) -> None:
    print(
        f"::warning title=audit::{what}" if os.environ.get("GITHUB_ACTIONS") else f"audit: {what}"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
