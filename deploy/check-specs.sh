#!/usr/bin/env bash
# Checks specs for CI: annotations on standard output, the same findings as SARIF in a file. action.yml runs it.
#
#   SPECS   files or globs, one a line; ** crosses folders
#   SARIF   file to write; empty: none
#   STRICT  "true": warnings fail too
#
# Exit codes: 0 nothing found, 1 errors in specs, 2 no such specs.
set -euo pipefail
shopt -s globstar nullglob

specs=()
while IFS= read -r pattern; do
    pattern=${pattern#"${pattern%%[![:space:]]*}"}
    pattern=${pattern%"${pattern##*[![:space:]]}"}
    if [ -n "$pattern" ]; then
        IFS=
        # shellcheck disable=SC2206 # a glob is to be expanded, blanks are part of a name
        found=($pattern)
        unset IFS
        specs+=("${found[@]}")
    fi
done <<<"${SPECS:-}"
if [ "${#specs[@]}" -eq 0 ]; then
    printf 'partool: no spec matches: %s\n' "${SPECS:-}" >&2
    exit 2
fi

options=(--check)
if [ "${STRICT:-}" = true ]; then
    options+=(--strict)
fi
code=0
partool plan "${options[@]}" --output github -- "${specs[@]}" || code=$?
if [ -n "${SARIF:-}" ]; then
    again=0
    partool plan "${options[@]}" --output sarif -- "${specs[@]}" >"$SARIF" || again=$?
    if [ "$again" -gt 1 ]; then
        exit "$again"
    fi
fi
exit "$code"
