#!/usr/bin/env bash
# fuzz.sh TIME MODULE…: every fuzz target of the modules, one after the other,
# since `go test -fuzz` takes one at a time. To find none is a failure.
set -euo pipefail
fuzztime=$1
shift

# Prints "folder name" for each target of the module in the current folder.
targets() {
	go list -f '{{$d := .Dir}}{{range .TestGoFiles}}{{$d}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$d}}/{{.}}{{"\n"}}{{end}}' ./... |
		while read -r file; do
			[[ -n $file ]] || continue
			# grep finds nothing in most files, which is no error here.
			{ grep -oE '^func Fuzz[A-Za-z0-9_]*' "$file" || true; } | sed "s|^func |$(dirname "$file") |"
		done
}

found=0
for module in "$@"; do
	list=$(cd "$module" && targets) # by itself, so that its failure is one here
	while read -r folder name; do
		[[ -n $name ]] || continue
		echo "== $module: $name for $fuzztime"
		(cd "$folder" && go test -run '^$' -fuzz "^$name\$" -fuzztime "$fuzztime" .)
		found=$((found + 1))
	done <<<"$list"
done
if ((found == 0)); then
	echo "no fuzz target found in: $*" >&2
	exit 1
fi
