#!/usr/bin/env bash
# Installs what the tests need of the system and pip cannot bring: a browser for the page, Prometheus
# for metrics and alert rules, and the libraries of Mooncake's transfer engine.
# Does nothing if all is there.  Without apt-get and root it says what to install, and fails.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"

packages=()
command -v chromium >/dev/null || packages+=(chromium)
command -v prometheus >/dev/null || packages+=(prometheus)
libraries=$(ldconfig -p)
for library in ibverbs:libibverbs1 numa:libnuma1 curl:libcurl4; do
    grep -q "lib${library%:*}\.so" <<<"$libraries" || packages+=("${library#*:}")
done
if [ ${#packages[@]} -eq 0 ]; then
    exit
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo -n)
fi
# A mirror that does not answer must not hold CI.
limits=(-o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
install=(apt-get install -q -y --no-install-recommends "${packages[@]}")
echo "Installing for the tests: ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
if ! { "${as_root[@]}" apt-get update -q "${limits[@]}" && "${as_root[@]}" "${install[@]}" "${limits[@]}"; } >/dev/null; then
    echo "Some tests need packages of the system.  As root: apt-get update && ${install[*]}" >&2
    exit 1
fi
