#!/usr/bin/env bash
# Debian's Chromium for the tests of the dashboard, where none is there and we may install it; else those tests are skipped and say so.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "no Chromium, and no right to install it: the tests of the dashboard are skipped" >&2
  exit 0
fi
echo "Installing Debian's Chromium for the tests of the dashboard"
log=$(mktemp)
if ! { apt-get update && apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; } > "$log" 2>&1; then
  tail -n 5 "$log" >&2
  echo "Chromium could not be installed: the tests of the dashboard are skipped" >&2
fi
rm -f "$log"
