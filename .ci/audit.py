"""Check the pins against the databases of known vulnerabilities: ``audit.py PIP_AUDIT FILE``.

Always true: a pin that was not checked is reported, and never counts as safe.  pip-audit itself
prints "no known vulnerabilities" when it cannot reach its database and has checked nothing.

Exit status: 1 if a pin has a known vulnerability, else 0.  It is 0 also when no database can be
reached, because the pins did not cause that: a last line reports it (on GitHub as a warning).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Tried in this order; the first that knows any of the pins is used.
_SERVICES = ("pypi", "osv")
_TIMEOUT_S = 600


def look_up(pip_audit: str, requirements: str, service: str) -> list[dict[str, Any]]:
    """The entry of pip-audit for each pin; empty if it cannot reach the database."""
    options = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [pip_audit, "--vulnerability-service", service, *options, "--requirement", requirements],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    try:
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"audit: {service}: {reason}", file=sys.stderr)
        return []
    return entries


def main(pip_audit: str, requirements: str) -> int:
    for service in _SERVICES:
        entries = look_up(pip_audit, requirements, service)
        known = [entry for entry in entries if "skip_reason" not in entry]
        if known:
            return report(service, entries, known)
        print(f"audit: {service} knows none of the pins, or cannot be reached", file=sys.stderr)
    warn("NOTHING WAS AUDITED: no database of known vulnerabilities can be reached from here")
    return 0


def report(service: str, entries: list[dict[str, Any]], known: list[dict[str, Any]]) -> int:
    """Print the vulnerabilities; returns 1 if there is one."""
    skipped = [entry["name"] for entry in entries if "skip_reason" in entry]
    if skipped:
        warn(
            f"{len(skipped)} pins are not in {service}, and were not audited: {', '.join(skipped)}"
        )
    vulnerable = [entry for entry in known if entry["vulns"]]
    for entry in vulnerable:
        for vulnerability in entry["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
            print(f"{entry['name']} {entry['version']}: {vulnerability['id']}; fixed in {fixed}")
    print(
        f"audit: {len(known)} of {len(entries)} pins looked up in {service}:"
        f" {len(vulnerable)} vulnerable"
    )
    return 1 if vulnerable else 0


def warn(what: str) -> None:
    print(
        f"::warning title=audit::{what}" if os.environ.get("GITHUB_ACTIONS") else f"audit: {what}"
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
